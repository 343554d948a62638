"""Fits: convergence in the family, equivariance, Gaussians, numpyro models, compile counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from moe_jax.product_of_t import (
    PAPER,
    SAFEGUARDED,
    ProductOfT,
    fit_product_of_t,
    full_experts,
    samplers,
    targets,
    update,
)
from moe_jax.product_of_t.experts import expert_scores
from tests.product_of_t import products
from tests.product_of_t.products import EXPONENTS, LOC, PRECISION

SMALL = dataclasses.replace(
    SAFEGUARDED, rounds=1, iterations=60, batch_size=128, average=False, num_draws=1000
)
PAPER_SMALL = dataclasses.replace(PAPER, iterations=30, batch_size=128, num_draws=1000)
START = np.full(4, 7.0 / 8.0)
MAP_LOC, MAP_SCALE = np.array([3.0, -1.0]), np.array([[2.0, 0.0], [0.7, 0.3]])


def in_family(z):
    """The example product, unnormalised."""
    return ProductOfT(
        products.example_experts(), jnp.asarray(EXPONENTS), log_normalizer=0.0
    ).unnormalized_log_prob(z)


def in_family_mapped(z):
    return in_family(jnp.linalg.solve(jnp.asarray(MAP_SCALE, z.dtype), z - MAP_LOC))


def fit_given(target, settings=SMALL, loc=LOC, precision=PRECISION, key=0, exponents=START):
    with jax.enable_x64(True):
        experts = full_experts(jnp.asarray(loc), jnp.asarray(precision))
    return fit_product_of_t(
        jax.random.key(key), target, 2, experts=experts, exponents=exponents, settings=settings
    )


@pytest.fixture(scope="module")
def safeguarded():
    return fit_given(in_family)


def contraction(path):
    """Factor by which |alpha_t - alpha*| shrinks an iteration, by a line through its log."""
    errors = np.linalg.norm(path - EXPONENTS, axis=1)
    errors = errors[errors > 1e-9]
    slope, intercept = np.polyfit(np.arange(len(errors)), np.log(errors), 1)
    residual = np.log(errors) - intercept - slope * np.arange(len(errors))
    return np.exp(slope), 1 - np.var(residual) / np.var(np.log(errors))


def test_papers_update_contracts_at_the_rate_of_its_theorem():
    """Theorem 3.1 with delta = 0: |alpha_t - alpha*| <= (1 + eta lambda)^-t |alpha_0 - alpha*|.

    lambda bounds the eigenvalues of every batch's G from below; at the truth G is an integral,
    whose least eigenvalue is the rate of the slowest direction on average.
    """
    settings = dataclasses.replace(PAPER_SMALL, learning_rate=10.0)
    result = fit_given(in_family, settings)
    with jax.enable_x64(True):
        grid = np.random.default_rng(0).normal(size=(20_000, 2)) * 2.5 + LOC.mean(axis=0)
        log_proposal = -0.5 * np.sum(((grid - LOC.mean(axis=0)) / 2.5) ** 2, axis=1)
        weights = np.exp(products.log_product(LOC, PRECISION, EXPONENTS, grid) - log_proposal)
        scores = np.asarray(expert_scores(products.example_experts(), jnp.asarray(grid))[0])
    gram = np.einsum("b,kdb,ldb->kl", weights / weights.sum(), scores, scores)
    expected = 1 / (1 + 10.0 * np.linalg.eigvalsh(gram)[0])
    path = result.history.exponents
    factor, explained = contraction(path)
    errors = np.linalg.norm(path - EXPONENTS, axis=1)
    assert errors[-1] < 1e-3 * errors[0]
    assert explained > 0.98
    # Batches' eigenvalues scatter about the integral's, and the first steps go faster.
    assert 0.8 * np.log(1 / expected) < np.log(1 / factor) < 1.6 * np.log(1 / expected)
    # Nothing moves away: the bound holds with lambda = 0 in each step.
    assert np.all(np.diff(errors) < 1e-9)


def test_safeguarded_update_reaches_the_truth_exponentially(safeguarded):
    path = safeguarded.history.exponents
    errors = np.linalg.norm(path - EXPONENTS, axis=1)
    factor, explained = contraction(path)
    # 0.83 here: the slowest direction of G in the metric of its diagonal, with eta = 1.
    assert factor < 0.9
    assert explained > 0.98
    assert errors[-1] < 1e-3 * errors[0]
    history = safeguarded.history
    assert history.fisher_divergence[-1] < 1e-4 * history.fisher_divergence[0]
    assert np.all(history.kkt_residual < 1e-9)


def test_realizable_target_is_trusted(safeguarded):
    assert safeguarded.trusted and safeguarded.warnings == ()
    assert safeguarded.pareto_k < 0.5
    moments = products.example_moments()
    # p / q is constant but for the exponents' error: the evidence has that of log C, below 0.02.
    assert safeguarded.log_evidence == pytest.approx(moments.log_normalizer, abs=0.1)
    q = safeguarded.distribution
    with jax.enable_x64(True):
        log_q = q.log_prob(jnp.asarray(safeguarded.draws))
    np.testing.assert_allclose(log_q, safeguarded.log_q, rtol=1e-9)
    assert safeguarded.constrained_draws is None
    assert safeguarded.arviz_posterior()["z"].shape == (1, 1000, 2)


def test_history_has_an_entry_an_iteration(safeguarded):
    history = safeguarded.history
    for field in dataclasses.fields(history):
        assert len(getattr(history, field.name)) == 60
    np.testing.assert_array_equal(history.score_evaluations, 128 * np.arange(1, 61))
    assert safeguarded.evaluations.score == 60 * 128
    np.testing.assert_allclose(history.exponent_sum, history.exponents.sum(axis=1))
    assert np.all(history.num_active == 4)
    assert np.all(history.ess <= 128) and np.all(history.num_nonfinite == 0)


def test_fit_does_not_depend_on_the_coordinates(safeguarded):
    """Target and experts moved by an affine map: the exponents' path is the same."""
    inverse = np.linalg.inv(MAP_SCALE)
    moved = fit_given(
        in_family_mapped,
        loc=MAP_LOC + LOC @ MAP_SCALE.T,
        precision=inverse.T @ PRECISION @ inverse,
    )
    np.testing.assert_allclose(
        moved.history.exponents[:10], safeguarded.history.exponents[:10], rtol=1e-6
    )
    np.testing.assert_allclose(
        moved.draws, MAP_LOC + safeguarded.draws @ MAP_SCALE.T, rtol=1e-3, atol=1e-3
    )


