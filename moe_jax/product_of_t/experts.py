"""The experts of a product: locations and precisions, and what every algorithm needs of them.

Expert k enters a product through D_k(z) = 1 + (z - mu_k)' Lambda_k (z - mu_k). Letters: B points
(`batch`), K experts (`experts`), D dimensions (`dim`), r columns of a low-rank factor (`rank`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# A matrix this close to singular, relative to its largest eigenvalue, is not called definite.
_DEFINITE = 1e-14
_BLOCK = 512


@chex.dataclass(frozen=True)
class Experts:
    """K = F + R experts: F with full precision matrices, then R with factored ones.

    A factored precision is Lambda = V V' + diag(d): diagonal if V has no columns, low rank if d is
    zero. Whatever is indexed by expert, such as exponents, has the full ones first.

    Attributes:
        full_loc: mu of the full experts.
        full_precision: Lambda of the full experts, positive definite.
        factored_loc: mu of the factored experts.
        factored_factor: V, any number of columns.
        factored_diagonal: d, not negative.
    """

    full_loc: Float[Array, "full dim"]
    full_precision: Float[Array, "full dim dim"]
    factored_loc: Float[Array, "factored dim"]
    factored_factor: Float[Array, "factored dim rank"]
    factored_diagonal: Float[Array, "factored dim"]

    @property
    def num_experts(self) -> int:
        """K."""
        return self.full_loc.shape[0] + self.factored_loc.shape[0]

    @property
    def dim(self) -> int:
        """D."""
        return self.full_loc.shape[-1]

    @property
    def loc(self) -> Float[Array, "experts dim"]:
        """Mu of every expert."""
        return jnp.concatenate([self.full_loc, self.factored_loc])

    @property
    def is_full_rank(self) -> Float[Array, " experts"]:
        """1 where Lambda_k is positive definite by its form, else 0; in the experts' dtype."""
        # The dtype that these have where they are used, which numpy's arrays may exceed.
        dtype = jax.dtypes.canonicalize_dtype(self.full_loc.dtype)
        full = jnp.ones(self.full_loc.shape[0], dtype)
        positive = jnp.all(self.factored_diagonal > 0, axis=-1)
        return jnp.concatenate([full, positive.astype(dtype)])


def full_experts(
    loc: Float[Array, "experts dim"] | Float[np.ndarray, "experts dim"],
    precision: Float[Array, "experts dim dim"] | Float[np.ndarray, "experts dim dim"],
) -> Experts:
    """Experts with full precision matrices.

    Raises:
        ValueError: if the shapes disagree or a matrix is not symmetric positive definite.
    """
    loc, precision = jnp.asarray(loc), jnp.asarray(precision)
    if loc.ndim != 2 or precision.shape != (*loc.shape, loc.shape[-1]):
        raise ValueError(
            f"loc of shape {loc.shape} and precision of shape {precision.shape}: expected (K, D) "
            "and (K, D, D)"
        )
    if not isinstance(precision, jax.core.Tracer):
        _check_definite(np.asarray(precision))
    dtype, dim = loc.dtype, loc.shape[-1]
    return Experts(
        full_loc=loc,
        full_precision=precision,
        factored_loc=_nothing((0, dim), dtype),
        factored_factor=_nothing((0, dim, 0), dtype),
        factored_diagonal=_nothing((0, dim), dtype),
    )


def diagonal_experts(
    loc: Float[Array, "experts dim"] | Float[np.ndarray, "experts dim"],
    precision: Float[Array, "experts dim"] | Float[np.ndarray, "experts dim"],
) -> Experts:
    """Experts with diagonal precision matrices, given by their diagonals.

    Raises:
        ValueError: if the shapes disagree or an entry of a diagonal is not positive.
    """
    loc, precision = jnp.asarray(loc), jnp.asarray(precision)
    if not isinstance(precision, jax.core.Tracer) and not np.all(np.asarray(precision) > 0):
        raise ValueError(f"precision has the entry {np.min(precision)}: expected all > 0")
    return low_rank_experts(loc, _nothing((*loc.shape, 0), loc.dtype), precision)


