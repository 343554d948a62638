import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core.row_blocks import (
    BLOCK_ROWS,
    block_heights,
    buffers,
    from_carrier,
    loop_over_blocks,
    write,
)

GROUPS, ROWS = 4, (0, 1, 15, 16, 40, 131, 2 * BLOCK_ROWS[-1] + 5)


@functools.partial(jax.jit, static_argnums=1)
def visits(group_sizes, num_rows):
    """How often each row is new to its group, whom it was last written by, and the work done."""

    def start_group(group):
        def visit(block, carry):
            seen, owner, work = carry
            row = block.first + jnp.arange(block.inside.shape[0], dtype=jnp.int32)
            # A block outside the rows would be counted at -1 or dropped: neither may happen.
            seen = seen.at[jnp.where(block.unseen, row, num_rows)].add(1)
            label = jnp.full((row.shape[0], 1), group + 1, jnp.float32)
            return seen, write(owner, label, block), work + row.shape[0]

        return visit

    (owner,) = buffers([(num_rows, 1)], jnp.float32, group_sizes)
    carry = jnp.zeros(num_rows + 1, jnp.int32), owner, jnp.int32(0)
    return loop_over_blocks(start_group, group_sizes, num_rows, carry)


@st.composite
def sizes_and_rows(draw):
    num_rows = draw(st.sampled_from(ROWS))
    near = {edge + offset for edge in BLOCK_ROWS for offset in (-1, 0, 1)}
    boundary = st.sampled_from(sorted({0, num_rows} | {e for e in near if e < num_rows}))
    boundary |= st.integers(0, num_rows)
    ends = sorted(draw(st.lists(boundary, min_size=GROUPS, max_size=GROUPS)))
    return tuple(int(size) for size in np.diff(ends, prepend=0)), num_rows


@hypothesis.given(problem=sizes_and_rows())
@hypothesis.example(problem=((0, 131, 0, 0), 131))
@hypothesis.example(problem=((100, 0, 0, 31), 131))
@hypothesis.example(problem=((100, 28, 0, 3), 131))
@hypothesis.settings(max_examples=100)
def test_every_row_is_seen_once_and_written_last_by_its_own_group(problem):
    group_sizes, num_rows = problem
    used = sum(group_sizes)
    seen, owner, work = visits(jnp.array(group_sizes, jnp.int32), num_rows)
    np.testing.assert_array_equal(seen[:num_rows], np.arange(num_rows) < used)
    labels = np.repeat(np.arange(GROUPS) + 1, group_sizes)
    np.testing.assert_array_equal(owner[:used, 0], labels)
    assert not np.any(owner[used:])
    # Two blocks of the least height may lie over each other at the very end, hence the last term.
    heights = block_heights(num_rows, GROUPS)
    least = heights[0] if heights else num_rows
    assert int(work) <= sum(max(2 * size, least) for size in group_sizes if size)


def test_balanced_groups_waste_little():
    # Loads of a balanced router: binomial with mean 512, standard deviation 22.
    sizes = np.random.default_rng(0).multinomial(8192, np.full(16, 1 / 16))
    _, _, work = visits(jnp.asarray(sizes, jnp.int32), 8192)
    assert int(work) < 1.08 * 8192


def test_rows_in_excess_are_left_out_of_the_last_groups():
    seen, owner, _ = visits(jnp.array([30, 20, 5, 9], jnp.int32), 40)
    np.testing.assert_array_equal(seen[:40], 1)
    np.testing.assert_array_equal(owner[:, 0], [1.0] * 30 + [2.0] * 10)


@pytest.mark.parametrize(("num_rows", "num_groups"), [(8192, 16), (8192, 256), (40, 3), (10**6, 3)])
def test_no_height_is_more_than_twice_the_one_below(num_rows, num_groups):
    # What two overlapping blocks of half a group's size rest on.
    heights = block_heights(num_rows, num_groups)
    assert heights[-1] <= num_rows and len(heights) <= 16
    assert all(above <= 2 * below for below, above in zip(heights, heights[1:], strict=False))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_buffers_hold_zeros(dtype):
    for buffer in buffers([(3, 2), (3, 2), (1,)], dtype, jnp.array([2, 1])):
        values = from_carrier(buffer, dtype)
        assert values.dtype == dtype and not np.any(values)