def num_compiled():
    """Programs that an iteration runs, compiled so far."""
    functions = (samplers.gibbs_step, targets.whitened_scores, update._solve)
    return sum(function._cache_size() for function in functions)


def test_same_key_gives_the_same_fit_and_nothing_is_compiled_again(safeguarded):
    compiled = num_compiled()
    again = fit_given(in_family)
    assert num_compiled() == compiled
    np.testing.assert_array_equal(again.history.exponents, safeguarded.history.exponents)
    np.testing.assert_array_equal(again.draws, safeguarded.draws)


GAUSSIAN_MEAN = np.array([1.0, -20.0])
GAUSSIAN_PRECISION = np.array([[3.0, 0.1], [0.1, 0.02]])


def gaussian(z):
    offset = z - GAUSSIAN_MEAN
    return -0.5 * offset @ jnp.asarray(GAUSSIAN_PRECISION, z.dtype) @ offset


@pytest.fixture(scope="module")
def fitted_gaussian():
    settings = dataclasses.replace(
        SAFEGUARDED, iterations=40, local_experts=12, match_iterations=20, num_draws=1000
    )
    calls, compiled = [], []

    def callback(*call):
        calls.append(call)
        compiled.append(num_compiled())

    result = fit_product_of_t(jax.random.key(0), gaussian, 2, settings=settings, callback=callback)
    return result, calls, compiled