def low_rank_experts(
    loc: Float[Array, "experts dim"] | Float[np.ndarray, "experts dim"],
    factor: Float[Array, "experts dim rank"] | Float[np.ndarray, "experts dim rank"],
    diagonal: Float[Array, "experts dim"] | Float[np.ndarray, "experts dim"] | None = None,
) -> Experts:
    """Experts with Lambda = V V' + diag(d); without d they are flat along the kernel of V'.

    Raises:
        ValueError: if the shapes disagree, something is not finite or d has a negative entry.
    """
    loc, factor = jnp.asarray(loc), jnp.asarray(factor)
    diagonal = _nothing(loc.shape, loc.dtype) if diagonal is None else jnp.asarray(diagonal)
    if loc.ndim != 2 or factor.shape[:-1] != loc.shape or diagonal.shape != loc.shape:
        raise ValueError(
            f"loc of shape {loc.shape}, factor of shape {factor.shape}, diagonal of shape "
            f"{diagonal.shape}: expected (K, D), (K, D, r), (K, D)"
        )
    if not any(isinstance(array, jax.core.Tracer) for array in (loc, factor, diagonal)):
        if not np.all(np.asarray(diagonal) >= 0):
            raise ValueError(f"diagonal has the entry {np.min(diagonal)}: expected all >= 0")
        if not (np.all(np.isfinite(factor)) and np.all(np.isfinite(loc))):
            raise ValueError("loc or factor has an entry that is not finite")
    dtype, dim = loc.dtype, loc.shape[-1]
    return Experts(
        full_loc=_nothing((0, dim), dtype),
        full_precision=_nothing((0, dim, dim), dtype),
        factored_loc=loc,
        factored_factor=factor,
        factored_diagonal=diagonal,
    )


def join_experts(*experts: Experts) -> Experts:
    """All experts in one record: every full one, in order, then every factored one.

    Raises:
        ValueError: if the dimensions differ.
    """
    dims = {each.dim for each in experts}
    if len(dims) != 1:
        raise ValueError(f"experts of dimensions {sorted(dims)}: expected one dimension")
    rank = max(each.factored_factor.shape[-1] for each in experts)
    xp = _array_module(*experts)

    def widen(factor: Any) -> Any:
        return xp.pad(factor, ((0, 0), (0, 0), (0, rank - factor.shape[-1])))

    def join(*arrays: Any) -> Array:
        return jnp.asarray(xp.concatenate(arrays))

    return Experts(
        full_loc=join(*[each.full_loc for each in experts]),
        full_precision=join(*[each.full_precision for each in experts]),
        factored_loc=join(*[each.factored_loc for each in experts]),
        factored_factor=join(*[widen(each.factored_factor) for each in experts]),
        factored_diagonal=join(*[each.factored_diagonal for each in experts]),
    )


def transform_experts(
    experts: Experts,
    loc: Float[Array, " dim"] | Float[np.ndarray, " dim"],
    scale: Float[Array, "dim dim"] | Float[np.ndarray, "dim dim"],
) -> Experts:
    """The experts of x = scale^-1 (z - loc) as experts of z, with the same values D_k.

    mu becomes loc + scale mu and Lambda becomes scale^-T Lambda scale^-1. A diagonal d that is not
    zero becomes D more columns of V and, where Lambda is definite by its form, a smaller multiple
    of the identity, so that it still is.
    """
    xp = _array_module(experts, loc, scale)
    if xp is np:
        experts, loc, scale = jax.tree.map(np.asarray, (experts, loc, scale))
    inverse = xp.linalg.inv(scale)

    def move(mu: Any) -> Array:
        return jnp.asarray(loc[None] + mu @ scale.T)

    factor = inverse.T @ experts.factored_factor
    diagonal = experts.factored_diagonal
    if xp is jnp or np.any(diagonal):
        is_definite = xp.all(diagonal > 0, axis=-1, keepdims=True)
        values, vectors = xp.linalg.eigh((inverse.T * diagonal[:, None, :]) @ inverse)
        least = xp.where(is_definite, 0.5 * values[:, :1], xp.zeros_like(values[:, :1]))
        roots = vectors * xp.sqrt(xp.maximum(values - least, 0.0))[:, None, :]
        factor = xp.concatenate([factor, roots], axis=-1)
        diagonal = xp.broadcast_to(least, diagonal.shape)
    precision = inverse.T[None] @ experts.full_precision @ inverse[None]
    return Experts(
        full_loc=move(experts.full_loc),
        full_precision=jnp.asarray(0.5 * (precision + xp.swapaxes(precision, -1, -2))),
        factored_loc=move(experts.factored_loc),
        factored_factor=jnp.asarray(factor),
        factored_diagonal=jnp.asarray(diagonal),
    )


