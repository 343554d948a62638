"""The quadratic programme against scipy, optimality conditions, singular and bounded cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize, nnls

from moe_jax.product_of_t.quadratic_programme import solve_bounded, solve_nonnegative

SIZES = (12, 60)
_bounded = jax.jit(solve_bounded)
_nonnegative = jax.jit(solve_nonnegative)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def problem(seed, size, rows=None, spread=1.0):
    """A least-squares problem |A x - b|^2, columns of different scales; about half are active."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows or 2 * size, size)) * np.exp(spread * rng.normal(size=size))
    return matrix, matrix @ rng.normal(size=size) + rng.normal(size=len(matrix))


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("size", SIZES)
def test_non_negative_solution_is_scipys(size, spread):
    for seed in range(20):
        matrix, target = problem(seed, size, spread=spread)
        expected, _ = nnls(matrix, target)
        found = _nonnegative(jnp.asarray(matrix.T @ matrix), jnp.asarray(matrix.T @ target))
        np.testing.assert_allclose(found.value, expected, rtol=1e-8, atol=1e-8 * expected.max())
        assert float(found.residual) < 1e-9
        assert np.sum(expected == 0) >= 2


def test_start_does_not_matter():
    matrix, target = problem(3, 60)
    gram, linear = jnp.asarray(matrix.T @ matrix), jnp.asarray(matrix.T @ target)
    ones, least = jnp.ones(60), jnp.asarray(1e-9)
    values = [
        _bounded(gram, linear, ones, least, jnp.full(60, start)).value for start in (0.0, 1.0, 1e4)
    ]
    np.testing.assert_allclose(values[1], values[0], atol=1e-9)
    np.testing.assert_allclose(values[2], values[0], atol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_slack_bound_changes_nothing(size):
    matrix, target = problem(1, size)
    gram, linear = jnp.asarray(matrix.T @ matrix), jnp.asarray(matrix.T @ target)
    free = _nonnegative(gram, linear)
    least = 0.9 * jnp.sum(free.value)
    bounded = _bounded(gram, linear, jnp.ones(size), least, jnp.zeros(size))
    np.testing.assert_allclose(bounded.value, free.value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
def test_active_bound_satisfies_the_optimality_conditions(size):
    """Gradient = tau c where a > 0, >= tau c where a = 0, tau >= 0 and c' a = r."""
    for seed in range(10):
        matrix, target = problem(seed, size)
        gram, linear = matrix.T @ matrix, matrix.T @ target
        counted = (np.arange(size) % 3 > 0).astype(float)
        free, _ = nnls(matrix, target)
        least = 3.0 * counted @ free + 1.0
        found = _bounded(*map(jnp.asarray, (gram, linear, counted, least, np.zeros(size))))
        value = np.asarray(found.value)
        assert counted @ value == pytest.approx(least, rel=1e-9)
        assert np.all(value >= 0)
        gradient = (gram @ value - linear) / np.sqrt(np.diag(gram))
        cost = counted / np.sqrt(np.diag(gram))
        inner = (value > 0) & (counted > 0)
        tau = np.mean(gradient[inner] / cost[inner])
        size_of_gradient = np.max(np.abs(linear / np.sqrt(np.diag(gram))))
        slack = (gradient - tau * cost) / size_of_gradient
        assert tau > 0
        assert np.max(np.abs(slack[value > 0])) < 1e-7
        assert np.min(slack) > -1e-7


def test_active_bound_agrees_with_a_general_optimiser():
    matrix, target = problem(4, 12)
    gram, linear = matrix.T @ matrix, matrix.T @ target
    scale = np.abs(np.linalg.eigvalsh(gram)).max()
    least = 25.0
    general = minimize(
        lambda a: (0.5 * a @ gram @ a - linear @ a) / scale,
        np.full(12, least / 12),
        jac=lambda a: (gram @ a - linear) / scale,
        bounds=[(0, None)] * 12,
        constraints={
            "type": "ineq",
            "fun": lambda a: a.sum() - least,
            "jac": lambda a: np.ones(12),
        },
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    ones = np.ones(12)
    found = _bounded(*map(jnp.asarray, (gram, linear, ones, np.array(least), ones)))
    ours = np.asarray(found.value)
    objective = (0.5 * ours @ gram @ ours - linear @ ours) / scale
    assert general.success
    assert objective <= general.fun + 1e-9 * abs(general.fun)
    np.testing.assert_allclose(ours, general.x, atol=1e-4)


def test_identical_columns_share_one_exponent():
    """G is singular: the sum of the two is determined, and the fit is scipy's."""
    matrix, target = problem(5, 12)
    matrix[:, 7] = matrix[:, 2] = np.abs(matrix[:, 2]) + target  # a column that helps
    expected, residual = nnls(matrix, target)
    found = _nonnegative(jnp.asarray(matrix.T @ matrix), jnp.asarray(matrix.T @ target))
    ours = np.asarray(found.value)
    assert ours[2] + ours[7] == pytest.approx(expected[2] + expected[7], rel=1e-6)
    assert ours[2] + ours[7] > 0
    assert np.linalg.norm(matrix @ ours - target) == pytest.approx(residual, rel=1e-9)


def test_fewer_samples_than_experts():
    """12 unknowns, 5 equations: any minimiser attains the least residual."""
    matrix, target = problem(6, 12, rows=5)
    _, residual = nnls(matrix, target)
    found = _nonnegative(jnp.asarray(matrix.T @ matrix), jnp.asarray(matrix.T @ target))
    value = np.asarray(found.value)
    assert np.all(value >= 0)
    assert np.linalg.norm(matrix @ value - target) <= residual + 1e-5 * np.linalg.norm(target)


def test_column_of_zeros_stays_finite():
    matrix, target = problem(7, 12)
    matrix[:, 3] = 0.0
    found = _nonnegative(jnp.asarray(matrix.T @ matrix), jnp.asarray(matrix.T @ target))
    assert np.all(np.isfinite(found.value))
    expected, _ = nnls(matrix, target)
    others = np.arange(12) != 3
    np.testing.assert_allclose(found.value[others], expected[others], atol=1e-8 * expected.max())
