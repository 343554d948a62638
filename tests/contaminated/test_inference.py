"""Covariances, intervals, tests, profiles and bootstrap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from moe_jax.contaminated.inference import covariance, positive_inverse, wald_test
from moe_jax.contaminated.resampling import match_prompts
from tests.contaminated.small import MODEL, data, fitted

J = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
G = np.array([[5.0, 0.5, 0.0], [0.5, 2.0, 0.1], [0.0, 0.1, 3.0]])
ALL = np.ones(3, bool)


def test_the_three_covariances_are_their_formulas():
    np.testing.assert_allclose(covariance(J, G, ALL, "observed"), np.linalg.inv(J), rtol=1e-12)
    np.testing.assert_allclose(covariance(J, G, ALL, "opg"), np.linalg.inv(G), atol=1e-15)
    sandwich = np.linalg.inv(J) @ G @ np.linalg.inv(J)
    np.testing.assert_allclose(covariance(J, G, ALL, "sandwich"), sandwich, rtol=1e-12)
    with pytest.raises(ValueError, match="kind='hessian'"):
        covariance.__wrapped__(J, G, ALL, "hessian")


def test_an_entry_that_does_not_move_is_known():
    movable = np.array([True, False, True])
    cov = covariance(J, G, movable, "observed")
    kept = np.ix_(movable, movable)
    np.testing.assert_allclose(cov[kept], np.linalg.inv(J[kept]), rtol=1e-12)
    assert not cov[1].any() and not cov[:, 1].any()


@pytest.mark.parametrize(
    "matrix",
    [
        np.diag([1.0, 1.0, -1e-3]),
        np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        np.diag([1.0, 1.0, np.nan]),
    ],
    ids=["indefinite", "singular", "nan"],
)
def test_a_matrix_that_is_not_positive_definite_gives_nan_never_a_pseudo_inverse(matrix):
    assert np.all(np.isnan(covariance(matrix, G, ALL, "observed")))
    assert np.all(np.isnan(covariance(matrix, G, ALL, "sandwich")))


def test_units_do_not_make_a_matrix_singular():
    unit = np.array([1e9, 1.0, 1e-9])
    scaled = J * unit[:, None] * unit[None, :]
    np.testing.assert_allclose(
        positive_inverse(scaled) * unit[:, None] * unit[None, :], np.linalg.inv(J), rtol=1e-10
    )


def test_wald_statistic_is_the_quadratic_form():
    cov = np.linalg.inv(J)
    test = wald_test(np.array([1.0, 2.0, 3.0]), np.array([0.5, np.nan, 2.0]), cov)
    difference = np.array([0.5, 1.0])
    sub = cov[np.ix_([0, 2], [0, 2])]
    expected = difference @ np.linalg.solve(sub, difference)
    np.testing.assert_allclose(test.statistic, expected, rtol=1e-12)
    assert test.df == 2
    np.testing.assert_allclose(test.p_value, stats.chi2.sf(expected, 2), rtol=1e-10)
    with pytest.raises(ValueError, match="names no value"):
        wald_test(np.zeros(3), np.full(3, np.nan), cov)


def test_a_fits_covariance_is_the_inverse_of_its_information_in_user_units():
    result = fitted()
    assert result.status == "ok"
    cov = result.cov()
    np.testing.assert_allclose(cov, np.linalg.inv(result.information), rtol=1e-7, atol=1e-12)
    opg = np.linalg.inv(result.outer_product)
    np.testing.assert_allclose(result.cov("opg"), opg, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(
        result.cov("sandwich"), cov @ result.outer_product @ cov, rtol=1e-7, atol=1e-12
    )
    low, high = result.confint(0.9).T
    np.testing.assert_allclose(high - low, 2 * 1.6448536 * result.standard_errors(), rtol=1e-6)


def test_delta_method_of_known_functions():
    result = fitted()
    error = dict(zip(result.names, result.standard_errors(), strict=True))
    odds = result.delta(lambda p: jnp.exp(p["tau"]))
    np.testing.assert_allclose(odds.standard_error, np.exp(result.params["tau"]) * error["tau"])
    # w at x = 0.5 has the derivative w (1 - w) (0.5, 1) in (beta, tau).
    gate = result.delta(lambda p: jax.nn.sigmoid(0.5 * p["beta"][0] + p["tau"]))
    w = result.gate(np.array([[0.5]]))[0]
    np.testing.assert_allclose(gate.value, w, rtol=1e-12)
    slope = w * (1 - w) * np.array([0.5, 1.0])
    expected = np.sqrt(slope @ result.cov()[:2, :2] @ slope)
    np.testing.assert_allclose(gate.standard_error, expected, rtol=1e-10)


def test_delta_method_ignores_the_variance_of_what_it_does_not_use():
    result = fitted()
    cov = result.cov()
    cov[-1, :] = cov[:, -1] = np.nan
    from moe_jax.contaminated.inference import delta_method

    odds = delta_method(lambda p: jnp.exp(p["tau"]), MODEL.family, result.theta, cov, 1)
    assert np.isfinite(odds.standard_error)


def test_profile_is_the_maximum_with_the_parameter_fixed():
    result = fitted()
    tau = float(result.params["tau"])
    profile = result.profile("tau", values=np.linspace(tau - 2.0, tau + 2.0, 9))
    assert profile.converged.all() and abs(profile.gain) < 1e-7
    held = dataclasses.replace(MODEL, fixed={"tau": profile.values[7]})
    np.testing.assert_allclose(profile.objective[7], held.fit(*data()).loglik, rtol=1e-9)
    np.testing.assert_array_equal(profile.theta[:, 1], profile.values)
    # 1.92 is half the 95 % point of chi-squared(1): inside the interval the deviance is lower.
    inside = (profile.values > profile.interval[0]) & (profile.values < profile.interval[1])
    np.testing.assert_array_equal(inside, profile.objective > result.loglik - 1.9207)
    assert profile.interval[0] < tau < profile.interval[1]


def test_a_profile_that_the_grid_cuts_off_has_an_infinite_end():
    result = fitted()
    tau = float(result.params["tau"])
    profile = result.profile("tau", values=tau + 0.01 * np.linspace(-2.0, 2.0, 9))
    np.testing.assert_array_equal(profile.interval, [-np.inf, np.inf])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kappa", {}, "name='kappa', expected one of"),
        ("tau", {"fixed": {"tau": 0.0}}, "name='tau' is fixed at 0"),
        ("tau", {"gate_prior_scale": 5.0}, "no profile while gate_prior_scale is set"),
    ],
)
def test_profiles_that_do_not_exist_are_named(name, changes, message):
    result = dataclasses.replace(fitted(), model=dataclasses.replace(MODEL, **changes))
    with pytest.raises(ValueError, match=message):
        result.profile(name)


def test_bootstrap_agrees_with_the_information_and_with_itself():
    # Report 15: a bootstrap of three starts or more divides by zero (stepmix#24).
    result = fitted()
    first = result.bootstrap(jax.random.key(0), n_boot=100)
    again = result.bootstrap(jax.random.key(0), n_boot=100)
    np.testing.assert_array_equal(first.theta, again.theta)
    # 100 draws know a standard deviation to 7 %; n = 64 adds what normal theory neglects.
    ratio = first.standard_errors() / result.standard_errors()
    assert np.all((ratio > 0.6) & (ratio < 2.0)), ratio
    low, high = first.confint().T
    assert np.all((low < result.theta) & (result.theta < high))
    basic = first.confint(kind="basic")
    np.testing.assert_allclose(basic[:, 0] + high, 2 * result.theta)


def test_bootstrap_refuses_weights_that_are_no_rows():
    result = dataclasses.replace(fitted(), weight=np.full(64, 2.0))
    with pytest.raises(ValueError, match="sample_weight other than 0 and 1"):
        result.bootstrap(jax.random.key(0), n_boot=3)


def test_prompts_are_matched_by_assignment():
    rng = np.random.default_rng(0)
    reference = np.array([0.0, 0.0, 5.0, 1.0, -5.0, 2.0])
    blocks = reference.reshape(3, 2) + 0.1 * rng.normal(size=(20, 3, 2))
    orders = [rng.permutation(3) for _ in range(20)]
    shuffled = np.stack([b[o] for b, o in zip(blocks, orders, strict=True)]).reshape(20, 6)
    matched = match_prompts(shuffled, reference, np.ones(6), 3)
    np.testing.assert_array_equal(matched, blocks.reshape(20, 6))
    np.testing.assert_array_equal(match_prompts(shuffled, reference, np.ones(6), 1), shuffled)
