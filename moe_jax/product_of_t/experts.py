"""The experts of a product: locations and precisions, and what every algorithm needs of them.

Expert k enters a product through D_k(z) = 1 + (z - mu_k)' Lambda_k (z - mu_k). Letters: B points
(`batch`), K experts (`experts`), D dimensions (`dim`), r columns of a low-rank factor (`rank`).
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# A matrix this close to singular, relative to its largest eigenvalue, is not called definite.
_DEFINITE = 1e-14


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
        full = jnp.ones_like(jnp.asarray(self.full_loc)[:, 0])
        positive = jnp.all(self.factored_diagonal > 0, axis=-1)
        return jnp.concatenate([full, positive.astype(full.dtype)])


def full_experts(
    loc: Float[Array, "experts dim"], precision: Float[Array, "experts dim dim"]
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
        factored_loc=jnp.zeros((0, dim), dtype),
        factored_factor=jnp.zeros((0, dim, 0), dtype),
        factored_diagonal=jnp.zeros((0, dim), dtype),
    )


def diagonal_experts(
    loc: Float[Array, "experts dim"], precision: Float[Array, "experts dim"]
) -> Experts:
    """Experts with diagonal precision matrices, given by their diagonals.

    Raises:
        ValueError: if the shapes disagree or an entry of a diagonal is not positive.
    """
    loc, precision = jnp.asarray(loc), jnp.asarray(precision)
    if not isinstance(precision, jax.core.Tracer) and not np.all(np.asarray(precision) > 0):
        raise ValueError(f"precision has the entry {np.min(precision)}: expected all > 0")
    factor = jnp.zeros((*loc.shape, 0), loc.dtype)
    return low_rank_experts(loc, factor, precision)


def low_rank_experts(
    loc: Float[Array, "experts dim"],
    factor: Float[Array, "experts dim rank"],
    diagonal: Float[Array, "experts dim"] | None = None,
) -> Experts:
    """Experts with Lambda = V V' + diag(d); without d they are flat along the kernel of V'.

    Raises:
        ValueError: if the shapes disagree, something is not finite or d has a negative entry.
    """
    loc, factor = jnp.asarray(loc), jnp.asarray(factor)
    diagonal = jnp.zeros(loc.shape, loc.dtype) if diagonal is None else jnp.asarray(diagonal)
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
        full_loc=jnp.zeros((0, dim), dtype),
        full_precision=jnp.zeros((0, dim, dim), dtype),
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

    def widen(factor: Array) -> Array:
        return jnp.pad(factor, ((0, 0), (0, 0), (0, rank - factor.shape[-1])))

    return Experts(
        full_loc=jnp.concatenate([each.full_loc for each in experts]),
        full_precision=jnp.concatenate([each.full_precision for each in experts]),
        factored_loc=jnp.concatenate([each.factored_loc for each in experts]),
        factored_factor=jnp.concatenate([widen(each.factored_factor) for each in experts]),
        factored_diagonal=jnp.concatenate([each.factored_diagonal for each in experts]),
    )


def transform_experts(
    experts: Experts, loc: Float[Array, " dim"], scale: Float[Array, "dim dim"]
) -> Experts:
    """The experts of x = scale^-1 (z - loc) as experts of z, with the same values D_k.

    mu becomes loc + scale mu and Lambda becomes scale^-T Lambda scale^-1. A diagonal d that is not
    zero becomes D more columns of V and, where Lambda is definite by its form, a smaller multiple
    of the identity, so that it still is.
    """
    has_diagonal = bool(np.any(np.asarray(experts.factored_diagonal)))
    return _transform(experts, loc, scale, has_diagonal)


@partial(jax.jit, static_argnums=3)
def _transform(experts: Experts, loc: Array, scale: Array, has_diagonal: bool) -> Experts:
    inverse = jnp.linalg.inv(scale)

    def move(mu: Array) -> Array:
        return loc[None] + mu @ scale.T

    factor = jnp.einsum("ji,kjr->kir", inverse, experts.factored_factor)
    diagonal = experts.factored_diagonal
    if has_diagonal:
        is_definite = jnp.all(diagonal > 0, axis=-1, keepdims=True)
        values, vectors = jnp.linalg.eigh(jnp.einsum("ji,kj,jl->kil", inverse, diagonal, inverse))
        least = jnp.where(is_definite, 0.5 * values[:, :1], 0.0)
        roots = vectors * jnp.sqrt(jnp.maximum(values - least, 0.0))[:, None, :]
        factor = jnp.concatenate([factor, roots], axis=-1)
        diagonal = jnp.broadcast_to(least, diagonal.shape)
    precision = inverse.T[None] @ experts.full_precision @ inverse[None]
    return Experts(
        full_loc=move(experts.full_loc),
        full_precision=0.5 * (precision + jnp.swapaxes(precision, -1, -2)),
        factored_loc=move(experts.factored_loc),
        factored_factor=factor,
        factored_diagonal=diagonal,
    )


def log_factors(
    experts: Experts, points: Float[Array, "batch dim"]
) -> Float[Array, "batch experts"]:
    """Log D_k(z_b)."""
    return jnp.log1p(quadratics(experts, points))


def quadratics(
    experts: Experts, points: Float[Array, "batch dim"]
) -> Float[Array, "batch experts"]:
    """(z_b - mu_k)' Lambda_k (z_b - mu_k)."""
    return _offset_products(experts, points)[1]


def expert_scores(
    experts: Experts, points: Float[Array, "batch dim"]
) -> tuple[Float[Array, "experts dim batch"], Float[Array, "batch experts"]]:
    """Gradients of -log D_k at z_b, -2 Lambda_k (z_b - mu_k) / D_k(z_b), and log D_k(z_b).

    The score of the product is linear in the exponents: grad log q(z) = sum_k alpha_k times these.
    """
    products, quadratic = _offset_products(experts, points)
    return products * (-2.0 / (1.0 + quadratic.T))[:, None], jnp.log1p(quadratic)


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
    for index, matrix in enumerate(precision):
        if not np.all(np.isfinite(matrix)):
            raise ValueError(f"precision[{index}] has an entry that is not finite")
        size = np.max(np.abs(matrix))
        if not np.allclose(matrix, matrix.T, rtol=0.0, atol=1e-5 * size):
            raise ValueError(f"precision[{index}] is not symmetric")
        eigenvalues = np.linalg.eigvalsh(matrix.astype(np.float64))
        if not eigenvalues[0] > _DEFINITE * eigenvalues[-1]:
            raise ValueError(
                f"precision[{index}] has the eigenvalue {eigenvalues[0]:.3g}: expected positive "
                "definite matrices"
            )