def _nothing(shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.asarray(np.zeros(shape, dtype))


def _array_module(*trees: Any) -> Any:
    """numpy, which compiles nothing, unless a leaf is traced."""
    leaves = jax.tree.leaves(trees)
    return jnp if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) else np


def in_blocks(function: Callable[[Any], Any], points: np.ndarray, block: int) -> Any:
    """`function` of a block of points at a time, the last filled up with its last point."""
    parts = []
    for first in range(0, len(points), block):
        some = points[first : first + block]
        count = len(some)
        filled = np.concatenate([some, np.repeat(some[-1:], block - count, axis=0)])
        result = jax.tree.map(np.asarray, function(filled))
        parts.append(jax.tree.map(lambda leaf, count=count: leaf[:count], result))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def log_factors(
    experts: Experts, points: Float[Array, "batch dim"]
) -> Float[Array, "batch experts"]:
    """Log D_k(z_b)."""
    return jnp.log1p(quadratics(experts, points))


def log_factors_at(
    experts: Experts, points: Float[np.ndarray, "batch dim"]
) -> Float[np.ndarray, "batch experts"]:
    """`log_factors` of numpy's points, any number of them by the same compiled call."""
    return in_blocks(partial(_log_factors, experts), points, _BLOCK)


def quadratics(
    experts: Experts, points: Float[Array, "batch dim"]
) -> Float[Array, "batch experts"]:
    """(z_b - mu_k)' Lambda_k (z_b - mu_k)."""
    return _offset_products(experts, points)[1]


def expanded_quadratics(
    experts: Experts, points: Float[Array, "batch dim"]
) -> Float[Array, "batch experts"]:
    """`quadratics` as z' Lambda z - 2 z' Lambda mu + mu' Lambda mu, about the mean location.

    A product of (B, D^2) and (D^2, K), three times as fast as one that passes through (K, D, B). It
    cancels: good enough in double precision for draws, whose rates need few digits; in single
    precision it is `quadratics`.
    """
    if points.dtype != np.float64:
        return quadratics(experts, points)
    num_full, dim = experts.full_loc.shape
    centre = jnp.mean(experts.loc, axis=0)
    offset, loc = points - centre[None], experts.full_loc - centre[None]
    slope = (experts.full_precision @ loc[..., None])[..., 0]
    squares = (offset[:, :, None] * offset[:, None, :]).reshape(-1, dim * dim)
    full = squares @ experts.full_precision.reshape(num_full, dim * dim).T
    full = full - 2.0 * (offset @ slope.T) + jnp.sum(slope * loc, axis=-1)[None]

    factor, loc = experts.factored_factor, experts.factored_loc - centre[None]
    columns = jnp.swapaxes(factor, 0, 1).reshape(dim, -1)
    shift = jnp.sum(factor * loc[..., None], axis=1).reshape(-1)
    shape = (points.shape[0], factor.shape[0], factor.shape[2])
    projection = (offset @ columns - shift[None]).reshape(shape)
    diagonal = experts.factored_diagonal
    factored = jnp.sum(projection**2, axis=-1) + offset**2 @ diagonal.T
    factored = factored - 2.0 * (offset @ (diagonal * loc).T)
    factored = factored + jnp.sum(diagonal * loc**2, axis=-1)[None]
    return jnp.maximum(jnp.concatenate([full, factored], axis=-1), 0.0)


def expert_scores(
    experts: Experts, points: Float[Array, "batch dim"]
) -> tuple[Float[Array, "experts dim batch"], Float[Array, "batch experts"]]:
    """Gradients of -log D_k at z_b, -2 Lambda_k (z_b - mu_k) / D_k(z_b), and log D_k(z_b).

    The score of the product is linear in the exponents: grad log q(z) = sum_k alpha_k times these.
    """
    products, quadratic = _offset_products(experts, points)
    return products * (-2.0 / (1.0 + quadratic.T))[:, None], jnp.log1p(quadratic)


_log_factors = jax.jit(log_factors)


