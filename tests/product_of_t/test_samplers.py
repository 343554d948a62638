"""Samplers: moments against quadrature, exactness of the gammas, effective sample sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import gamma, kstest

from moe_jax.product_of_t import ProductOfT, effective_sample_size, full_experts
from moe_jax.product_of_t.samplers import log_gamma_draws
from tests.product_of_t import products
from tests.product_of_t.products import EXPONENTS

NUM_DRAWS = 4000


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@functools.cache
def moments():
    return products.example_moments()


def example():
    return ProductOfT(products.example_experts(), jnp.asarray(EXPONENTS))


def statistics(draws):
    """Coordinates and their squares and product about the true mean, [draws, 5]."""
    centred = np.asarray(draws) - moments().mean
    first, second = centred.T
    return np.stack([first, second, first**2, second**2, first * second], axis=1)


def expected():
    covariance = moments().covariance
    return np.array([0.0, 0.0, covariance[0, 0], covariance[1, 1], covariance[0, 1]])


def deviations(draws, weights=None):
    """Errors of the weighted means of `statistics`, in their standard errors."""
    values = statistics(draws)
    weights = np.full(len(values), 1.0) if weights is None else weights
    weights = weights / weights.sum()
    means = weights @ values
    errors = np.sqrt(weights**2 @ (values - means) ** 2)
    return (means - expected()) / errors


def test_gibbs_leaves_the_product_invariant():
    """Chains far from the centre forget it; their last states are independent draws."""
    start = jnp.full((NUM_DRAWS, 2), 6.0)
    states = example().gibbs(jax.random.key(0), start, 24)
    assert states.shape == (24, NUM_DRAWS, 2)
    # Five statistics within 4.5 standard errors: a false alarm in 3e-5 of all keys.
    assert np.abs(deviations(states[-1])).max() < 4.5
    assert np.abs(deviations(states[0])).max() > 20


@pytest.mark.parametrize("method", ["dirichlet", "mixture"])
def test_weighted_draws_have_the_moments(method):
    draws = example().weighted_sample(jax.random.key(1), NUM_DRAWS, method)
    weights = np.exp(np.asarray(draws.log_weights))
    # As above.
    assert np.abs(deviations(draws.values, weights)).max() < 4.5
    assert 0.2 * NUM_DRAWS < float(draws.ess) <= NUM_DRAWS
    assert float(draws.ess) == pytest.approx(weights.sum() ** 2 / np.sum(weights**2), rel=1e-9)
    if method == "dirichlet":
        # The marginal of w is not Dirichlet: without their weights the draws are wrong.
        assert np.abs(deviations(draws.values)).max() > 10
    else:
        assert float(draws.ess) > 0.7 * NUM_DRAWS


def test_sample_has_the_moments():
    draws = example().sample(jax.random.key(2), (2, NUM_DRAWS // 2))
    assert draws.shape == (2, NUM_DRAWS // 2, 2)
    # Four draws a chain, two sweeps apart, are correlated: errors up to twice as large. Five
    # statistics at 4.5 of them: a false alarm in 3e-5 of all keys.
    assert np.abs(deviations(draws.reshape(-1, 2))).max() < 2 * 4.5
    assert example().sample(jax.random.key(2)).shape == (2,)


def test_expectation_lies_within_its_standard_errors():
    estimate = example().expectation(jax.random.key(3), lambda z: z, NUM_DRAWS)
    error = np.asarray(estimate.standard_error)
    # Two coordinates, 4.5 standard errors: a false alarm in 1e-5 of all keys.
    assert np.all(np.abs(np.asarray(estimate.mean) - moments().mean) < 4.5 * error)
    deviation = np.sqrt(np.diag(moments().covariance))
    np.testing.assert_allclose(error, deviation / np.sqrt(NUM_DRAWS), rtol=0.5)


def test_sample_finds_the_masses_of_modes_far_apart():
    """Modes at +-6: chains cannot cross, annealing and resampling weigh them."""
    loc = np.array([[-6.0, 0.0], [6.0, 0.0], [6.0, 0.0], [0.0, 0.0]])
    matrices = np.tile(np.eye(2), (4, 1, 1)) * np.array([1.0, 1.0, 1.0, 0.02])[:, None, None]
    exponents = np.array([3.0, 3.0, 0.4, 0.6])
    reference = products.integrate(
        lambda z: np.where(z[:, 0] > 0, products.log_product(loc, matrices, exponents, z), -np.inf),
        2,
    )
    total = products.integrate(lambda z: products.log_product(loc, matrices, exponents, z), 2)
    share = np.exp(reference.log_normalizer - total.log_normalizer)
    assert 0.6 < share < 0.95
    experts = full_experts(jnp.asarray(loc), jnp.asarray(matrices))
    draws = ProductOfT(experts, jnp.asarray(exponents)).sample(
        jax.random.key(4), (2, NUM_DRAWS // 2)
    )
    # The share comes from the weights of 1,000 annealed particles, a standard error below 0.03
    # at an effective sample size of 300; 4 of them.
    assert np.mean(np.asarray(draws)[..., 0] > 0) == pytest.approx(share, abs=0.12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gammas_are_gammas(dtype):
    shapes = np.array([0.02, 0.4, 1.0, 3.7, 80.0, 0.0], dtype)
    concentration = jnp.broadcast_to(jnp.asarray(shapes), (NUM_DRAWS, 6))
    logs = np.asarray(jax.jit(log_gamma_draws)(jax.random.key(6), concentration))
    assert logs.dtype == dtype
    assert np.all(logs[:, 5] == -np.inf)
    for index, shape in enumerate(shapes[:5].tolist()):
        # On the scale of probabilities; below 1e-5 in one of ten sets of draws that are right.
        uniforms = gamma(shape).cdf(np.exp(np.asarray(logs[:, index], np.float64)))
        assert kstest(uniforms, "uniform").pvalue > 1e-6
    pairs = np.corrcoef(logs[:, :5], rowvar=False)[~np.eye(5, dtype=bool)]
    assert np.abs(pairs).max() < 5 / np.sqrt(NUM_DRAWS)


def test_gammas_of_no_number_are_no_number():
    shape = jnp.array([[jnp.nan, jnp.inf, 1.0]])
    logs = np.asarray(jax.jit(log_gamma_draws)(jax.random.key(0), shape))
    assert np.isnan(logs[0, :2]).all() and np.isfinite(logs[0, 2])


def test_effective_sample_size_of_known_weights():
    size = jax.jit(effective_sample_size)
    assert float(size(jnp.full(8, -700.0))) == pytest.approx(8.0)
    assert float(size(jnp.array([0.0, -jnp.inf, -jnp.inf]))) == 1.0
    # Weights 1 and 3: 16 / 10.
    assert float(size(jnp.log(jnp.array([1.0, 3.0])))) == pytest.approx(1.6)
    assert float(size(jnp.full(3, -jnp.inf))) == 0.0


def test_one_expert_and_one_dimension():
    """K = 1 and D = 1: Student's t with nu = 2 a - 1 = 6 and scale 1 / sqrt(6 Lambda)."""
    q = ProductOfT(full_experts(jnp.array([[2.0]]), jnp.array([[[0.5]]])), jnp.array([3.5]))
    states = q.gibbs(jax.random.key(0), jnp.zeros((NUM_DRAWS, 1)), 24)[-1, :, 0]
    weighted = q.weighted_sample(jax.random.key(1), NUM_DRAWS, "dirichlet")
    scale = 1 / np.sqrt(6 * 0.5)
    # With one expert w = 1 and every weight is C.
    np.testing.assert_allclose(weighted.log_weights, float(q.log_normalizer), rtol=1e-9)
    for draws in (states, weighted.values[:, 0]):
        # Two tests, a false alarm in 2e-5 of all keys.
        assert kstest((np.asarray(draws) - 2.0) / scale, "t", args=(6,)).pvalue > 1e-5