def test_gaussian_target(fitted_gaussian):
    """The exponents grow, for a t tends to a Gaussian; moments within 2%, by quadrature."""
    result, _, _ = fitted_gaussian
    covariance = np.linalg.inv(GAUSSIAN_PRECISION)
    sd = np.sqrt(np.diag(covariance))
    with jax.enable_x64(True):
        moments = products.integrate(
            lambda z: np.asarray(result.distribution.log_prob(jnp.asarray(GAUSSIAN_MEAN + z * sd))),
            2,
            points=300,
        )
    assert np.abs(moments.mean).max() < 0.02
    np.testing.assert_allclose(np.sqrt(np.diag(moments.covariance)), 1.0, atol=0.02)
    assert np.abs(moments.log_normalizer + np.log(sd).sum()) < 0.05
    assert result.history.exponent_sum[-1] > 3 * 3.5
    assert result.pareto_k < 0.5 and result.trusted
    log_evidence = np.log(2 * np.pi) - 0.5 * np.log(np.linalg.det(GAUSSIAN_PRECISION))
    assert result.log_evidence == pytest.approx(log_evidence, abs=0.05)


def test_iterations_and_refreshing_compile_nothing_again(fitted_gaussian):
    result, calls, compiled = fitted_gaussian
    assert compiled == [compiled[0]] * 80
    assert result.history.round.tolist() == [0] * 40 + [1] * 40
    assert [number for number, _ in calls] == list(range(80))
    assert calls[3][1]["fisher_divergence"] == result.history.fisher_divergence[3]
    scores = result.history.score_evaluations
    assert scores[-1] == result.evaluations.total_scores
    # Batches of 256, and between rounds the Hessians of the new experts, two scores each.
    steps = np.diff(scores)
    assert np.all(np.delete(steps, 39) == 256) and 256 < steps[39] <= 256 + 2 * 12


def model(successes, trials, counts):
    share = numpyro.sample("share", dist.Beta(2.0, 3.0))
    numpyro.sample("successes", dist.Binomial(trials, probs=share), obs=successes)
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("days", 5):
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)


def test_numpyro_model_is_fitted_unconstrained_and_mapped_back():
    """Conjugate: share ~ Beta(9, 6), rate ~ Gamma(17, 6), independent."""
    experts = full_experts(
        jnp.array([[1.0, 0.4], [1.0, 0.4], [0.8, 0.0], [1.2, 0.8]]),
        jnp.asarray(np.eye(2) * np.array([0.3, 3.0, 1.0, 1.0])[:, None, None], jnp.float32),
    )
    counts = np.array([3, 1, 4, 2, 5])
    # Round experts are too few for deviations that differ, which the weights tell and mend.
    with pytest.warns(UserWarning, match="take result.pool's"):
        result = fit_product_of_t(
            jax.random.key(0),
            model,
            model_args=(7, 10),
            model_kwargs={"counts": counts},
            experts=experts,
            settings=SMALL,
        )
    sites = result.constrained_draws
    assert set(sites) == {"share", "rate"}
    assert np.all((sites["share"] > 0) & (sites["share"] < 1)) and np.all(sites["rate"] > 0)
    assert result.arviz_posterior()["rate"].shape == (1, 1000)
    assert result.pareto_k < 0.7
    weights = np.exp(result.log_weights)
    assert weights.sum() == pytest.approx(1.0)
    for name, mean, sd in (("share", 0.6, 0.1225), ("rate", 17 / 6, np.sqrt(17) / 6)):
        error = np.sqrt(np.sum(weights**2 * (sites[name] - mean) ** 2))
        # Two sites, 4.5 standard errors: a false alarm in 1e-5 of all keys.
        assert abs(weights @ sites[name] - mean) < 4.5 * error < 0.45 * sd
        resampled = result.resampled_posterior(jax.random.key(1), 800)[name]
        assert resampled.shape == (1, 800)
        # Of the deviations, 4.5 standard errors at an effective size of 400.
        assert resampled.std() == pytest.approx(sd, rel=4.5 / np.sqrt(2 * 400))