def _offset_products(experts: Experts, points: Array) -> tuple[Array, Array]:
    """Lambda_k (z_b - mu_k), of shape (K, D, B), and the quadratic forms, (B, K).

    Lambda_k z_b of all pairs is one matrix product, several times faster than one for each expert;
    coordinates about the mean location keep the difference from cancelling.
    """
    num_full, dim = experts.full_loc.shape
    centre = jnp.mean(experts.loc, axis=0)
    columns = (points - centre[None]).T
    loc = experts.full_loc - centre[None]
    full_product = experts.full_precision.reshape(num_full * dim, dim) @ columns
    full_product = full_product.reshape(num_full, dim, columns.shape[1])
    full_product = full_product - (experts.full_precision @ loc[..., None])
    full_quadratic = jnp.sum((columns[None] - loc[..., None]) * full_product, axis=1)

    factor, loc = experts.factored_factor, experts.factored_loc - centre[None]
    num_factored, _, rank = factor.shape
    transposed = jnp.swapaxes(factor, -1, -2)
    projection = transposed.reshape(num_factored * rank, dim) @ columns
    projection = projection.reshape(num_factored, rank, columns.shape[1])
    projection = projection - transposed @ loc[..., None]
    offset = columns[None] - loc[..., None]
    product = factor * projection if rank == 1 else factor @ projection
    product = product + experts.factored_diagonal[..., None] * offset
    quadratic = jnp.sum(projection**2, axis=1)
    quadratic = quadratic + jnp.sum(experts.factored_diagonal[..., None] * offset**2, axis=1)
    # Rounding may take the form of a nearly singular matrix below zero.
    quadratic = jnp.maximum(jnp.concatenate([full_quadratic, quadratic]), 0.0)
    return jnp.concatenate([full_product, product]), quadratic.T


def weighted_quadratic(
    experts: Experts, weights: Float[Array, "batch experts"]
) -> tuple[Float[Array, "batch dim"], Float[Array, "batch dim dim"]]:
    """Centre and Cholesky factor of the quadratic sum_k w_k (z - mu_k)' Lambda_k (z - mu_k).

    Lambda(w) = sum_k w_k Lambda_k = L L' and m(w) = Lambda(w)^-1 sum_k w_k Lambda_k mu_k.

    Returns:
        m(w) and L, lower triangular.
    """
    num_full, dim = experts.full_loc.shape
    full_weights, weights = weights[:, :num_full], weights[:, num_full:]
    # Locations far from zero cost digits in float32, so they are taken about their mean.
    centre = jnp.mean(experts.loc, axis=0)
    full_loc, loc = experts.full_loc - centre[None], experts.factored_loc - centre[None]
    precision = full_weights @ experts.full_precision.reshape(num_full, dim * dim)
    factor = experts.factored_factor
    outer = jnp.einsum("kir,kjr->kij", factor, factor).reshape(factor.shape[0], dim * dim)
    precision = (precision + weights @ outer).reshape(weights.shape[0], dim, dim)
    diagonal = weights @ experts.factored_diagonal
    precision = precision + diagonal[:, :, None] * jnp.eye(dim, dtype=diagonal.dtype)[None]
    full_potential = jnp.einsum("kij,kj->ki", experts.full_precision, full_loc)
    potential = jnp.einsum("kir,kjr,kj->ki", factor, factor, loc)
    potential = weights @ (potential + experts.factored_diagonal * loc)
    potential = potential + full_weights @ full_potential
    cholesky = jnp.linalg.cholesky(precision)
    half = _solve(cholesky, potential)
    return centre[None] + _solve(cholesky, half, transpose=True), cholesky


def _solve(cholesky: Array, vector: Array, *, transpose: bool = False) -> Array:
    """L^-1 v, or L^-T v, for every matrix of a batch."""
    solution = jax.lax.linalg.triangular_solve(
        cholesky, vector[..., None], left_side=True, lower=True, transpose_a=transpose
    )
    return solution[..., 0]


def _check_definite(precision: np.ndarray) -> None:
    finite = np.all(np.isfinite(precision), axis=(-2, -1))
    if not np.all(finite):
        raise ValueError(f"precision[{np.argmin(finite)}] has an entry that is not finite")
    size = np.max(np.abs(precision), axis=(-2, -1), initial=0.0)
    skew = np.max(np.abs(precision - np.swapaxes(precision, -1, -2)), axis=(-2, -1), initial=0.0)
    if not np.all(skew <= 1e-5 * size):
        raise ValueError(f"precision[{np.argmax(skew > 1e-5 * size)}] is not symmetric")
    eigenvalues = np.linalg.eigvalsh(precision.astype(np.float64))
    bad = ~(eigenvalues[..., 0] > _DEFINITE * eigenvalues[..., -1])
    if np.any(bad):
        index = int(np.argmax(bad))
        raise ValueError(
            f"precision[{index}] has the eigenvalue {eigenvalues[index, 0]:.3g}: expected positive "
            "definite matrices"
        )
