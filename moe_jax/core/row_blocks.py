"""Loops over groups of rows, and over blocks of rows inside each: grouped products on CPU.

A block is as high as the group's rows need, out of a few static heights, for what a group loses is
the unused rest of its blocks. Groups come in order, so a block may reach into the next group's
rows: those are written again later, and no block but one at the very end of the rows has to spare
what its neighbours hold.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from moe_jax.core.precision import wide_type

BLOCK_ROWS = (32, 64, 128, 192, 256, 384, 512, 768)
"""Heights of a block, besides those near the mean size of a group."""

Carry = TypeVar("Carry")


class Block(NamedTuple):
    """Consecutive rows, some of which belong to the group at hand.

    Attributes:
        first: int32[], the first of them.
        inside: bool[height], those of the group.
        unseen: bool[height], those of the group that no earlier block of it had.
        is_shared: whether rows outside the group may hold results already and are to be spared.
    """

    first: Int[Array, ""]
    inside: Bool[Array, " height"]
    unseen: Bool[Array, " height"]
    is_shared: bool


def loop_over_blocks(
    start_group: Callable[[Array], Callable[[Block, Carry], Carry]],
    group_sizes: Int[Array, " groups"],
    num_rows: int,
    carry: Carry,
    heights: Sequence[int] | None = None,
) -> Carry:
    """Calls start_group(group) for each group in order, and what it returns for each of its blocks.

    Groups without rows are passed over, so that a few rows do not read every group's matrices. Rows
    in excess of `num_rows` are left out of their groups. `carry` must be of the type that the
    blocks return, see `buffers`. `heights` are by default `block_heights`; others must rise by no
    more than a factor of 2 each.
    """
    if heights is None:
        heights = block_heights(num_rows, group_sizes.shape[0])
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), num_rows)
    sizes = jnp.diff(ends, prepend=jnp.int32(0))
    occupied_first = jnp.argsort(sizes == 0, stable=True).astype(jnp.int32)

    def visit_group(index: Array, carry: Carry) -> Carry:
        group = occupied_first[index]
        visit = start_group(group)
        end = ends[group]
        start = end - sizes[group]

        def blocks(height: int, count: Array, is_shared: bool, carry: Carry) -> Carry:
            def one(index: Array, carry: Carry) -> Carry:
                wanted = start + index * height
                # The last of several blocks goes back over its group's rows, not past their end.
                first = jnp.minimum(wanted, jnp.maximum(start, end - height))
                if is_shared:
                    first = jnp.minimum(first, num_rows - height)
                row = first + jnp.arange(height, dtype=jnp.int32)
                inside = (row >= start) & (row < end)
                return visit(Block(first, inside, inside & (row >= wanted), is_shared), carry)

            return jax.lax.fori_loop(jnp.int32(0), count, one, carry)

        choice, count = _choose_height(heights, start, end, num_rows)
        for place, height in enumerate(heights):
            carry = blocks(height, jnp.where(choice == place, count, 0), False, carry)
        smallest = heights[0] if heights else num_rows
        return blocks(smallest, jnp.where(choice < 0, 1, 0), True, carry)

    if num_rows == 0:
        return carry
    num_occupied = jnp.sum(sizes > 0, dtype=jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), num_occupied, visit_group, carry)


def read(rows: Shaped[Array, "rows width"], block: Block) -> Shaped[Array, "height width"]:
    """The block's rows."""
    return jax.lax.dynamic_slice_in_dim(rows, block.first, block.inside.shape[0])


def columns_ahead(rows: Float[Array, "rows width"]) -> Shaped[Array, "..."]:
    """What `read_columns` is to read, made before the loop.

    XLA on CPU merges a transposition into the product that it precedes, which for bfloat16 is then
    not among the fast ones, but 5 to 8 times slower: transpose the rows where it cannot.
    """
    return as_carrier(rows).T if rows.dtype == jnp.bfloat16 else rows


def read_columns(
    columns: Shaped[Array, "..."], block: Block, dtype: jax.typing.DTypeLike
) -> Float[Array, "width height"]:
    """The transpose of the block's rows, 0 in place of rows that are not `unseen`."""
    if dtype != jnp.bfloat16:
        return clear(read(columns, block), block.unseen[:, None]).T
    part = jax.lax.dynamic_slice_in_dim(columns, block.first, block.inside.shape[0], axis=1)
    return from_carrier(clear(part, block.unseen[None, :]), dtype)


