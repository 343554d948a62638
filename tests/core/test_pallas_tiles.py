import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core.pallas_tiles import VMEM_BYTES, Tiles, group_tiles, pallas_flops, row_tiles

TINY = Tiles(rows=8, step=2, inner=4, outer=4)


def sizes_of(num_groups, num_rows):
    """Sizes of groups with a sum of at most the rows."""
    ends = st.lists(st.integers(0, num_rows), min_size=num_groups, max_size=num_groups).map(sorted)
    return ends.map(lambda ends: tuple(int(size) for size in np.diff(ends, prepend=0)))


@hypothesis.given(sizes=sizes_of(5, 50), tiles=st.sampled_from([TINY, Tiles(16, 16, 4, 4)]))
def test_work_is_that_of_the_steps_each_group_touches(sizes, tiles):
    ends = np.cumsum(sizes)
    steps = sum(
        len({row // tiles.step for row in range(end - size, end)})
        for size, end in zip(sizes, ends, strict=True)
    )
    # 7 columns in blocks of 4 are 8, and 9 are 12.
    assert pallas_flops(50, 7, 9, np.array(sizes), tiles) == 2 * steps * tiles.step * 8 * 12
    assert pallas_flops(50, 7, 9, np.array(sizes), tiles) <= pallas_flops(50, 7, 9, 5, tiles)


def test_the_most_that_any_sizes_cost_is_reached():
    # Every boundary inside a step: 25 steps of 2 rows, 4 of them twice.
    worst = np.array([9, 10, 10, 10, 11])
    assert pallas_flops(50, 4, 4, worst, TINY) == pallas_flops(50, 4, 4, 5, TINY) == 2 * 58 * 16


@pytest.mark.parametrize("choose", [row_tiles, group_tiles])
@hypothesis.given(
    shape=st.tuples(*[st.integers(1, 20000)] * 3),
    groups=st.integers(1, 512),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_tiles_fit_the_memory_and_the_layout(choose, shape, groups, dtype):
    num_rows, inner, outer = shape
    tiles = choose(num_rows, inner, outer, groups, dtype)
    assert tiles.step % 16 == 0 and tiles.rows % tiles.step == 0
    assert tiles.inner == inner or tiles.inner % 128 == 0
    assert tiles.outer == outer or tiles.outer % 128 == 0
    size = jnp.dtype(dtype).itemsize
    left, right = tiles.rows * tiles.inner, tiles.inner * tiles.outer
    product = tiles.rows * tiles.outer
    if choose is group_tiles:
        # Two of each block in flight, and the product in float32.
        held = 2 * size * (left + product) + 2 * 4 * right + 4 * right
    else:
        held = 2 * size * (left + right + product) + 4 * product
    assert held <= VMEM_BYTES


def test_large_groups_waste_at_most_a_sixteenth():
    for rows in (8192, 16384, 65536):
        tiles = row_tiles(rows, 512, 1024, 16, jnp.bfloat16)
        work = pallas_flops(rows, 512, 1024, 16, tiles)
        assert work <= (1 + 1 / 16) * 2 * rows * 512 * 1024
