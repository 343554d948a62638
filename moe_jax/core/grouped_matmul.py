"""Product of consecutive groups of rows with one matrix a group, with its own derivative.

Implementations differ in speed, not in result:

- `loop`: a loop over groups, and inside it over blocks of rows; work proportional to the rows.
- `ragged_dot`: `jax.lax.ragged_dot`; groups times the work on CPU, and on TPU for the gradient of
  `rhs`.
- `pallas`: kernels for TPU, see `pallas_matmul`; interpreted, and slow, elsewhere.
- `dense`: every group's matrix against every row, then a selection; the reference, and the only one
  with forward-mode derivatives (`jax.jvp`, `jax.linearize`, `jax.hessian`).

All have reverse-mode derivatives of any order.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.core.pallas_matmul import device_at_hand, pallas_groups, pallas_rows
from moe_jax.core.precision import wide_type
from moe_jax.core.row_blocks import (
    Block,
    add_to_group,
    as_carrier,
    buffers,
    clear,
    columns_ahead,
    from_carrier,
    loop_over_blocks,
    matmul_wide,
    read,
    read_columns,
    write,
)
from moe_jax.core.varying import vary_alike


def grouped_matmul(
    lhs: Float[Array, "rows inner"],
    rhs: Float[Array, "groups inner outer"],
    group_sizes: Int[Array, " groups"],
    implementation: str | None = None,
) -> Float[Array, "rows outer"]:
    """Multiplies the rows of group g by rhs[g].

    Group 0 holds the first group_sizes[0] rows, group 1 the next group_sizes[1], and so on. Rows
    past the sum are 0 whatever they hold, and so are their gradients; an empty group's matrix has
    gradient exactly 0. Products accumulate in float32, of float64 in float64; the result has the
    type of `lhs`.

    Args:
        lhs: rows sorted by group.
        rhs: one matrix a group, of the same type as `lhs`.
        group_sizes: non-negative. What exceeds the number of rows is left out of the last groups.
        implementation: one of `IMPLEMENTATIONS`; None picks `default_implementation()`.

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
    implementation = check_implementation(implementation)
    group_sizes = group_sizes.astype(jnp.int32)
    if implementation == "dense":
        return _dense(lhs, rhs, group_sizes)
    return _multiply_rows(implementation, False, *vary_alike(lhs, rhs, group_sizes))


def default_implementation() -> str:
    """`loop` on CPU, `pallas` on TPU, `ragged_dot` elsewhere.

    Decided by the device of the mesh set by `jax.set_mesh`, which may be one to compile for ahead
    of time, else by the default device. What XLA makes of `ragged_dot` on TPU changes: libtpu
    0.0.42 computes the gradient of `rhs` for every group at once on v5e, v5p and v6e; 0.0.52 does
    so with all products on v5e and v6e, and with none on v5p.
    """
    return {"cpu": "loop", "tpu": "pallas"}.get(device_at_hand().platform, "ragged_dot")


def check_implementation(implementation: str | None) -> str:
    """The implementation meant; raises ValueError if it is unknown."""
    if implementation is None:
        return default_implementation()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {IMPLEMENTATIONS}")
    return implementation


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_rows(
    implementation: str, transpose_rhs: bool, lhs: Array, rhs: Array, group_sizes: Array
) -> Array:
    """out[m] = lhs[m] rhs[group of m], or lhs[m] rhs[group of m]^T."""
    return _ROW_PRODUCTS[implementation](lhs, rhs, group_sizes, transpose_rhs=transpose_rhs)


