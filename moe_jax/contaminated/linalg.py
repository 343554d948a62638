"""Linear algebra of the estimators: solves that survive singular matrices, weighted Gram matrices.

All of it is invariant to rescaling single coordinates, so that no unit of x or y is special.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Relative to a unit diagonal. It only shortens steps in directions that data hardly determine: all
# callers solve for a step, so that a fixed point is exact whatever this is.
RIDGE = 1e-10
# Coordinates may differ in units, but not by more than this in curvature.
_NO_CURVATURE = 1e-40


def gram(
    left: Float[Array, "n p"], weight: Float[Array, " n"], right: Float[Array, "n q"]
) -> Array:
    """Sum over rows of weight_i left_i right_i^T, [p, q]."""
    return (left * weight[:, None]).T @ right


def unit_scale(diagonal: Float[Array, " p"]) -> Float[Array, " p"]:
    """Factors that make a diagonal 1; 0 where there is no curvature to speak of."""
    is_curved = diagonal > _NO_CURVATURE * jnp.max(diagonal)
    return jnp.where(is_curved, 1.0 / jnp.sqrt(jnp.where(is_curved, diagonal, 1.0)), 0.0)


def scaled(matrix: Float[Array, "p p"], scale: Float[Array, " p"]) -> Float[Array, "p p"]:
    """diag(scale) matrix diag(scale)."""
    return scale[:, None] * matrix * scale[None, :]


def solve_positive(
    matrix: Float[Array, "p p"], vector: Float[Array, " p"], free: Bool[Array, " p"]
) -> Float[Array, " p"]:
    """Solves matrix step = vector among the free coordinates; the others do not move.

    Directions in which the positive semi-definite matrix vanishes get (nearly) no step.
    """
    scale = jnp.where(free, unit_scale(jnp.where(free, jnp.diagonal(matrix), 0.0)), 0.0)
    inside = scale > 0
    correlation = scaled(matrix, scale) + jnp.diag(jnp.where(inside, RIDGE, 1.0))
    factor = jax.scipy.linalg.cho_factor(correlation, lower=True)
    return scale * jax.scipy.linalg.cho_solve(factor, scale * vector)
