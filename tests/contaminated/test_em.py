"""EM never falls, SQUAREM finds the same optimum, nothing moves that should not (test T8)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.discrete import Multinomial
from moe_jax.contaminated.em import ROUNDING, run_em, run_squarem
from moe_jax.contaminated.gates import ConstantGate, LinearGate
from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.limits import Limits
from moe_jax.contaminated.location_scale import GaussianLinear, GaussianNonlinear, StudentT


def tanh_mean(eta, x):
    return jnp.tanh(x @ eta)


LINEAR = Family(GaussianLinear(), LinearGate())
FAMILIES = {
    "linear": LINEAR,
    "tanh": Family(GaussianNonlinear(tanh_mean, np.zeros(1)), LinearGate()),
    "t": Family(StudentT(df=None), ConstantGate()),
    "multinomial": Family(Multinomial(2), LinearGate()),
    "two linear": Family(GaussianLinear(), LinearGate(), 2),
}
em = partial(jax.jit, static_argnums=(0, 4))(run_em)
squarem = partial(jax.jit, static_argnums=(0, 4))(run_squarem)


def problem(family, seed=0, rows=80):
    """A start, rows of a two-regime data set and limits that keep the variance from 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 1))
    from_prompt = rng.uniform(size=rows) < 0.4
    y = np.where(from_prompt, 3.0 - x[:, 0], x[:, 0]) + 0.5 * rng.normal(size=rows)
    if family.expert.labels:
        y = (y > 1.0).astype(float)
        log_frozen = np.full(rows, np.log(0.5))
    else:
        log_frozen = -0.5 * np.log(0.5 * np.pi) - 2.0 * (y - x[:, 0]) ** 2
    theta = jnp.asarray(0.5 * rng.normal(size=family.size(1)))
    made = likelihood.make_rows(family, *map(jnp.asarray, (x, y, log_frozen)))
    return theta, made, unlimited(theta)


def unlimited(theta):
    wide = jnp.full(theta.shape, 20.0)
    return Limits(jnp.ones(theta.shape, jnp.bool_), -wide, wide, jnp.zeros(theta.shape))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_objective_never_falls(name):
    family = FAMILIES[name]
    with jax.enable_x64(True):
        path = jax.tree.map(np.asarray, em(family, *problem(family), 60))
    trace = path.trace[: path.count + 1]
    assert path.count > 3
    assert np.all(np.diff(trace) >= -ROUNDING * (1 + np.abs(trace[1:])))
    assert trace[-1] == path.value


def test_squarem_reaches_ems_optimum_in_fewer_maps():
    with jax.enable_x64(True):
        theta, rows, limits = problem(LINEAR)
        slow = jax.tree.map(np.asarray, em(LINEAR, theta, rows, limits, 2000))
        fast = jax.tree.map(np.asarray, squarem(LINEAR, theta, rows, limits, 500))
    assert slow.converged and fast.converged
    # A cycle takes three maps.
    assert 3 * fast.count < slow.count
    np.testing.assert_allclose(fast.value, slow.value, rtol=1e-10)
    trace = fast.trace[: fast.count + 1]
    assert np.all(np.diff(trace) >= -ROUNDING * (1 + np.abs(trace[1:])))


def test_at_the_fixed_point_gate_and_responsibilities_agree_in_the_mean():
    with jax.enable_x64(True):
        theta, rows, limits = problem(LINEAR)
        path = em(LINEAR, theta, rows, limits, 2000)
        terms = likelihood.row_terms(LINEAR, path.theta, rows)
        difference = np.asarray(jnp.mean(terms.responsibility - terms.gate))
    assert abs(difference) < 1e-8


def test_entries_that_are_not_free_stay_bit_for_bit():
    with jax.enable_x64(True):
        theta, rows, limits = problem(LINEAR)
        free = jnp.array([True, False, True, False, True])
        path = em(LINEAR, theta, rows, limits._replace(free=free), 60)
        moved = np.asarray(path.theta != theta)
    np.testing.assert_array_equal(moved, [True, False, True, False, True])


def test_the_range_holds():
    with jax.enable_x64(True):
        theta, rows, limits = problem(LINEAR)
        upper = limits.upper.at[-1].set(-2.0)
        path = em(LINEAR, theta, rows, limits._replace(upper=upper), 60)
        log_nu = float(path.theta[-1])
    # The noise has log-variance 2 log 0.5 = -1.4: the bound is active.
    assert log_nu == -2.0


def test_a_prompt_without_rows_keeps_finite_parameters():
    with jax.enable_x64(True):
        theta, rows, limits = problem(LINEAR)
        far = jnp.array([0.0, 0.0, 0.0, 1e6, -9.0])
        path = jax.tree.map(np.asarray, em(LINEAR, far, rows, limits, 60))
    assert np.all(np.isfinite(path.theta)) and np.isfinite(path.value)
