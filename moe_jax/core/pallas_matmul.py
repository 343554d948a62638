"""Grouped matrix products as Pallas kernels for TPU.

The rows are cut into tiles that know nothing of the groups. A *visit* is a tile together with one
group that owns some of its rows; both kernels walk over the visits in order of row, of which there
are at most `row tiles + groups - 1`. A visit multiplies only the steps (an eighth of a tile) that
hold rows of its group, in one product: a step that two groups share is computed twice and nothing
else is, so at most `groups - 1` steps are wasted. Tiles as small as a step would waste no more, but
each product loads its matrix into the matrix unit anew, which costs as much as some 40 (v5e) to 170
(v6e) rows by the compiler's schedule.

Which group and tile a visit has is data, known before the kernel starts (scalar prefetch); the
number of visits is static, and those left over repeat the last one and compute nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from moe_jax.core.pallas_tiles import Tiles, group_tiles, pallas_flops, row_tiles


def pallas_rows(
    lhs: Float[Array, "rows inner"],
    rhs: Float[Array, "groups inner outer"] | Float[Array, "groups outer inner"],
    group_sizes: Int[Array, " groups"],
    *,
    transpose_rhs: bool = False,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> Float[Array, "rows outer"]:
    """Returns out[m] = lhs[m] rhs[group of m], and 0 in the rows past the sum of the sizes.

    Accumulates in float32; float32 operands are multiplied at `Precision.HIGHEST`.

    Args:
        lhs: rows sorted by group, float32 or bfloat16.
        rhs: one matrix a group, of the same type.
        group_sizes: rows of each group; what exceeds the number of rows is ignored.
        transpose_rhs: multiply by rhs[g]^T, reading `rhs` as it lies.
        tiles: block sizes; None takes those of `row_tiles`.
        interpret: as in `pallas_call`; None compiles for TPU and interprets elsewhere.

    Raises:
        ValueError: if the type is neither float32 nor bfloat16.
    """
    _check_dtype(lhs)
    num_rows, inner = lhs.shape
    outer = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    if 0 in (num_rows, inner, outer):
        return jnp.zeros((num_rows, outer), lhs.dtype)
    if transpose_rhs and outer == 1:
        # The compiler has no bfloat16 product with the transpose of a single row.
        rhs, transpose_rhs = jnp.swapaxes(rhs, 1, 2), False
    tiles = tiles or row_tiles(num_rows, inner, outer, rhs.shape[0], lhs.dtype, _cores())
    product = partial(_row_product, transpose_rhs=transpose_rhs, tiles=tiles)
    return _on_platform(product, interpret)(lhs, rhs, group_sizes.astype(jnp.int32))


def pallas_groups(
    lhs: Float[Array, "rows inner"],
    gradient: Float[Array, "rows outer"],
    group_sizes: Int[Array, " groups"],
    *,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> Float[Array, "groups inner outer"]:
    """Returns out[g] = sum over the rows m of group g of lhs[m] gradient[m]^T, in float32.

    An empty group's sum is exactly 0. Arguments and errors are those of `pallas_rows`; tiles are
    by default those of `group_tiles`.
    """
    _check_dtype(lhs)
    num_rows, inner = lhs.shape
    outer, groups = gradient.shape[1], group_sizes.shape[0]
    if 0 in (num_rows, inner, outer, groups):
        return jnp.zeros((groups, inner, outer), jnp.float32)
    tiles = tiles or group_tiles(num_rows, inner, outer, groups, lhs.dtype, _cores())
    product = partial(_group_product, tiles=tiles)
    return _on_platform(product, interpret)(lhs, gradient, group_sizes.astype(jnp.int32))


def device_at_hand() -> Any:
    """The device of the mesh set by `jax.set_mesh`, else the default one.

    The former may be absent, and only compiled for ahead of time.
    """
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _cores() -> int:
    device = device_at_hand()
    return device.num_cores if device.platform == "tpu" else 1


class _Visits(NamedTuple):
    """Per visit: its group, its tile, and the rows [start, end) of the group, all int32[visits]."""

    group: Array
    tile: Array
    start: Array
    end: Array


def _visits(group_sizes: Array, num_rows: int, tile_rows: int, *, of_rows: bool) -> _Visits:
    """The visits in order of row.

    `of_rows` visits every tile, those past the last group with an empty range, and no empty group;
    else every group is visited, an empty one with an empty range, and no tile past the last group.
    """
    num_groups, num_tiles = group_sizes.shape[0], pl.cdiv(num_rows, tile_rows)
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), jnp.int32(num_rows))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first_tile = starts // tile_rows
    count = jnp.where(ends > starts, (ends - 1) // tile_rows - first_tile + 1, 0 if of_rows else 1)
    last_visit = jnp.cumsum(count, dtype=jnp.int32)
    visit = jnp.arange(num_tiles + num_groups - 1, dtype=jnp.int32)
    # Visits past the last stay with the last group that had one, whose matrix is at hand.
    used = jnp.minimum(visit, last_visit[-1] - 1)
    group = jnp.sum(last_visit[None, :] <= used[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    tile = first_tile[group] + used - (last_visit - count)[group]
    spare = visit - used
    if of_rows:
        touched = (ends[-1] + (tile_rows - 1)) // tile_rows
        tile = jnp.where(spare > 0, touched + spare - 1, tile)
    tile = jnp.clip(tile, 0, num_tiles - 1)
    empty = spare > 0
    return _Visits(
        group, tile, jnp.where(empty, 0, starts[group]), jnp.where(empty, 0, ends[group])
    )


def _row_product(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    interpret: Any,
) -> Array:
    num_rows, inner = lhs.shape
    num_groups, outer = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    inner_blocks, outer_blocks = pl.cdiv(inner, tiles.inner), pl.cdiv(outer, tiles.outer)
    visits = _visits(group_sizes, num_rows, tiles.rows, of_rows=True)

    def inner_block(visit: Array, block: Array, visits: _Visits) -> Array:
        # A visit that computes nothing names the block at hand, so that none is fetched.
        return jnp.where(visits.start[visit] < visits.end[visit], block, inner_blocks - 1)

    def lhs_block(column: Array, visit: Array, block: Array, *refs: Any) -> tuple:
        visits = _Visits(*refs)
        return visits.tile[visit], inner_block(visit, block, visits)

    def rhs_block(column: Array, visit: Array, block: Array, *refs: Any) -> tuple:
        visits = _Visits(*refs)
        inner = inner_block(visit, block, visits)
        return visits.group[visit], *((column, inner) if transpose_rhs else (inner, column))

    def out_block(column: Array, visit: Array, block: Array, *refs: Any) -> tuple:
        return _Visits(*refs).tile[visit], column

    rhs_shape = (tiles.outer, tiles.inner) if transpose_rhs else (tiles.inner, tiles.outer)
    scratch = [pltpu.VMEM((tiles.rows, tiles.outer), jnp.float32)] if inner_blocks > 1 else []
    size = lhs.dtype.itemsize
    matrices = num_groups if inner_blocks == 1 else visits.group.shape[0]
    read = outer_blocks * lhs.size + matrices * inner * outer
    return pl.pallas_call(
        partial(_row_kernel, inner=inner, transpose_rhs=transpose_rhs, tiles=tiles),
        out_shape=_struct((num_rows, outer), lhs.dtype, lhs, rhs, group_sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(outer_blocks, visits.group.shape[0], inner_blocks),
            in_specs=[
                pl.BlockSpec((tiles.rows, tiles.inner), lhs_block),
                pl.BlockSpec((pl.squeezed, *rhs_shape), rhs_block),
            ],
            out_specs=pl.BlockSpec((tiles.rows, tiles.outer), out_block),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=pallas_flops(num_rows, inner, outer, num_groups, tiles),
            transcendentals=0,
            bytes_accessed=size * (read + num_rows * outer),
        ),
        interpret=interpret,
        name="grouped_matmul_rows",
    )(*visits, lhs, rhs)


def _row_kernel(
    group_ref: Any,
    tile_ref: Any,
    start_ref: Any,
    end_ref: Any,
    lhs_ref: Any,
    rhs_ref: Any,
    out_ref: Any,
    *scratch: Any,
    inner: int,
    transpose_rhs: bool,
    tiles: Tiles,
) -> None:
    visit, block, num_blocks = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    tile = tile_ref[visit]
    before = tile_ref[jnp.maximum(visit - 1, 0)]

    @pl.when((block == 0) & ((visit == 0) | (tile != before)))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    start, end = start_ref[visit] - tile * tiles.rows, end_ref[visit] - tile * tiles.rows

    def multiply(rows: Any, mask: Array) -> None:
        left, right = lhs_ref[rows, :], rhs_ref[...]
        if inner % tiles.inner:
            # What lies past the edge of an array is arbitrary, and may be NaN.
            left = _keep_first(left, inner - block * tiles.inner, axis=1)
            right = _keep_first(right, inner - block * tiles.inner, axis=int(transpose_rhs))
        product = _dot(left, right, ((1,), (1 if transpose_rhs else 0,)))

        def store(total: Array) -> None:
            out_ref[rows, :] = jnp.where(mask, total.astype(out_ref.dtype), out_ref[rows, :])

        if not scratch:
            store(product)
            return
        (total_ref,) = scratch
        total_ref[rows, :] = jnp.where(block == 0, 0.0, total_ref[rows, :]) + product
        pl.when(block == num_blocks - 1)(lambda: store(total_ref[rows, :]))

    _for_height(start, end, tiles, multiply)


def _group_product(
    lhs: Array, gradient: Array, group_sizes: Array, *, tiles: Tiles, interpret: Any
) -> Array:
    (num_rows, inner), outer = lhs.shape, gradient.shape[1]
    num_groups = group_sizes.shape[0]
    inner_blocks, outer_blocks = pl.cdiv(inner, tiles.inner), pl.cdiv(outer, tiles.outer)
    visits = _visits(group_sizes, num_rows, tiles.rows, of_rows=False)

    def lhs_block(outer: Array, inner: Array, visit: Array, *refs: Any) -> tuple:
        return _Visits(*refs).tile[visit], inner

    def gradient_block(outer: Array, inner: Array, visit: Array, *refs: Any) -> tuple:
        return _Visits(*refs).tile[visit], outer

    def out_block(outer: Array, inner: Array, visit: Array, *refs: Any) -> tuple:
        return _Visits(*refs).group[visit], inner, outer

    read = outer_blocks * lhs.size + inner_blocks * gradient.size
    return pl.pallas_call(
        partial(_group_kernel, tiles=tiles),
        out_shape=_struct((num_groups, inner, outer), jnp.float32, lhs, gradient, group_sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(outer_blocks, inner_blocks, visits.group.shape[0]),
            in_specs=[
                pl.BlockSpec((tiles.rows, tiles.inner), lhs_block),
                pl.BlockSpec((tiles.rows, tiles.outer), gradient_block),
            ],
            out_specs=pl.BlockSpec((pl.squeezed, tiles.inner, tiles.outer), out_block),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=pallas_flops(num_rows, inner, outer, num_groups, tiles),
            transcendentals=0,
            bytes_accessed=lhs.dtype.itemsize * read + 4 * num_groups * inner * outer,
        ),
        interpret=interpret,
        name="grouped_matmul_groups",
    )(*visits, lhs, gradient)


def _group_kernel(
    group_ref: Any,
    tile_ref: Any,
    start_ref: Any,
    end_ref: Any,
    lhs_ref: Any,
    gradient_ref: Any,
    out_ref: Any,
    *,
    tiles: Tiles,
) -> None:
    visit = pl.program_id(2)
    tile, before = tile_ref[visit], group_ref[jnp.maximum(visit - 1, 0)]

    @pl.when((visit == 0) | (group_ref[visit] != before))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    start, end = start_ref[visit] - tile * tiles.rows, end_ref[visit] - tile * tiles.rows

    def multiply(rows: Any, mask: Array) -> None:
        # Both sides: a NaN in a neighbour's row would survive a product with 0.
        left, right = lhs_ref[rows, :], gradient_ref[rows, :]
        left = jnp.where(mask, left, jnp.zeros_like(left))
        right = jnp.where(mask, right, jnp.zeros_like(right))
        out_ref[...] += _dot(left, right, ((0,), (0,)))

    _for_height(start, end, tiles, multiply)


def _for_height(
    start: Array, end: Array, tiles: Tiles, multiply: Callable[[Any, Array], None]
) -> None:
    """Calls multiply(rows, mask) on the steps of a tile that hold its rows [start, end).

    A product's height is static, so there is one for each; `mask` is bool[height, 1].
    """
    first = jnp.maximum(start, 0) // tiles.step
    last = (jnp.minimum(end, tiles.rows) + (tiles.step - 1)) // tiles.step

    def multiply_steps(steps: int) -> None:
        offset = pl.multiple_of(first * tiles.step, tiles.step)
        row = offset + jax.lax.broadcasted_iota(jnp.int32, (steps * tiles.step, 1), 0)
        multiply(pl.ds(offset, steps * tiles.step), (row >= start) & (row < end))

    for steps in range(1, tiles.rows // tiles.step + 1):
        pl.when((last - first == steps) & (start < end))(partial(multiply_steps, steps))


def _dot(left: Array, right: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    exact = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _keep_first(values: Array, count: Array, axis: int) -> Array:
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
    return jnp.where(index < count, values, jnp.zeros_like(values))


def _on_platform(product: Callable[..., Array], interpret: Any) -> Callable[..., Array]:
    """The product under vmap in turn, and interpreted where it cannot be compiled."""

    @jax.custom_batching.sequential_vmap
    def in_turn(*arrays: Array) -> Array:
        if interpret is not None:
            return product(*arrays, interpret=interpret)
        return jax.lax.platform_dependent(
            *arrays,
            tpu=partial(product, interpret=False),
            default=partial(product, interpret=True),
        )

    return in_turn


def _struct(shape: tuple[int, ...], dtype: Any, *operands: Array) -> jax.ShapeDtypeStruct:
    # Derived from the operands, so that under shard_map it varies over the devices as they do.
    def like(*operands: Array) -> Array:
        total = sum(jnp.sum(operand).astype(dtype) for operand in operands)
        return jnp.broadcast_to(total, shape)

    return jax.eval_shape(like, *operands)


def _check_dtype(lhs: Array) -> None:
    if lhs.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"lhs has type {lhs.dtype}; expected float32 or bfloat16")
