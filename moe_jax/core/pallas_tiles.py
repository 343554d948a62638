"""Block sizes of the kernels in `pallas_matmul`, and the work that follows from them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Int

VMEM_BYTES = 14 * 2**20
"""What a kernel's blocks may take; the compiler grants 16 MiB and needs some for itself."""
LANES = 128
STEPS = 8
"""Steps of a full tile, and so the number of products of different height that are compiled."""


class Tiles(NamedTuple):
    """Block sizes of one kernel.

    Attributes:
        rows: of a tile; a multiple of `step`.
        step: rows by which the height of a product varies.
        inner: columns of `lhs` in a block.
        outer: columns of the right operand in a block.
    """

    rows: int
    step: int
    inner: int
    outer: int


def row_tiles(
    num_rows: int,
    inner: int,
    outer: int,
    groups: int,
    dtype: jax.typing.DTypeLike,
    cores: int = 1,
) -> Tiles:
    """Block sizes of `pallas_rows` for matrices [inner, outer].

    A step is 32 rows, or 64 where the mean group has 1024, so that in groups of 512 rows or more
    at most 1/16 of the work is wasted at their ends. A block with all of `inner` stays in fast
    memory through all rows of its group, so the widest such block that fits is taken; `inner` is
    cut only if not even 256 columns fit. There are at least as many blocks of columns as cores.
    """
    size = _size_in_memory(dtype)

    def fits(tiles: Tiles) -> bool:
        rows, _, inner, outer = tiles
        blocks = 2 * size * (rows * inner + inner * outer + rows * outer)
        return blocks + 2 * 4 * rows * outer <= VMEM_BYTES

    shapes = [(inner, 1024), (inner, 512), (inner, 256)]
    shapes += [(cut, 512) for cut in (4096, 2048, 1024, 512, 256)]
    return _first_that_fits(num_rows, inner, outer, groups, cores, shapes, fits)


def group_tiles(
    num_rows: int,
    inner: int,
    outer: int,
    groups: int,
    dtype: jax.typing.DTypeLike,
    cores: int = 1,
) -> Tiles:
    """Block sizes of `pallas_groups`: the largest output block that fits, for it stays in place.

    Steps, and the number of blocks of columns, are as in `row_tiles`.
    """
    size = _size_in_memory(dtype)

    def fits(tiles: Tiles) -> bool:
        rows, _, inner, outer = tiles
        blocks = 2 * size * rows * (inner + outer) + 2 * 4 * inner * outer
        return blocks + 4 * inner * outer <= VMEM_BYTES

    shapes = [(1024, 1024), (512, 1024), (1024, 512), (512, 512), (256, 256)]
    return _first_that_fits(num_rows, inner, outer, groups, cores, shapes, fits)


def pallas_flops(
    num_rows: int,
    inner: int,
    outer: int,
    groups: int | Int[np.ndarray, " groups"],
    tiles: Tiles,
) -> int:
    """Floating-point operations of one kernel, counted from its grid.

    2 R K N, with K and N rounded up to the blocks, and R the rows of all steps that hold a row of
    a group, counted once a group.

    Args:
        num_rows: rows of `lhs`.
        inner: columns of `lhs`.
        outer: columns of the right operand.
        groups: the sizes of the groups, or their number for the most that any sizes can cost.
        tiles: as returned by `row_tiles` or `group_tiles`.
    """
    if isinstance(groups, int):
        # A step is computed again for each further group that has a row in it.
        steps = pl.cdiv(num_rows, tiles.step) + min(groups, num_rows) - 1
        steps = max(steps, 0) if groups else 0
    else:
        sizes = np.asarray(groups, np.int64)
        ends = np.minimum(np.cumsum(sizes), num_rows)
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        touched = -(-ends // tiles.step) - starts // tiles.step
        steps = int(np.sum(np.where(ends > starts, touched, 0)))
    columns = _round_up(inner, tiles.inner) * _round_up(outer, tiles.outer)
    return 2 * steps * tiles.step * columns


def _first_that_fits(
    num_rows: int,
    inner: int,
    outer: int,
    groups: int,
    cores: int,
    shapes: list[tuple[int, int]],
    fits: Callable[[Tiles], bool],
) -> Tiles:
    # Multiples of the 16 rows that bfloat16 packs together.
    step = 64 if num_rows >= 1024 * groups else 32
    rows = min(STEPS * step, _round_up(num_rows, step))
    widest = _round_up(pl.cdiv(outer, cores), LANES) if cores > 1 else outer
    candidates = [
        Tiles(rows, step, _even(inner, a), _even(outer, min(b, widest))) for a, b in shapes
    ]
    return next((tiles for tiles in candidates if fits(tiles)), candidates[-1])


def _even(length: int, limit: int) -> int:
    """The block that cuts `length` evenly into blocks of at most `limit`, whole lanes if cut."""
    if length <= limit:
        return length
    return _round_up(pl.cdiv(length, pl.cdiv(length, limit)), LANES)


def _round_up(value: int, multiple: int) -> int:
    return pl.cdiv(value, multiple) * multiple


def _size_in_memory(dtype: jax.typing.DTypeLike) -> int:
    """Bytes a number takes in a kernel: float32 is also held as its bfloat16 parts."""
    return 6 if jnp.dtype(dtype) == jnp.float32 else 2
