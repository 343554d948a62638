"""The feed-forward experts as one loop: all products of a block of rows while it is in the cache.

Against products taken one after the other, each over all rows, it reads the rows once, casts each
expert's weights where they are sliced, and writes neither the hidden rows nor, unless a derivative
is to follow, what goes into the activation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.core.grouped_matmul import grouped_matmul
from moe_jax.core.precision import wide_type
from moe_jax.core.row_blocks import (
    Block,
    add_to_group,
    as_carrier,
    buffers,
    clear,
    columns_ahead,
    equal_block_height,
    from_carrier,
    loop_over_blocks,
    matmul_wide,
    read,
    read_columns,
    write,
)
from moe_jax.core.varying import vary_alike

Activate = Callable[..., Array]
Heights = tuple[int, ...] | None


def fused_experts(
    activate: Activate,
    rows: Float[Array, "rows model"],
    inner: tuple[Float[Array, "experts model hidden"], ...],
    down: Float[Array, "experts hidden model"],
    group_sizes: Int[Array, " experts"] | None,
) -> Float[Array, "rows model"]:
    """Returns down[e] activate(inner[0][e] x, inner[1][e] x, ...) for each row x of each expert e.

    Args:
        activate: elementwise, in `wide_type`, from one array for each of `inner` to the hidden
            rows.
        rows: sorted by expert; their type is that of the products' operands.
        inner: matrices of any float type, cast to that of `rows`.
        down: likewise.
        group_sizes: number of rows of each expert; None for rows / experts each. Rows past the sum
            are 0, and so are their gradients; an expert without rows has gradient exactly 0.
    """
    heights = None
    if group_sizes is None:
        size = rows.shape[0] // down.shape[0]
        group_sizes = jnp.full(down.shape[0], size, dtype=jnp.int32)
        heights = (equal_block_height(size),) if size else ()
    rows, down, group_sizes, *weights = vary_alike(rows, down, group_sizes, *inner)
    return _answer(activate, heights, False, rows, tuple(weights), down, group_sizes)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _answer(
    activate: Activate,
    heights: Heights,
    is_differentiated: bool,
    rows: Array,
    inner: tuple[Array, ...],
    down: Array,
    group_sizes: Array,
) -> tuple[Array, list[Array]]:
    """The answers and, if a derivative is to follow, what goes into the activation."""
    # Under vmap a loop would run every block of every example and then select.
    answer = jax.custom_batching.sequential_vmap(
        partial(_loop_forward, activate, heights, is_differentiated)
    )
    return answer(rows, inner, down, group_sizes)


def _answer_forward(
    activate: Activate, heights: Heights, is_differentiated: bool, *arrays: Any
) -> tuple[tuple[Array, list[Array]], tuple]:
    out, products = _answer(activate, heights, True, *arrays)
    return (out, products if is_differentiated else []), (*arrays, products)


def _answer_backward(
    activate: Activate,
    heights: Heights,
    is_differentiated: bool,
    residuals: tuple,
    gradients: tuple,
) -> tuple:
    # The products are no result of their own: `_differentiate` accounts for them.
    return *_differentiate(activate, heights, *residuals, gradients[0]), None


_answer.defvjp(_answer_forward, _answer_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiate(
    activate: Activate, heights: Heights, *arrays: Any
) -> tuple[Array, tuple[Array, ...], Array]:
    """Gradients of `rows`, `inner` and `down`; last of `arrays` is that of the answers."""
    differentiate = jax.custom_batching.sequential_vmap(partial(_loop_backward, activate, heights))
    return differentiate(*arrays)


def _differentiate_forward(
    activate: Activate, heights: Heights, *arrays: Any
) -> tuple[tuple, tuple]:
    return _differentiate(activate, heights, *arrays), arrays


def _differentiate_backward(
    activate: Activate, heights: Heights, arrays: tuple, gradients: tuple
) -> tuple:
    rows, inner, down, group_sizes, _, gradient = arrays

    def first_derivative(
        rows: Array, inner: tuple[Array, ...], down: Array, gradient: Array
    ) -> tuple[Array, tuple[Array, ...], Array]:
        answer = partial(_answer_in_turn, activate, group_sizes)
        return jax.vjp(answer, rows, inner, down)[1](gradient)

    _, pullback = jax.vjp(first_derivative, rows, inner, down, gradient)
    *second, gradient = pullback(gradients)
    return *second, None, None, gradient


_differentiate.defvjp(_differentiate_forward, _differentiate_backward)


def _answer_in_turn(
    activate: Activate, group_sizes: Array, rows: Array, inner: tuple[Array, ...], down: Array
) -> Array:
    def multiply(lhs: Array, rhs: Array) -> Array:
        return grouped_matmul(lhs, rhs.astype(rows.dtype), group_sizes, "loop")

    products = [multiply(rows, weight).astype(wide_type(rows.dtype)) for weight in inner]
    return multiply(activate(*products).astype(rows.dtype), down)


def _loop_forward(
    activate: Activate,
    heights: Heights,
    is_differentiated: bool,
    rows: Array,
    inner: tuple[Array, ...],
    down: Array,
    group_sizes: Array,
) -> tuple[Array, list[Array]]:
    num_rows, dtype = rows.shape[0], rows.dtype
    carrier = as_carrier(rows)

    def start_group(group: Array) -> Callable[[Block, list[Array]], list[Array]]:
        *first, last = _weights_of_group(group, (*inner, down), dtype)

        def answer_block(block: Block, filled: list[Array]) -> list[Array]:
            x = from_carrier(read(carrier, block), dtype)
            products = [matmul_wide(x, weight) for weight in first]
            answers = matmul_wide(activate(*products).astype(dtype), last)
            values = [answers, *products] if is_differentiated else [answers]
            return [write(*pair, block) for pair in zip(filled, values, strict=True)]

        return answer_block

    shapes = [(num_rows, down.shape[2])]
    if is_differentiated:
        shapes += [(num_rows, weight.shape[2]) for weight in inner]
    filled = buffers(shapes, dtype, group_sizes)
    filled = loop_over_blocks(start_group, group_sizes, num_rows, filled, heights)
    return from_carrier(filled[0], dtype), filled[1:]


def _loop_backward(
    activate: Activate,
    heights: Heights,
    rows: Array,
    inner: tuple[Array, ...],
    down: Array,
    group_sizes: Array,
    products: list[Array],
    gradient: Array,
) -> tuple[Array, tuple[Array, ...], Array]:
    num_rows, dtype = rows.shape[0], rows.dtype
    gradient = gradient.astype(dtype)
    carrier = as_carrier(gradient)
    row_columns, gradient_columns = columns_ahead(rows), columns_ahead(gradient)
    is_narrow = dtype == jnp.bfloat16

    def start_group(group: Array) -> Callable[[Block, tuple], tuple]:
        *first, last = _weights_of_group(group, (*inner, down), dtype)

        def differentiate_block(block: Block, totals: tuple) -> tuple:
            row_gradient, inner_gradients, down_gradient = totals
            y = from_carrier(read(carrier, block), dtype)
            hidden, pullback = jax.vjp(
                activate,
                *(
                    from_carrier(read(array, block), dtype).astype(wide_type(dtype))
                    for array in products
                ),
            )
            slopes = pullback(matmul_wide(y, last, transpose_rhs=True))
            unseen = block.unseen[:, None]
            # All operands: a NaN in a neighbour's row would survive a product with 0.
            x_columns = read_columns(row_columns, block, dtype)
            hidden = clear(hidden, unseen).astype(dtype)
            if is_narrow:
                product = matmul_wide(read_columns(gradient_columns, block, dtype), hidden)
            else:
                product = matmul_wide(hidden.T, clear(y, unseen))
            down_gradient = add_to_group(down_gradient, product, group)
            inner_gradients = [
                add_to_group(
                    total, matmul_wide(x_columns, clear(slope, unseen).astype(dtype)), group
                )
                for total, slope in zip(inner_gradients, slopes, strict=True)
            ]
            x_gradients = [
                matmul_wide(slope.astype(dtype), weight, transpose_rhs=True)
                for slope, weight in zip(slopes, first, strict=True)
            ]
            x_gradient = sum(x_gradients[1:], x_gradients[0])
            return write(row_gradient, x_gradient, block), inner_gradients, down_gradient

        return differentiate_block

    (row_gradient,) = buffers([rows.shape], dtype, group_sizes)
    # Of bfloat16 the gradient of `down` is summed as its transpose, whose left side is known ahead.
    down_shape = (down.shape[0], down.shape[2], down.shape[1]) if is_narrow else down.shape
    shapes = [*(weight.shape for weight in inner), down_shape]
    *inner_gradients, down_gradient = buffers(shapes, wide_type(dtype), group_sizes)
    row_gradient, inner_gradients, down_gradient = loop_over_blocks(
        start_group,
        group_sizes,
        num_rows,
        (row_gradient, inner_gradients, down_gradient),
        heights,
    )
    if is_narrow:
        down_gradient = jnp.swapaxes(down_gradient, 1, 2)
    return (
        from_carrier(row_gradient, dtype),
        tuple(
            total.astype(weight.dtype) for total, weight in zip(inner_gradients, inner, strict=True)
        ),
        down_gradient.astype(down.dtype),
    )


def _weights_of_group(
    group: Array, weights: tuple[Array, ...], dtype: jax.typing.DTypeLike
) -> list[Array]:
    # A slice is a copy in any case: cast there, not the whole array ahead.
    sliced = (jax.lax.dynamic_index_in_dim(as_carrier(w), group, keepdims=False) for w in weights)
    return [
        from_carrier(part, weight.dtype).astype(dtype)
        for part, weight in zip(sliced, weights, strict=True)
    ]
