import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from moe_jax.core.pallas_matmul import pallas_groups, pallas_rows
from moe_jax.core.pallas_tiles import Tiles, group_tiles, pallas_flops, row_tiles

# Float32 rounding of sums of at most 300 products; bfloat16 rounds the result to 8 bits.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
TINY = Tiles(rows=8, step=2, inner=4, outer=4)


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def products(lhs, rhs, gradient, group_sizes, tiles=None, interpret=True):
    """The product, the same with matrices stored transposed, and the sums by group."""
    options = {"tiles": tiles, "interpret": interpret}
    return (
        pallas_rows(lhs, rhs, group_sizes, **options),
        pallas_rows(lhs, jnp.swapaxes(rhs, 1, 2), group_sizes, transpose_rhs=True, **options),
        pallas_groups(lhs, gradient, group_sizes, **options),
    )


def reference(lhs, rhs, gradient, group_sizes):
    """The same in float64, row by row."""
    lhs, rhs, gradient = (np.asarray(array, np.float64) for array in (lhs, rhs, gradient))
    out, sums = np.zeros_like(gradient), np.zeros_like(rhs)
    rows = range(lhs.shape[0])
    owners = itertools.chain.from_iterable([group] * size for group, size in enumerate(group_sizes))
    for row, group in zip(rows, owners, strict=False):
        out[row] = lhs[row] @ rhs[group]
        sums[group] += np.outer(lhs[row], gradient[row])
    return out, out, sums


def random_problem(shape, num_groups, dtype=jnp.float32, seed=0):
    num_rows, inner, outer = shape
    shapes = (num_rows, inner), (num_groups, inner, outer), (num_rows, outer)
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def assert_all_close(actual, expected, tolerance):
    for array, wanted in zip(actual, expected, strict=True):
        array = np.asarray(array, np.float64)
        assert array.shape == wanted.shape
        assert np.linalg.norm(array - wanted) <= tolerance * np.linalg.norm(wanted)


