"""What the estimators maximise, what they may move and how far."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.likelihood import Moments, Rows


class Limits(NamedTuple):
    """Constraints on the flat vector, all [p]: what moves, its range, the prior's precision."""

    free: Array
    lower: Array
    upper: Array
    prior: Array


class Path(NamedTuple):
    """Where an iteration is.

    Attributes:
        theta: parameters [p].
        value: objective there, a sum over rows.
        trace: objective after every iteration, NaN past the last [t].
        count: iterations done.
        converged: whether the stopping rule of the method was met.
    """

    theta: Array
    value: Array
    trace: Array
    count: Array  # type: ignore[assignment]  # tuples have a method of this name
    converged: Array


def clip(theta: Float[Array, " p"], limits: Limits) -> Float[Array, " p"]:
    """The nearest point within the range."""
    return jnp.clip(theta, limits.lower, limits.upper)


def penalty(theta: Float[Array, " p"], limits: Limits) -> Float[Array, ""]:
    """Minus the log-prior, up to a constant."""
    return 0.5 * jnp.sum(limits.prior * jnp.square(theta))


def objective(
    family: Family, theta: Float[Array, " p"], rows: Rows, limits: Limits
) -> Float[Array, ""]:
    """Log-likelihood plus log-prior."""
    return likelihood.loglik(family, theta, rows) - penalty(theta, limits)


def objective_moments(
    family: Family, theta: Float[Array, " p"], rows: Rows, limits: Limits
) -> Moments:
    """The objective, its gradient and minus its Hessian."""
    m = likelihood.moments(family, theta, rows)
    return Moments(
        m.loglik - penalty(theta, limits),
        m.score - limits.prior * theta,
        m.information + jnp.diag(limits.prior),
    )


def movable(theta: Float[Array, " p"], gradient: Float[Array, " p"], limits: Limits) -> Array:
    """Free entries [p] that the gradient does not push out of the range."""
    outward = ((theta <= limits.lower) & (gradient < 0)) | (
        (theta >= limits.upper) & (gradient > 0)
    )
    return limits.free & ~outward


def start_path(theta: Array, value: Array, length: int) -> Path:
    """A path that has not moved yet, with room for so many iterations."""
    trace = jnp.full(length + 1, jnp.nan, jnp.float64).at[0].set(value)
    return Path(theta, value, trace, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool_))