def _multiply_rows_forward(
    implementation: str, transpose_rhs: bool, lhs: Array, rhs: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    out = _multiply_rows(implementation, transpose_rhs, lhs, rhs, group_sizes)
    return out, (lhs, rhs, group_sizes)


def _multiply_rows_backward(
    implementation: str,
    transpose_rhs: bool,
    residuals: tuple[Array, Array, Array],
    gradient: Array,
) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    lhs_gradient = _multiply_rows(implementation, not transpose_rhs, gradient, rhs, group_sizes)
    pair = (gradient, lhs) if transpose_rhs else (lhs, gradient)
    rhs_gradient = _sum_groups(implementation, *pair, group_sizes)
    return lhs_gradient, rhs_gradient.astype(rhs.dtype), None


_multiply_rows.defvjp(_multiply_rows_forward, _multiply_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_groups(implementation: str, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    """out[g] = sum over the rows m of group g of lhs[m] rhs[m]^T, in `wide_type`."""
    return _GROUP_PRODUCTS[implementation](lhs, rhs, group_sizes)


def _sum_groups_forward(
    implementation: str, lhs: Array, rhs: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _sum_groups(implementation, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _sum_groups_backward(
    implementation: str, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    gradient = gradient.astype(lhs.dtype)
    lhs_gradient = _multiply_rows(implementation, True, rhs, gradient, group_sizes)
    rhs_gradient = _multiply_rows(implementation, False, lhs, gradient, group_sizes)
    return lhs_gradient, rhs_gradient, None


_sum_groups.defvjp(_sum_groups_forward, _sum_groups_backward)


def _loop_rows(lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool) -> Array:
    num_outer = rhs.shape[1] if transpose_rhs else rhs.shape[2]

    # Under vmap a loop would run every block of every example and then select.
    @jax.custom_batching.sequential_vmap
    def product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
        rows, matrices = as_carrier(lhs), as_carrier(rhs)

        def start_group(group: Array) -> Callable[[Block, Array], Array]:
            matrix = jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False)
            matrix = from_carrier(matrix, rhs.dtype)

            def multiply(block: Block, out: Array) -> Array:
                left = from_carrier(read(rows, block), lhs.dtype)
                return write(out, matmul_wide(left, matrix, transpose_rhs=transpose_rhs), block)

            return multiply

        shape = (lhs.shape[0], num_outer)
        (out,) = buffers([shape], lhs.dtype, group_sizes)
        out = loop_over_blocks(start_group, group_sizes, lhs.shape[0], out)
        return from_carrier(out, lhs.dtype)

    return product(lhs, rhs, group_sizes)


@jax.custom_batching.sequential_vmap
def _loop_groups(lhs: Array, gradient: Array, group_sizes: Array) -> Array:
    columns, rows = columns_ahead(lhs), as_carrier(gradient)

    def start_group(group: Array) -> Callable[[Block, Array], Array]:
        def add(block: Block, out: Array) -> Array:
            # Both sides: a NaN in a neighbour's row would survive a product with 0.
            right = from_carrier(clear(read(rows, block), block.unseen[:, None]), lhs.dtype)
            product = matmul_wide(read_columns(columns, block, lhs.dtype), right)
            return add_to_group(out, product, group)

        return add

    shape = (group_sizes.shape[0], lhs.shape[1], gradient.shape[1])
    (out,) = buffers([shape], wide_type(lhs.dtype), group_sizes)
    return loop_over_blocks(start_group, group_sizes, lhs.shape[0], out)


def _ragged_rows(lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool) -> Array:
    # Under vmap, ragged_dot accepts nothing but a batch of all its arguments: take them in turn.
    @jax.custom_batching.sequential_vmap
    def product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
        inside = _inside(lhs, group_sizes)
        lhs = jnp.where(inside, lhs, jnp.zeros_like(lhs))
        out = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=wide_type(lhs.dtype))
        # Some kernels leave the rows past the last group uninitialised.
        return jnp.where(inside, out, 0.0).astype(lhs.dtype)

    return product(lhs, jnp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs, group_sizes)


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
        preferred_element_type=wide_type(lhs.dtype),
    )
    # Some kernels leave the gradient of an empty group uninitialised.
    return jnp.where((group_sizes > 0)[:, None, None], out, 0.0)


def _inside(lhs: Array, group_sizes: Array) -> Array:
    num_inside = jnp.sum(group_sizes, dtype=jnp.int32)
    return (jnp.arange(lhs.shape[0], dtype=jnp.int32) < num_inside)[:, None]


def _dense(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)[:, None]
    row = jnp.arange(lhs.shape[0], dtype=jnp.int32)[None, :]
    members = ((row >= ends - group_sizes[:, None]) & (row < ends))[:, :, None]
    # Selecting on both sides of the product keeps a NaN in its group in every derivative too.
    left = jnp.where(members, lhs[None], jnp.zeros_like(lhs)[None])
    every = jnp.einsum("gmk,gkn->gmn", left, rhs, preferred_element_type=wide_type(lhs.dtype))
    return jnp.sum(jnp.where(members, every, 0.0), axis=0).astype(lhs.dtype)


_ROW_PRODUCTS: dict[str, Callable[..., Array]] = {
    "loop": _loop_rows,
    "ragged_dot": _ragged_rows,
    "pallas": pallas_rows,
}
_GROUP_PRODUCTS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "loop": _loop_groups,
    "ragged_dot": _ragged_groups,
    "pallas": pallas_groups,
}
IMPLEMENTATIONS = (*_ROW_PRODUCTS, "dense")
