"""Product of consecutive groups of rows with one matrix a group, with its own derivative.

Implementations differ in speed, not in result:

- `loop`: a loop over groups, and inside it over blocks of rows; work proportional to the rows.
- `ragged_dot`: `jax.lax.ragged_dot`; a grouped kernel on TPU v5p, but groups times the work on CPU.
- `dense`: every group's matrix against every row, then a selection; the reference.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

IMPLEMENTATIONS = ("loop", "ragged_dot", "dense")
BLOCK_ROWS = 256
"""Rows of one product of the `loop` implementation; half a block a group is wasted on average."""


def grouped_matmul(
    lhs: Float[Array, "rows inner"],
    rhs: Float[Array, "groups inner outer"],
    group_sizes: Int[Array, " groups"],
    implementation: str | None = None,
) -> Float[Array, "rows outer"]:
    """Multiplies the rows of group g by rhs[g].

    Group 0 holds the first group_sizes[0] rows, group 1 the next group_sizes[1], and so on. Rows
    past the sum are 0 whatever they hold, and so are their gradients; an empty group's matrix has
    gradient exactly 0. Products accumulate in float32; the result has the type of `lhs`.

    Args:
        lhs: rows sorted by group.
        rhs: one matrix a group, of the same type as `lhs`.
        group_sizes: non-negative, with a sum of at most `rows`.
        implementation: one of `IMPLEMENTATIONS`; None picks `loop` on CPU, else
            `ragged_dot`.

    Raises:
        ValueError: if the shapes or types do not fit, or the implementation is unknown.
    """
    fits = (lhs.ndim, rhs.ndim, group_sizes.ndim) == (2, 3, 1)
    if not fits or lhs.shape[1] != rhs.shape[1] or rhs.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"lhs {lhs.shape}, rhs {rhs.shape} and group_sizes {group_sizes.shape} do not fit: "
            "expected [rows, inner], [groups, inner, outer] and [groups]"
        )
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs has type {lhs.dtype} and rhs {rhs.dtype}; they must be the same")
    if implementation is None:
        implementation = default_implementation()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {IMPLEMENTATIONS}")
    return _grouped_matmul(lhs, rhs, group_sizes.astype(jnp.int32), implementation)


def default_implementation() -> str:
    """The fastest implementation on the default device."""
    return "loop" if jax.default_backend() == "cpu" else "ragged_dot"


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(lhs: Array, rhs: Array, group_sizes: Array, implementation: str) -> Array:
    return _ROW_PRODUCTS[implementation](lhs, rhs, group_sizes)


def _forward(
    lhs: Array, rhs: Array, group_sizes: Array, implementation: str
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped_matmul(lhs, rhs, group_sizes, implementation), (lhs, rhs, group_sizes)


def _backward(
    implementation: str, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    lhs_gradient = _ROW_PRODUCTS[implementation](gradient, jnp.swapaxes(rhs, 1, 2), group_sizes)
    rhs_gradient = _GROUP_PRODUCTS[implementation](lhs, gradient, group_sizes)
    return lhs_gradient, rhs_gradient.astype(rhs.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _loop_rows(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """out[m] = lhs[m] rhs[group of m], block by block."""
    num_rows, block = lhs.shape[0], min(BLOCK_ROWS, lhs.shape[0])
    ends = jnp.cumsum(group_sizes)
    # XLA on CPU widens a whole bfloat16 buffer to update a slice of it, but not an integer one.
    carrier = jnp.uint16 if lhs.dtype == jnp.bfloat16 else lhs.dtype
    out = jnp.zeros((num_rows, rhs.shape[2]), dtype=carrier)
    if num_rows == 0:
        return out.astype(lhs.dtype)

    def multiply_group(group: Array, out: Array) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        start, end = ends[group] - group_sizes[group], ends[group]

        def multiply_block(index: Array, out: Array) -> Array:
            first, inside = _block(index, start, end, block, num_rows)
            rows = jax.lax.dynamic_slice_in_dim(lhs, first, block)
            product = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
            product = _bitcast(product.astype(lhs.dtype), carrier)
            # A block may reach into its neighbours' rows: those keep what they hold.
            kept = jax.lax.dynamic_slice_in_dim(out, first, block)
            merged = jnp.where(inside[:, None], product, kept)
            return jax.lax.dynamic_update_slice_in_dim(out, merged, first, axis=0)

        return jax.lax.fori_loop(0, _num_blocks(end - start, block), multiply_block, out)

    return _bitcast(jax.lax.fori_loop(0, rhs.shape[0], multiply_group, out), lhs.dtype)


def _loop_groups(lhs: Array, gradient: Array, group_sizes: Array) -> Array:
    """out[g] = sum over the rows m of group g of lhs[m] gradient[m]^T, in float32."""
    num_rows, block = lhs.shape[0], min(BLOCK_ROWS, lhs.shape[0])
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    out = jnp.zeros((num_groups, lhs.shape[1], gradient.shape[1]), dtype=jnp.float32)
    if num_rows == 0:
        return out

    def reduce_group(group: Array, out: Array) -> Array:
        start, end = ends[group] - group_sizes[group], ends[group]

        def add_block(index: Array, total: Array) -> Array:
            first, inside = _block(index, start, end, block, num_rows)
            left = jax.lax.dynamic_slice_in_dim(lhs, first, block)
            right = jax.lax.dynamic_slice_in_dim(gradient, first, block)
            # Both sides: a NaN in a neighbour's row would survive a product with 0.
            left = jnp.where(inside[:, None], left, jnp.zeros_like(left))
            right = jnp.where(inside[:, None], right, jnp.zeros_like(right))
            return total + jnp.dot(left.T, right, preferred_element_type=jnp.float32)

        total = jnp.zeros(out.shape[1:], dtype=jnp.float32)
        total = jax.lax.fori_loop(0, _num_blocks(end - start, block), add_block, total)
        return jax.lax.dynamic_update_index_in_dim(out, total, group, axis=0)

    return jax.lax.fori_loop(0, num_groups, reduce_group, out)


def _bitcast(values: Array, dtype: jax.typing.DTypeLike) -> Array:
    return values if values.dtype == dtype else jax.lax.bitcast_convert_type(values, dtype)


def _num_blocks(size: Array, block: int) -> Array:
    return (size + (block - 1)) // block


def _block(
    index: Array, start: Array, end: Array, block: int, num_rows: int
) -> tuple[Array, Array]:
    """First row of a block, clamped to fit, and which of its rows it is to compute."""
    wanted = start + index * block
    first = jnp.minimum(wanted, num_rows - block)
    row = first + jnp.arange(block, dtype=jnp.int32)
    return first, (row >= wanted) & (row < end)


# Under vmap, ragged_dot accepts nothing but a batch of all its arguments: take them in turn.
@jax.custom_batching.sequential_vmap
def _ragged_rows(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    inside = _inside(lhs, group_sizes)
    lhs = jnp.where(inside, lhs, jnp.zeros_like(lhs))
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
    # Some kernels leave the rows past the last group uninitialised.
    return jnp.where(inside, out, 0.0).astype(lhs.dtype)


@jax.custom_batching.sequential_vmap
def _ragged_groups(lhs: Array, gradient: Array, group_sizes: Array) -> Array:
    inside = _inside(lhs, group_sizes)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    out = jax.lax.ragged_dot_general(
        jnp.where(inside, lhs, jnp.zeros_like(lhs)),
        jnp.where(inside, gradient, jnp.zeros_like(gradient)),
        group_sizes,
        numbers,
        preferred_element_type=jnp.float32,
    )
    # Some kernels leave the gradient of an empty group uninitialised.
    return jnp.where((group_sizes > 0)[:, None, None], out, 0.0)


def _dense_rows(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    members = _membership(lhs, group_sizes)
    every = jnp.einsum("mk,gkn->gmn", lhs, rhs, preferred_element_type=jnp.float32)
    return jnp.sum(jnp.where(members[:, :, None], every, 0.0), axis=0).astype(lhs.dtype)


def _dense_groups(lhs: Array, gradient: Array, group_sizes: Array) -> Array:
    members = _membership(lhs, group_sizes)[:, :, None]
    left = jnp.where(members, lhs[None], jnp.zeros_like(lhs)[None])
    right = jnp.where(members, gradient[None], jnp.zeros_like(gradient)[None])
    return jnp.einsum("gmk,gmn->gkn", left, right, preferred_element_type=jnp.float32)


def _inside(lhs: Array, group_sizes: Array) -> Array:
    num_inside = jnp.sum(group_sizes, dtype=jnp.int32)
    return (jnp.arange(lhs.shape[0], dtype=jnp.int32) < num_inside)[:, None]


def _membership(lhs: Array, group_sizes: Array) -> Array:
    """bool[groups, rows], which rows belong to which group."""
    ends = jnp.cumsum(group_sizes)[:, None]
    row = jnp.arange(lhs.shape[0], dtype=jnp.int32)[None, :]
    return (row >= ends - group_sizes[:, None]) & (row < ends)


_Product = Callable[[Array, Array, Array], Array]
_ROW_PRODUCTS: dict[str, _Product] = {
    "loop": _loop_rows,
    "ragged_dot": _ragged_rows,
    "dense": _dense_rows,
}
_GROUP_PRODUCTS: dict[str, _Product] = {
    "loop": _loop_groups,
    "ragged_dot": _ragged_groups,
    "dense": _dense_groups,
}
