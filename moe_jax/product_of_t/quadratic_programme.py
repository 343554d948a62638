"""The convex quadratic programme of an update: non-negative exponents with a bound on their sum.

    minimise  1/2 a' G a - h' a   over   a >= 0,  c' a >= r,   c in {0, 1}^K

Projected Newton on a >= 0: Newton's step on the coordinates that are free, a search over step sizes
along the projection, until the optimality conditions hold. Where c' a falls short of r, the
solution is that of the programme with h + tau c, for the tau >= 0 at which c' a = r.

Reference: Bertsekas 1982, "Projected Newton methods", for the first; the rest is the Lagrangian.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_MAX_NEWTON = 100
_MAX_BISECT = 100
_TOLERANCE = 1e-12
# Added to the unit diagonal in Newton's system only: where G is singular, as for identical experts,
# the step stays finite; the objective is untouched.
_RIDGE = 1e-13
_STEPS = 30


class Solution(NamedTuple):
    """A minimiser and how well it satisfies the optimality conditions.

    Attributes:
        value: a.
        residual: largest violation of complementarity, max_k |min(a_k, gradient_k)|, of the problem
            scaled to a unit diagonal of G, relative to the largest |h|.
        iterations: Newton steps in all.
    """

    value: Float[Array, " experts"]
    residual: Float[Array, ""]
    iterations: Int[Array, ""]


def solve_bounded(
    gram: Float[Array, "experts experts"],
    linear: Float[Array, " experts"],
    counted: Float[Array, " experts"],
    least_sum: Float[Array, ""],
    start: Float[Array, " experts"],
) -> Solution:
    """Minimises 1/2 a' G a - h' a over a >= 0 with counted' a >= least_sum.

    Args:
        gram: G, positive semidefinite.
        linear: h.
        counted: c, the experts whose exponents enter the sum.
        least_sum: r.
        start: any point to begin from; a near one saves steps.
    """
    diagonal = jnp.diagonal(gram)
    # An expert that no sample sees would otherwise scale to infinity.
    floor = 1e-14 * jnp.maximum(jnp.max(diagonal), jnp.finfo(gram.dtype).tiny)
    scale = 1.0 / jnp.sqrt(jnp.maximum(diagonal, floor))
    scaled_gram = gram * scale[:, None] * scale[None]
    cost = counted * scale
    scaled_linear = linear * scale

    def solve(tau: Array, start: Array) -> Solution:
        return _solve_nonnegative(scaled_gram, scaled_linear + tau * cost, start)

    free = solve(jnp.zeros((), gram.dtype), start / scale)
    short = jnp.dot(cost, free.value) < least_sum
    bound = jax.lax.cond(
        short,
        lambda: _raise_sum(scaled_gram, cost, least_sum, free, solve),
        lambda: free,
    )
    return bound._replace(value=bound.value * scale)


def solve_nonnegative(
    gram: Float[Array, "experts experts"],
    linear: Float[Array, " experts"],
    start: Float[Array, " experts"] | None = None,
) -> Solution:
    """Minimises 1/2 a' G a - h' a over a >= 0: non-negative least squares, by normal equations."""
    start = jnp.zeros_like(linear) if start is None else start
    nothing = jnp.zeros_like(linear)
    return solve_bounded(gram, linear, nothing, jnp.asarray(-1.0, gram.dtype), start)


def _solve_nonnegative(gram: Array, linear: Array, start: Array) -> Solution:
    """Projected Newton for a G of unit diagonal (or zeros)."""
    size = jnp.maximum(jnp.max(jnp.abs(linear)), jnp.finfo(gram.dtype).tiny)
    fractions = 0.5 ** jnp.arange(_STEPS).astype(gram.dtype)

    def gradient_of(value: Array) -> Array:
        return gram @ value - linear

    def residual_of(value: Array, gradient: Array) -> Array:
        return jnp.max(jnp.abs(jnp.minimum(value, gradient))) / size

    def unfinished(state: tuple) -> Array:
        value, gradient, iteration, stuck = state
        return (residual_of(value, gradient) > _TOLERANCE) & (iteration < _MAX_NEWTON) & ~stuck

    def step(state: tuple) -> tuple:
        value, gradient, iteration, _ = state
        is_free = (value > 0) | (gradient < 0)
        mask = is_free.astype(gram.dtype)
        system = gram * mask[:, None] * mask[None] + jnp.diag(1.0 - mask + _RIDGE)
        cholesky = jnp.linalg.cholesky(system)
        direction = -jax.scipy.linalg.cho_solve((cholesky, True), gradient * mask) * mask
        trials = jnp.maximum(value[None] + fractions[:, None] * direction[None], 0.0)
        moves = trials - value[None]
        # Differences from the present value, for the objective itself cancels near the minimum.
        changes = moves @ gradient + 0.5 * jnp.sum(moves * (moves @ gram), axis=-1)
        changes = jnp.where(jnp.isfinite(changes), changes, jnp.inf)
        best = jnp.argmin(changes)
        improved = changes[best] < 0
        value = jnp.where(improved, trials[best], value)
        return value, gradient_of(value), iteration + 1, ~improved

    start = jnp.maximum(start, 0.0)
    state = (start, gradient_of(start), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool_))
    value, gradient, iterations, _ = jax.lax.while_loop(unfinished, step, state)
    return Solution(value, residual_of(value, gradient), iterations)


def _raise_sum(
    gram: Array,
    cost: Array,
    least_sum: Array,
    free: Solution,
    solve: Callable[[Array, Array], Solution],
) -> Solution:
    """The minimiser with cost' a = least_sum: Newton's method on tau, kept inside a bracket.

    cost' a(tau) is piecewise linear and does not fall, with slope cost_F' G_FF^-1 cost_F on the
    free experts F.
    """

    def unfinished(state: tuple) -> Array:
        _, _, _, solution, count = state
        gap = jnp.dot(cost, solution.value) - least_sum
        return (jnp.abs(gap) > _TOLERANCE * least_sum) & (count < _MAX_BISECT)

    def step(state: tuple) -> tuple:
        tau, low, high, solution, count = state
        gap = jnp.dot(cost, solution.value) - least_sum
        low, high = jnp.where(gap < 0, tau, low), jnp.where(gap < 0, high, tau)
        mask = (solution.value > 0).astype(gram.dtype)
        system = gram * mask[:, None] * mask[None] + jnp.diag(1.0 - mask + _RIDGE)
        inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(system), True), cost * mask)
        slope = jnp.dot(cost, inverse * mask)
        newton = tau - gap / jnp.maximum(slope, jnp.finfo(gram.dtype).tiny)
        middle = jnp.where(jnp.isfinite(high), 0.5 * (low + high), 2.0 * tau + 1.0)
        inside = (newton > low) & (newton < high) & jnp.isfinite(newton)
        tau = jnp.where(inside, newton, middle)
        following = solve(tau, solution.value)
        iterations = solution.iterations + following.iterations
        return tau, low, high, following._replace(iterations=iterations), count + 1

    zero = jnp.zeros((), gram.dtype)
    state = (zero, zero, jnp.full((), jnp.inf, gram.dtype), free, jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(unfinished, step, state)[3]
