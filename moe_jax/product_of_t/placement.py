"""Which experts a fit may choose from. The paper takes them as given; these choices are measured.

All in whitened coordinates x = scale^-1 (z - loc), where the target is roughly white.
"""

import math

import numpy as np
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t.experts import Experts, full_experts, low_rank_experts
from moe_jax.product_of_t.targets import LogDensity, derivatives_at, generator_of
from moe_jax.product_of_t.update import Whitening

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
    precision = np.asarray(scales)[:, None, None] * np.eye(dim)
    return full_experts(np.zeros((len(scales), dim)), precision)


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
    return low_rank_experts(np.asarray(loc), np.asarray(factor)[..., None])


def local_experts(
    log_density: LogDensity,
    whitening: Whitening,
    points: Float[np.ndarray, "experts dim"],
    local_scales: tuple[float | str, ...],
) -> Experts:
    """Experts at the points, with -Hessian / kappa, kappa from `local_scales` in turn.

    The Hessians are those of log p in whitened coordinates, the eigenvalues of their negatives
    raised to a positive floor.
    """
    loc, scale = np.asarray(whitening.loc), np.asarray(whitening.scale)
    hessians = derivatives_at(log_density, loc + points @ scale.T).hessians
    count, dim = points.shape
    curvature = -(scale.T @ hessians @ scale)
    finite = np.all(np.isfinite(curvature), axis=(-2, -1))[:, None, None]
    curvature = np.where(finite, 0.5 * (curvature + np.swapaxes(curvature, -1, -2)), np.eye(dim))
    values, vectors = np.linalg.eigh(curvature)
    values = np.clip(values, _CURVATURE_FLOOR, _CURVATURE_CEILING)
    # Keeps the condition number within what the definiteness check and Cholesky bear.
    values = np.maximum(values, 1e-10 * np.max(values, axis=-1, keepdims=True))
    kappas = [dim + 5.0 if each == "dof" else float(each) for each in local_scales]
    values = values / np.resize(kappas, count)[:, None]
    precision = (vectors * values[:, None, :]) @ np.swapaxes(vectors, -1, -2)
    return full_experts(points, 0.5 * (precision + np.swapaxes(precision, -1, -2)))


def choose_points(
    key: Key[Array, ""],
    points: Float[np.ndarray, "draws dim"],
    log_ratios: Float[np.ndarray, " draws"],
    count: int,
) -> Float[np.ndarray, "count dim"]:
    """Draws without replacement, with probabilities by sqrt(p / proposal): Gumbel's top k."""
    noise = generator_of(key).gumbel(size=log_ratios.shape)
    ranks = np.where(np.isfinite(log_ratios), 0.5 * log_ratios + noise, -np.inf)
    return points[np.argsort(-ranks, kind="stable")[:count]]


def jittered_points(
    key: Key[Array, ""],
    loc: Float[np.ndarray, "modes dim"],
    scale: Float[np.ndarray, "modes dim dim"],
    count: int,
) -> Float[np.ndarray, "count dim"]:
    """The modes, then points normal about them in turn with twice their Laplace scale."""
    noise = 2.0 * generator_of(key).standard_normal((count, loc.shape[-1]))
    noise[: len(loc)] = 0.0
    turn = np.arange(count) % len(loc)
    return loc[turn] + np.einsum("nij,nj->ni", scale[turn], noise)


def first_exponents(experts: Experts, dim: int) -> Float[np.ndarray, " experts"]:
    """(D + 5) / 2 in all, equal over the experts that are positive definite."""
    full = np.asarray(experts.is_full_rank)
    return full * (0.5 * (dim + 5.0) / math.fsum(full))
