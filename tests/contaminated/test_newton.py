"""Newton and L-BFGS reach the optimum of EM; Newton in few steps and in any units (T8)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.newton import run_lbfgs, run_newton
from tests.contaminated.test_em import LINEAR, em, problem

newton = partial(jax.jit, static_argnums=(0, 4))(run_newton)
lbfgs = partial(jax.jit, static_argnums=(0, 4))(run_lbfgs)
TOLERANCE = 1e-13


def optimum():
    theta, rows, limits = problem(LINEAR)
    return em(LINEAR, theta, rows, limits, 2000), rows, limits


def test_newton_and_lbfgs_reach_ems_optimum():
    with jax.enable_x64(True):
        best, rows, limits = optimum()
        start = best.theta + 0.2
        path, moments = newton(LINEAR, start, rows, limits, 100, TOLERANCE)
        other = lbfgs(LINEAR, start, rows, limits, 500)
        best, path, moments, other = jax.tree.map(np.asarray, (best, path, moments, other))
    assert path.converged and other.converged
    assert path.count < 15
    for found in (path, other):
        np.testing.assert_allclose(found.value, best.value, rtol=1e-10)
        np.testing.assert_allclose(found.theta, best.theta, atol=1e-5)
    # 80 rows: the gradient of the sum at the mean's rounding.
    assert np.max(np.abs(moments.score)) < 1e-5
    assert np.all(np.linalg.eigvalsh(moments.information) > 0)


def test_newton_climbs_from_where_the_information_is_indefinite():
    with jax.enable_x64(True):
        theta, rows, limits = problem(LINEAR)
        start = jnp.array([0.0, 0.0, 0.0, 8.0, 3.0])
        values = np.linalg.eigvalsh(np.asarray(likelihood.moments(LINEAR, start, rows).information))
        assert values[0] < 0 < values[-1]
        path, _ = newton(LINEAR, start, rows, limits, 100, TOLERANCE)
        path = jax.tree.map(np.asarray, path)
    assert path.converged
    trace = path.trace[: path.count + 1]
    assert np.all(np.diff(trace) >= -1e-10 * (1 + np.abs(trace[1:])))


def test_newtons_path_does_not_depend_on_the_unit_of_x():
    with jax.enable_x64(True):
        best, rows, limits = optimum()
        start = best.theta + 0.2
        path, _ = newton(LINEAR, start, rows, limits, 100, TOLERANCE)
        unit = jnp.array([1e6, 1.0])
        scaled = rows._replace(
            gate_design=rows.gate_design * unit[None, :],
            expert_design=rows.expert_design * unit[None, :],
        )
        per_unit = jnp.array([1e6, 1.0, 1e6, 1.0, 1.0])
        other, _ = newton(LINEAR, start / per_unit, scaled, limits, 100, TOLERANCE)
        path, other, per_unit = jax.tree.map(np.asarray, (path, other, per_unit))
    assert path.count == other.count
    np.testing.assert_allclose(other.theta * per_unit, path.theta, rtol=1e-7)


def test_fixed_and_bounded_entries_hold():
    with jax.enable_x64(True):
        best, rows, limits = optimum()
        start = best.theta + 0.1
        free = limits.free.at[1].set(False)
        held = limits._replace(free=free, upper=limits.upper.at[-1].set(-2.0))
        for found in (
            newton(LINEAR, start, rows, held, 100, TOLERANCE)[0],
            lbfgs(LINEAR, start, rows, held, 500),
        ):
            assert bool(found.converged)
            assert bool(found.theta[1] == start[1]) and float(found.theta[-1]) == -2.0


def test_a_frozen_density_of_zero_stops_neither():
    with jax.enable_x64(True):
        best, rows, limits = optimum()
        x, y = rows.gate_design[:, :1], rows.response
        log_frozen = rows.log_frozen.at[int(jnp.argmax(y))].set(-jnp.inf)
        rows = likelihood.make_rows(LINEAR, x, y, log_frozen)
        path, _ = newton(LINEAR, best.theta, rows, limits, 100, TOLERANCE)
        other = lbfgs(LINEAR, best.theta, rows, limits, 500)
        path, other = jax.tree.map(np.asarray, (path, other))
    assert path.converged and other.converged
    np.testing.assert_allclose(path.value, other.value, rtol=1e-10)
