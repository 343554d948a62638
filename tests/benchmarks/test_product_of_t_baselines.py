"""The benchmark's baselines recover Gaussians, count what they evaluate, and metrics measure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import MultivariateNormal

from benchmarks.product_of_t_baselines import (
    NUM_DRAWS,
    run_gaussian,
    run_nuts,
    run_pathfinder,
    run_variational,
)
from benchmarks.product_of_t_gaussian import (
    Gaussian,
    batch_and_match_update,
    fit_by_batch_and_match,
    fit_by_score_matching,
    score_matching_update,
)
from benchmarks.product_of_t_metrics import Reference, compare, sliced_wasserstein

MEAN = np.array([1.0, -0.5, 0.3])
COVARIANCE = np.array([[1.0, 0.5, 0.0], [0.5, 2.0, -0.3], [0.0, -0.3, 0.5]])


def log_density(z):
    return MultivariateNormal(jnp.asarray(MEAN), jnp.asarray(COVARIANCE)).log_prob(z)


@pytest.fixture(autouse=True)
def double_precision():
    # The peers mix dtypes and ranks.
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def test_updated_gaussian_has_the_score_it_was_given():
    rng = np.random.default_rng(0)
    point, score = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=3))
    start = Gaussian(jnp.asarray(MEAN), jnp.asarray(COVARIANCE))
    mean, covariance = score_matching_update(start, point, score)
    np.testing.assert_allclose(-np.linalg.solve(covariance, point - mean), score, rtol=1e-10)
    assert np.linalg.eigvalsh(covariance).min() > 0


def test_batch_and_match_update_solves_its_equation():
    rng = np.random.default_rng(1)
    points, scores = rng.normal(size=(20, 3)), rng.normal(size=(20, 3))
    weight = 2.5
    start = Gaussian(jnp.asarray(MEAN), jnp.asarray(COVARIANCE))
    args = (jnp.asarray(points), jnp.asarray(scores), jnp.asarray(weight))
    mean, covariance = batch_and_match_update(start, *args)
    share, offset = weight / (1 + weight), MEAN - points.mean(axis=0)
    mean_score = scores.mean(axis=0)
    u = weight * np.cov(scores.T, bias=True) + share * np.outer(mean_score, mean_score)
    v = COVARIANCE + weight * np.cov(points.T, bias=True) + share * np.outer(offset, offset)
    np.testing.assert_allclose(covariance @ u @ covariance + covariance, v, rtol=1e-9, atol=1e-9)
    expected = MEAN / 3.5 + share * (covariance @ mean_score + points.mean(axis=0))
    np.testing.assert_allclose(mean, expected, rtol=1e-12)


@pytest.mark.parametrize("fit", [fit_by_score_matching, fit_by_batch_and_match])
def test_gaussian_fits_find_a_gaussian(fit):
    start = Gaussian(jnp.zeros(3), jnp.eye(3))
    found = fit(jax.random.key(0), jax.grad(log_density), start, 200, 16)
    np.testing.assert_allclose(found.mean, MEAN, atol=1e-3)
    np.testing.assert_allclose(found.covariance, COVARIANCE, atol=1e-3)


RUNS = {
    "AutoMultivariateNormal": lambda keys: run_variational(
        "AutoMultivariateNormal", keys, log_density, 3, 32_000
    ),
    "AutoBNAFNormal": lambda keys: run_variational("AutoBNAFNormal", keys, log_density, 3, 32_000),
    "AutoIAFNormal": lambda keys: run_variational("AutoIAFNormal", keys, log_density, 3, 32_000),
    "BaM": lambda keys: run_gaussian("BaM", keys, log_density, 3, 3200),
    "Pathfinder": lambda keys: run_pathfinder(1, keys, log_density, 3),
    "MultiPathfinder": lambda keys: run_pathfinder(4, keys, log_density, 3),
    "NUTS": lambda keys: run_nuts(keys, log_density, 3),
}


@pytest.mark.parametrize("method", RUNS)
def test_methods_find_a_gaussian(method):
    if "Pathfinder" in method:
        pytest.importorskip("blackjax")
    fit = RUNS[method]([jax.random.key(5)])[0]
    assert fit.draws.shape == (NUM_DRAWS, 3)
    exact = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, NUM_DRAWS)
    errors = compare(fit.draws, Reference(exact, MEAN, np.sqrt(np.diag(COVARIANCE))))
    # Standard errors of means and deviations of 4,000 draws are 0.016 and 0.011 standard
    # deviations; the rest is what stochastic gradients leave.
    assert errors["mean"] < 0.1 and errors["sd"] < 0.1 and errors["sliced_wasserstein"] < 0.1
    assert fit.scores > 0
    if fit.log_ratios is not None:
        # log p - log q of normalised densities: their mean is -KL(q | p), at this budget at most
        # 0.03 (AutoBNAFNormal). A log q without its Jacobian or constant is off by 0.5 and more.
        assert abs(np.mean(fit.log_ratios)) < 0.06


def test_mean_field_underestimates_correlated_deviations():
    """Its precision is the target's: sd_1 = 1 / sqrt((covariance^-1)_11) = 0.932, not 1."""
    fit = run_variational("AutoNormal", [jax.random.key(0)], log_density, 3, 32_000)[0]
    expected = 1 / np.sqrt(np.diag(np.linalg.inv(COVARIANCE)))
    np.testing.assert_allclose(fit.draws.std(axis=0), expected, rtol=0.06)


def test_distances_of_shifted_draws():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 1))
    # In one dimension a shift by 0.5 costs exactly that, whatever the direction.
    assert sliced_wasserstein(draws + 0.5, draws) == pytest.approx(0.5, rel=1e-9)
    reference = Reference(draws, draws.mean(axis=0), draws.std(axis=0))
    errors = compare(2.0 * draws + 1.0, reference)
    assert errors["sd"] == pytest.approx(1.0, rel=1e-9)
    assert errors["mmd"] > 0.2 > 5 * compare(rng.normal(size=(4000, 1)), reference)["mmd"]
    assert compare(np.full((10, 1), np.nan), reference)["mean"] == np.inf


def test_unequal_numbers_of_draws_are_compared_by_quantiles():
    rng = np.random.default_rng(0)
    large, small = rng.normal(size=(4000, 2)), rng.normal(size=(2000, 2))
    assert sliced_wasserstein(large, small) < 0.06
    assert sliced_wasserstein(rng.normal(size=(3001, 2)), small) < 0.06