def write(
    buffer: Shaped[Array, "rows width"], values: Float[Array, "height width"], block: Block
) -> Shaped[Array, "rows width"]:
    """Stores a block's rows in a buffer made by `buffers`, 0 in those outside the group."""
    dtype = jnp.bfloat16 if buffer.dtype == jnp.uint16 else buffer.dtype
    values = as_carrier(values.astype(dtype))
    spared = read(buffer, block) if block.is_shared else jnp.zeros((), buffer.dtype)
    values = jnp.where(block.inside[:, None], values, spared)
    return jax.lax.dynamic_update_slice_in_dim(buffer, values, block.first, axis=0)


def buffers(
    shapes: Sequence[tuple[int, ...]],
    dtype: jax.typing.DTypeLike,
    group_sizes: Int[Array, " groups"],
) -> list[Array]:
    """Zeros for a loop to fill, with the type of `as_carrier`, varying over a mesh as the sizes."""
    carrier = jnp.uint16 if dtype == jnp.bfloat16 else jnp.dtype(dtype)
    # XLA merges equal constants, and then a loop copies what it cannot share: each has its own 0.
    zero = jnp.min(group_sizes, initial=0)
    return [
        jnp.broadcast_to((jnp.minimum(zero, -number) + number).astype(carrier), shape)
        for number, shape in enumerate(shapes)
    ]


def add_to_group(
    totals: Float[Array, "groups inner outer"], values: Float[Array, "inner outer"], group: Array
) -> Float[Array, "groups inner outer"]:
    """totals[group] + values."""
    total = jax.lax.dynamic_index_in_dim(totals, group, keepdims=False) + values
    return jax.lax.dynamic_update_index_in_dim(totals, total, group, axis=0)


def matmul_wide(
    lhs: Float[Array, "rows inner"],
    rhs: Float[Array, "inner outer"] | Float[Array, "outer inner"],
    *,
    transpose_rhs: bool = False,
) -> Float[Array, "rows outer"]:
    """Returns lhs rhs, or lhs rhs^T, in `wide_type`."""
    contracted = ((1,), (1 if transpose_rhs else 0,))
    dtype = wide_type(lhs.dtype)
    return jax.lax.dot_general(lhs, rhs, (contracted, ((), ())), preferred_element_type=dtype)


def as_carrier(values: Array) -> Array:
    """The type in which rows pass through a loop: bfloat16 as the uint16 of the same bits.

    XLA on CPU widens a whole bfloat16 array to read or write a slice of it, but not an integer one.
    """
    if values.dtype != jnp.bfloat16:
        return values
    return jax.lax.bitcast_convert_type(values, jnp.uint16)


def from_carrier(values: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Undoes `as_carrier`."""
    if dtype != jnp.bfloat16 or values.dtype == jnp.bfloat16:
        return values
    return jax.lax.bitcast_convert_type(values, jnp.bfloat16)


def clear(values: Array, keep: Bool[Array, "..."]) -> Array:
    """0 where not kept, whatever it holds."""
    return jnp.where(keep, values, jnp.zeros((), values.dtype))


def block_heights(num_rows: int, num_groups: int) -> list[int]:
    """Heights to compile: `BLOCK_ROWS`, and in finer steps what balanced groups need.

    On CPU (2 cores, [rows, 512] by [512, 1024], float32) a product costs what 55 rows do even
    before its first row, so a group is best cut into few blocks, and each as high as needed. For
    the same reason none is worth compiling where all rows make one low block.
    """
    if num_rows <= BLOCK_ROWS[0]:
        return []
    mean = max(num_rows / max(num_groups, 1), 1.0)
    typical = mean / math.ceil(mean / BLOCK_ROWS[-1])
    step = max(16, 16 * round(typical / 256))
    near = [step * (round(typical / step) + offset) for offset in range(-3, 4)]
    heights = {h for h in (*BLOCK_ROWS, *near) if 16 <= h <= min(num_rows, BLOCK_ROWS[-1])}
    return sorted(heights)


def equal_block_height(group_size: int) -> int:
    """The one height needed where all groups are of one size."""
    return -(-group_size // math.ceil(group_size / BLOCK_ROWS[-1]))


def _choose_height(
    heights: Sequence[int], start: Array, end: Array, num_rows: int
) -> tuple[Array, Array]:
    """Number of the height to use and how many such blocks; -1 for one shared block."""
    if not heights:
        return jnp.int32(-1), jnp.int32(0)
    size = end - start
    table = jnp.array(heights, dtype=jnp.int32)

    def least_height(count: Array | int) -> Array:
        return jnp.sum(table < -(-size // jnp.maximum(count, 1)), dtype=jnp.int32)

    count = -(-size // heights[-1])
    choice = least_height(count)
    # A block past the last row: two that overlap inside the group instead, if it is that large.
    is_past = start + table[choice] > num_rows
    choice = jnp.where(is_past, jnp.where(size < heights[0], -1, least_height(2)), choice)
    return choice, jnp.where(is_past, 2, count)
