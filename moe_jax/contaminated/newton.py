"""Newton's method on the exact observed information, and L-BFGS for what has none."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.likelihood import Moments, Rows
from moe_jax.contaminated.limits import (
    Limits,
    Path,
    clip,
    movable,
    objective_moments,
    penalty,
    start_path,
)
from moe_jax.contaminated.linalg import scaled, unit_scale

# Shares of the Newton step tried in turn, and the share of the predicted gain that one must bring.
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001)
_ARMIJO = 1e-4
# Eigenvalues of the information, scaled to a unit diagonal, are taken to be no smaller in size.
_LEAST_EIGENVALUE = 1e-9
# Longest step in the metric of the information's diagonal a row.
_MAX_NORM = 1.0
# Differences of mean log-likelihoods below this share of 1 + |mean| are rounding.
_ROUNDING = 1e-14
# L-BFGS stops when no entry of the gradient of the mean objective is larger.
_GRADIENT_TOLERANCE = 1e-8


class _State(NamedTuple):
    path: Path
    moments: Moments
    share: Array
    is_stuck: Array


def run_newton(
    family: Family,
    theta: Float[Array, " p"],
    rows: Rows,
    limits: Limits,
    max_iter: int,
    tol: float | Array,
) -> tuple[Path, Moments]:
    """Newton steps from theta until gradient.step < tol on the mean objective.

    The information is scaled to a unit diagonal, its eigenvalues are taken in absolute value, the
    step is capped and shortened until it brings a share of the gain that the gradient promises. An
    iteration evaluates one candidate; a shortened step is another iteration. The step that meets
    the rule is still taken: it squares what error is left, for one more pass.

    Returns:
        The path and the objective's moments at its end.
    """
    theta = clip(theta, limits)
    total = jnp.sum(rows.weight)
    moments = objective_moments(family, theta, rows, limits)
    shares = jnp.array(_SHARES)

    def newton_step(theta: Array, m: Moments) -> tuple[Array, Array]:
        gradient, information = m.score / total, m.information / total
        free = movable(theta, gradient, limits)
        scale = jnp.where(
            free, unit_scale(jnp.abs(jnp.where(free, jnp.diagonal(information), 0.0))), 0.0
        )
        values, vectors = jnp.linalg.eigh(scaled(information, scale))
        sizes = jnp.maximum(jnp.abs(values), _LEAST_EIGENVALUE)
        step = vectors @ ((vectors.T @ (scale * gradient)) / sizes)
        decrement = (scale * gradient) @ step
        step = step * jnp.minimum(
            1.0, _MAX_NORM / jnp.maximum(jnp.linalg.norm(step), _MAX_NORM * 1e-6)
        )
        return scale * step, decrement

    def goes_on(state: _State) -> Array:
        return (state.path.count < max_iter) & ~state.path.converged & ~state.is_stuck

    def iterate(state: _State) -> _State:
        path, m = state.path, state.moments
        step, decrement = newton_step(path.theta, m)
        converged = decrement < tol
        theta = clip(path.theta + shares[state.share] * step, limits)
        new = objective_moments(family, theta, rows, limits)
        promised = _ARMIJO * (m.score @ (theta - path.theta))
        slack = _ROUNDING * (total + jnp.abs(m.loglik))
        is_finite = jnp.isfinite(new.loglik) & jnp.all(jnp.isfinite(new.score))
        accepted = is_finite & (new.loglik >= m.loglik + promised - slack)
        theta, new = jax.tree.map(
            lambda a, b: jnp.where(accepted, a, b), (theta, new), (path.theta, m)
        )
        count = path.count + 1
        trace = path.trace.at[count].set(new.loglik)
        share = jnp.where(accepted, 0, state.share + 1)
        path = Path(theta, new.loglik, trace, count, converged)
        return _State(path, new, share, share >= len(_SHARES))

    path = start_path(theta, moments.loglik, max_iter)
    state = _State(path, moments, jnp.zeros((), jnp.int32), ~jnp.isfinite(moments.loglik))
    state = jax.lax.while_loop(goes_on, iterate, state)
    return state.path, state.moments


def run_lbfgs(
    family: Family, theta: Float[Array, " p"], rows: Rows, limits: Limits, max_iter: int
) -> Path:
    """L-BFGS with a zoom line search until no entry of the mean gradient exceeds 1e-8."""
    total = jnp.sum(rows.weight)

    def inside(theta: Array) -> Array:
        return jnp.where(limits.free, clip(theta, limits), start)

    @jax.custom_vjp
    def loss(theta: Array) -> Array:
        point = inside(theta)
        return (penalty(point, limits) - likelihood.loglik(family, point, rows)) / total

    def forward(theta: Array) -> tuple[Array, Array]:
        # The analytic score: autodiff would make NaN of a frozen log-density of -inf.
        point = inside(theta)
        gradient = (limits.prior * point - likelihood.score(family, point, rows)) / total
        return loss(theta), jnp.where(movable(point, -gradient, limits), gradient, 0.0)

    loss.defvjp(forward, lambda gradient, cotangent: (cotangent * gradient,))
    start = clip(theta, limits)
    optimiser = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def goes_on(carry: tuple[Path, Any]) -> Array:
        path, _ = carry
        return (path.count < max_iter) & ~path.converged

    def iterate(carry: tuple[Path, Any]) -> tuple[Path, Any]:
        path, state = carry
        value, gradient = value_and_grad(path.theta, state=state)
        converged = jnp.max(jnp.abs(gradient), initial=0.0) < _GRADIENT_TOLERANCE
        # Optax mixes 32- and 64-bit counters where 64 bits are enabled.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update(
                gradient, state, path.theta, value=value, grad=gradient, value_fn=loss
            )
        theta = jnp.where(converged, path.theta, optax.apply_updates(path.theta, updates))
        count = path.count + jnp.where(converged, 0, 1)
        new_value = jnp.where(converged, -value, -optax.tree.get(state, "value")) * total
        trace = path.trace.at[count].set(new_value)
        return Path(theta, new_value, trace, count, converged), state

    path = start_path(start, -loss(start) * total, max_iter)
    path, _ = jax.lax.while_loop(goes_on, iterate, (path, optimiser.init(start)))
    return path._replace(theta=inside(path.theta))
