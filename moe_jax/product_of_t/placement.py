"""Which experts a fit may choose from. The paper takes them as given; these choices are measured.

All in whitened coordinates x = scale^-1 (z - loc), where the target is roughly white.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t.experts import Experts, full_experts, low_rank_experts
from moe_jax.product_of_t.targets import LogDensity
from moe_jax.product_of_t.update import Whitening
from moe_jax.product_of_t.warmup import hessian

_LADDER_FREEDOMS = (1.0, 10.0, 100.0)
_BROAD = 0.01
# Curvatures below this, of a target of curvature about 1, are raised to it.
_CURVATURE_FLOOR = 1e-3
_CURVATURE_CEILING = 1e6
_OFFSETS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
_OFFSETS_MANY_DIMS = (-4.0, -1.5, 0.0, 1.5, 4.0)
_MANY_DIMS = 30


def ladder(dim: int) -> Experts:
    """Broad experts at the centre: I / (nu + D) for nu in (1, 10, 100), and I / (100 D).

    The last keeps the product integrable whatever else is chosen, at little cost in shape.
    """
    scales = [1.0 / (freedom + dim) for freedom in _LADDER_FREEDOMS] + [_BROAD / dim]
    precision = jnp.asarray(scales)[:, None, None] * jnp.eye(dim)[None]
    return full_experts(jnp.zeros((len(scales), dim)), precision)


def coordinate_experts(scale: Float[np.ndarray, "dim dim"]) -> Experts:
    """Rank-one experts in the single original coordinates, in units of their standard deviations.

    Coordinate d is the functional scale_d x of the whitened x, of standard deviation |scale_d|.
    """
    dim = scale.shape[0]
    offsets = _OFFSETS if dim < _MANY_DIMS else _OFFSETS_MANY_DIMS
    directions = scale / np.linalg.norm(scale, axis=1, keepdims=True)
    loc = [offset * direction for direction in directions for offset in (*offsets, 0.0)]
    # The last of each coordinate is twice as wide.
    widths = [1.0] * len(offsets) + [2.0]
    factor = [direction / width for direction in directions for width in widths]
    return low_rank_experts(jnp.asarray(loc), jnp.asarray(factor)[..., None])


def curvatures(
    log_density: LogDensity, whitening: Whitening, points: Float[Array, "experts dim"]
) -> Float[Array, "experts dim dim"]:
    """-Hessian of log p in whitened coordinates, eigenvalues raised to a positive floor."""

    def at(point: Array) -> Array:
        matrix = hessian(log_density, whitening.loc + whitening.scale @ point)
        matrix = -whitening.scale.T @ matrix @ whitening.scale
        finite = jnp.all(jnp.isfinite(matrix))
        matrix = jnp.where(finite, 0.5 * (matrix + matrix.T), jnp.eye(matrix.shape[0]))
        values, vectors = jnp.linalg.eigh(matrix)
        values = jnp.clip(values, _CURVATURE_FLOOR, _CURVATURE_CEILING)
        # Keeps the condition number within what the definiteness check and Cholesky bear.
        values = jnp.maximum(values, 1e-10 * jnp.max(values))
        return (vectors * values[None]) @ vectors.T

    return jax.vmap(at)(points)


def local_experts(
    log_density: LogDensity,
    whitening: Whitening,
    points: Float[Array, "experts dim"],
    local_scales: tuple[float | str, ...],
) -> Experts:
    """Experts at the points, with -Hessian / kappa, kappa from `local_scales` in turn."""
    return _local_experts(log_density, local_scales, whitening, points)


@partial(jax.jit, static_argnums=(0, 1))
def _local_experts(
    log_density: LogDensity,
    local_scales: tuple[float | str, ...],
    whitening: Whitening,
    points: Array,
) -> Experts:
    dim = points.shape[-1]
    kappas = [dim + 5.0 if each == "dof" else float(each) for each in local_scales]
    kappa = jnp.asarray([kappas[i % len(kappas)] for i in range(points.shape[0])])
    precision = curvatures(log_density, whitening, points) / kappa[:, None, None]
    return full_experts(points, 0.5 * (precision + jnp.swapaxes(precision, -1, -2)))


@partial(jax.jit, static_argnums=3)
def choose_points(
    key: Key[Array, ""],
    points: Float[Array, "draws dim"],
    log_ratios: Float[Array, " draws"],
    count: int,
) -> Float[Array, "count dim"]:
    """Draws without replacement, with probabilities by sqrt(p / proposal): Gumbel's top k."""
    noise = jax.random.gumbel(key, log_ratios.shape, log_ratios.dtype)
    ranks = jnp.where(jnp.isfinite(log_ratios), 0.5 * log_ratios + noise, -jnp.inf)
    return points[jax.lax.top_k(ranks, count)[1]]


def jittered_points(
    key: Key[Array, ""],
    loc: Float[Array, "modes dim"],
    scale: Float[Array, "modes dim dim"],
    count: int,
) -> Float[Array, "count dim"]:
    """The modes, then points normal about them in turn with twice their Laplace scale."""
    noise = 2.0 * jax.random.normal(key, (count, loc.shape[-1]), loc.dtype)
    turn = jnp.arange(count) % loc.shape[0]
    noise = jnp.where((jnp.arange(count) < loc.shape[0])[:, None], 0.0, noise)
    return loc[turn] + jnp.einsum("nij,nj->ni", scale[turn], noise)


def first_exponents(experts: Experts, dim: int) -> Float[np.ndarray, " experts"]:
    """(D + 5) / 2 in all, equal over the experts that are positive definite."""
    full = np.asarray(experts.is_full_rank)
    return full * (0.5 * (dim + 5.0) / math.fsum(full))