def sizes_of(num_groups, num_rows):
    """Sizes of groups with a sum of at most the rows; empty groups are common."""
    end = st.integers(0, num_rows) | st.sampled_from(sorted({0, num_rows, num_rows // 8 * 8}))
    ends = st.lists(end, min_size=num_groups, max_size=num_groups).map(sorted)
    return ends.map(lambda ends: tuple(int(size) for size in np.diff(ends, prepend=0)))


@pytest.mark.parametrize("shape", [(21, 7, 5), (16, 8, 9), (1, 3, 8)], ids=str)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_agrees_with_a_slow_reference_whatever_the_rows_past_the_sum_hold(shape, data):
    group_sizes = data.draw(sizes_of(4, shape[0]))
    used = sum(group_sizes)
    lhs, rhs, gradient = random_problem(shape, 4, seed=used)
    expected = reference(lhs, rhs, gradient, group_sizes)
    lhs, gradient = lhs.at[used:].set(jnp.nan), gradient.at[used:].set(jnp.nan)
    results = products(lhs, rhs, gradient, jnp.array(group_sizes), TINY)
    assert not np.any(results[0][used:]) and not np.any(results[1][used:])
    assert not np.any(np.asarray(results[2])[np.array(group_sizes) == 0])
    assert_all_close(results, expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize(
    ("shape", "group_sizes", "dtype"),
    [
        ((300, 37, 129), (100, 0, 41, 159), jnp.float32),
        ((300, 37, 129), (100, 0, 41, 159), jnp.bfloat16),
        ((5, 3, 2), (5,), jnp.float32),
        ((40, 128, 1), (1, 0, 0, 0), jnp.bfloat16),
    ],
    ids=str,
)
def test_own_tiles_agree_with_a_slow_reference(shape, group_sizes, dtype):
    problem = random_problem(shape, len(group_sizes), dtype)
    results = products(*problem, jnp.array(group_sizes))
    assert [result.dtype for result in results] == [dtype, dtype, jnp.float32]
    assert_all_close(results, reference(*problem, group_sizes), TOLERANCE[dtype])


@pytest.mark.parametrize("group_sizes", [(3, 0, 40, 2, 20), (0, 0, 0, 0, 0)], ids=str)
def test_a_simulated_core_whose_memory_starts_as_nan_agrees(group_sizes):
    """The simulation copies blocks as a TPU does, so a block read before it is written shows."""
    problem = random_problem((70, 200, 130), len(group_sizes))
    simulated = pltpu.InterpretParams(uninitialized_memory="nan")
    results = products(*problem, jnp.array(group_sizes), Tiles(32, 8, 128, 128), simulated)
    assert_all_close(results, reference(*problem, group_sizes), TOLERANCE[jnp.float32])


def test_nan_in_a_row_stays_in_its_row_and_its_group():
    sizes = jnp.array([3, 2, 0, 7])
    lhs, rhs, gradient = random_problem((12, 7, 5), 4)
    clean = products(lhs, rhs, gradient, sizes, TINY)
    for dirty in ((lhs.at[3].set(jnp.nan), gradient), (lhs, gradient.at[3].set(jnp.nan))):
        results = products(dirty[0], rhs, dirty[1], sizes, TINY)
        for before, after, mine in zip(clean, results, (3, 3, 1), strict=True):
            np.testing.assert_array_equal(np.delete(before, mine, 0), np.delete(after, mine, 0))
        assert np.all(np.isnan(results[2][1]))


def test_nan_in_a_matrix_stays_in_its_group():
    sizes = jnp.array([3, 2, 0, 7])
    lhs, rhs, gradient = random_problem((12, 7, 5), 4)
    clean = products(lhs, rhs, gradient, sizes, TINY)
    results = products(lhs, rhs.at[1:3].set(jnp.nan), gradient, sizes, TINY)
    for before, after in zip(clean[:2], results[:2], strict=True):
        np.testing.assert_array_equal(np.delete(before, (3, 4), 0), np.delete(after, (3, 4), 0))
        assert np.all(np.isnan(after[3:5]))


def test_rows_that_sizes_claim_past_the_last_are_ignored():
    problem = random_problem((12, 7, 5), 3)
    claimed = products(*problem, jnp.array([3, 2**30, 5]), TINY)
    assert_all_close(claimed, reference(*problem, (3, 9, 0)), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("shape", [(0, 3, 5), (4, 0, 5), (4, 3, 0)], ids=str)
def test_empty_axes_give_zeros(shape):
    problem = random_problem(shape, 2)
    results = products(*problem, jnp.array([0, shape[0]]))
    for result, wanted in zip(results, reference(*problem, (0, 0)), strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_bfloat16_accumulates_in_float32():
    # Counting in bfloat16 sticks at 256: 256 + 1 rounds to 256.
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    tiles = Tiles(rows=128, step=32, inner=128, outer=128)
    results = products(ones((512, 512)), ones((1, 512, 8)), ones((512, 8)), jnp.array([512]), tiles)
    for result in results:
        np.testing.assert_array_equal(result.astype(jnp.float32), 512.0)


def test_float64_is_refused():
    with jax.enable_x64(True):
        lhs, rhs = jnp.ones((2, 2), jnp.float64), jnp.ones((1, 2, 2), jnp.float64)
        with pytest.raises(ValueError, match="lhs has type float64; expected float32 or bfloat16"):
            pallas_rows(lhs, rhs, jnp.array([2]))


def test_vmap_scan_and_shard_map_change_nothing():
    sizes = [(3, 0, 4), (0, 0, 7), (2, 1, 1)]
    problems = [random_problem((7, 5, 3), 3, seed=seed) for seed in range(3)]
    batch = [jnp.stack(leaves) for leaves in zip(*problems, strict=True)]
    multiply = functools.partial(products, tiles=TINY)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("x")
    # JAX's interpreter of kernels does not know which values vary over the devices.
    sharded = jax.shard_map(
        lambda *args: jax.vmap(multiply)(*args),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    for results in (
        jax.jit(jax.vmap(multiply))(*batch, jnp.array(sizes)),
        jax.jit(lambda *args: jax.lax.map(lambda args: multiply(*args), args))(
            *batch, jnp.array(sizes)
        ),
        jax.jit(sharded)(*batch, jnp.array(sizes)),
    ):
        for number, problem in enumerate(problems):
            expected = reference(*problem, sizes[number])
            assert_all_close([result[number] for result in results], expected, 1e-5)


def test_the_cost_a_kernel_declares_is_its_work():
    lhs, rhs, gradient = random_problem((300, 37, 129), 3)
    sizes = jnp.array([100, 100, 100])

    def declared(function, *operands):
        found = []
        jaxprs = [jax.make_jaxpr(functools.partial(function, interpret=True))(*operands).jaxpr]
        while jaxprs:
            for equation in jaxprs.pop().eqns:
                if equation.primitive.name == "pallas_call":
                    found.append(equation.params["cost_estimate"].flops)
                else:
                    jaxprs += jax.extend.core.jaxprs_in_params(equation.params)
        return found

    tiles = row_tiles(300, 37, 129, 3, jnp.float32)
    assert declared(pallas_rows, lhs, rhs, sizes) == [pallas_flops(300, 37, 129, 3, tiles)]
    tiles = group_tiles(300, 37, 129, 3, jnp.float32)
    assert declared(pallas_groups, lhs, gradient, sizes) == [pallas_flops(300, 37, 129, 3, tiles)]
