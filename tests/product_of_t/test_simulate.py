"""Synthetic targets: normalised, and their draws are draws of their densities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_t, norm
from scipy.stats import t as student_t

from moe_jax.product_of_t.simulate import SYNTHETIC, gaussian_mixture, heavy_t, skew_t

NUM_DRAWS = 20_000


@pytest.mark.parametrize("name", SYNTHETIC)
def test_density_integrates_to_one(name):
    target = SYNTHETIC[name](2)
    # z = 3 tan(u) maps the plane to a square; the midpoint rule then converges fast.
    u = (np.arange(600) + 0.5) / 600 * np.pi - np.pi / 2
    axis, slope = 3 * np.tan(u), 3 / np.cos(u) ** 2
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    with jax.enable_x64(True):
        logs = np.asarray(jax.jit(jax.vmap(target.log_density))(jnp.asarray(grid)))
    total = np.sum(np.exp(logs) * np.outer(slope, slope).ravel()) * (np.pi / 600) ** 2
    # The funnel's neck is as narrow as the grid, the other densities are smooth on it.
    assert total == pytest.approx(1.0, abs=1e-3 if name == "funnel" else 1e-5)


@pytest.mark.parametrize("dim", [2, 7])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_scores_average_to_zero_under_the_draws(name, dim):
    target = SYNTHETIC[name](dim)
    with jax.enable_x64(True):
        draws = target.sample(jax.random.key(3), NUM_DRAWS)
        scores = np.asarray(jax.jit(jax.vmap(jax.grad(target.log_density)))(draws))
    # score * z / (1 + z^2) has bounded moments even where z has none; Stein's identity
    # E[f(z_i) score_i] = -E[f'(z_i)] with f(z) = z / (1 + z^2).
    z = np.asarray(draws)
    slope = (1 - z**2) / (1 + z**2) ** 2
    for values in (scores, scores * z / (1 + z**2) + slope):
        errors = values.std(axis=0) / np.sqrt(NUM_DRAWS)
        # 162 tests in all, each beyond 5 standard errors with probability 6e-7: 1e-4 together.
        assert np.abs(values.mean(axis=0) / errors).max() < 5.0


def test_multivariate_t_is_scipys():
    target = heavy_t(3, degrees_of_freedom=3.0, correlation=0.5)
    points = np.random.default_rng(0).normal(size=(5, 3)) * 3
    index = np.arange(3)
    shape = 0.5 ** np.abs(index[:, None] - index[None])
    with jax.enable_x64(True):
        ours = jax.vmap(target.log_density)(jnp.asarray(points))
    np.testing.assert_allclose(ours, multivariate_t(shape=shape, df=3.0).logpdf(points), rtol=1e-12)


def test_skew_t_in_one_dimension_is_azzalinis():
    target = skew_t(1, degrees_of_freedom=5.0, skewness=3.0)
    z = np.array([-30.0, -2.0, 0.0, 0.4, 50.0])
    root = np.sqrt(6.0 / (5.0 + z**2))
    expected = np.log(2) + student_t(5).logpdf(z) + student_t(6).logcdf(3.0 * z * root)
    with jax.enable_x64(True):
        ours = jax.vmap(target.log_density)(jnp.asarray(z)[:, None])
        scores = jax.vmap(jax.grad(target.log_density))(jnp.asarray(z)[:, None])
    np.testing.assert_allclose(ours, expected, rtol=1e-9)
    assert np.isfinite(scores).all()


def test_densities_keep_their_arguments_type():
    for make in SYNTHETIC.values():
        z = jnp.full(2, 0.3, jnp.float32)
        assert jax.eval_shape(make(2).log_density, z).dtype == jnp.float32
        with jax.enable_x64(True):
            assert jax.eval_shape(make(2).log_density, z).dtype == jnp.float32


def test_far_points_have_finite_scores():
    for make in SYNTHETIC.values():
        score = jax.grad(make(3).log_density)(jnp.array([4.0, 40.0, -40.0]))
        assert np.isfinite(score).all()


def test_mixture_is_a_sum_of_densities():
    means, covariances = np.array([[-1.0], [2.0]]), np.array([[[0.25]], [[4.0]]])
    target = gaussian_mixture(means, covariances, np.array([0.3, 0.7]))
    expected = 0.3 * norm(-1.0, 0.5).pdf(0.5) + 0.7 * norm(2.0, 2.0).pdf(0.5)
    with jax.enable_x64(True):
        ours = float(target.log_density(jnp.array([0.5])))
    assert ours == pytest.approx(np.log(expected), rel=1e-12)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="weights=.* must be positive and sum to 1"):
        gaussian_mixture(np.zeros((2, 1)), np.ones((2, 1, 1)), np.array([0.5, 0.6]))
    with pytest.raises(ValueError, match="dim=1 of funnel must be at least 2"):
        SYNTHETIC["funnel"](1)
    with pytest.raises(ValueError, match=r"correlation=1.0 must lie between"):
        heavy_t(2, correlation=1.0)
