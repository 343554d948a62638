import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import grouped_matmul
from moe_jax.core.grouped_matmul import IMPLEMENTATIONS

# A height of blocks and tiles, see `moe_jax.core.row_blocks` and `pallas_matmul`.
BLOCK_ROWS = 256
INNER, OUTER = 3, 5
ROWS_AND_GROUPS = ((0, 4), (1, 1), (7, 4), (2 * BLOCK_ROWS + 3, 4))
# Float32 rounding of sums of at most 515 products; bfloat16 rounds the result to 8 bits.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture
def without_runtime_checks():
    """Outside the tests nothing checks annotations; the library's own errors are what users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@functools.partial(jax.jit, static_argnames="implementation")
def value_and_gradients(lhs, rhs, group_sizes, cotangent, implementation):
    out, pullback = jax.vjp(
        lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes, implementation), lhs, rhs
    )
    return out, *pullback(cotangent)


def reference(lhs, rhs, group_sizes, cotangent):
    """The same in float64, row by row."""
    lhs, rhs, cotangent = (np.asarray(array, np.float64) for array in (lhs, rhs, cotangent))
    out, lhs_gradient, rhs_gradient = (np.zeros_like(array) for array in (cotangent, lhs, rhs))
    row = 0
    for group, size in enumerate(group_sizes):
        for _ in range(size):
            out[row] = lhs[row] @ rhs[group]
            lhs_gradient[row] = rhs[group] @ cotangent[row]
            rhs_gradient[group] += np.outer(lhs[row], cotangent[row])
            row += 1
    return out, lhs_gradient, rhs_gradient


def random_problem(group_sizes, num_rows, dtype=jnp.float32, inner=INNER, outer=OUTER, seed=0):
    generator = np.random.default_rng(seed)
    shapes = (num_rows, inner), (len(group_sizes), inner, outer), (num_rows, outer)
    lhs, rhs, cotangent = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
    return lhs, rhs, jnp.asarray(group_sizes, jnp.int32), cotangent


def assert_close(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@st.composite
def sizes_and_rows(draw):
    num_rows, num_groups = draw(st.sampled_from(ROWS_AND_GROUPS))
    edges = [edge for edge in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1) if edge < num_rows]
    boundary = st.sampled_from([*edges, num_rows]) | st.integers(0, num_rows)
    ends = sorted(draw(st.lists(boundary, min_size=num_groups, max_size=num_groups)))
    return tuple(int(size) for size in np.diff(ends, prepend=0)), num_rows


@every_implementation
@hypothesis.given(problem=sizes_and_rows(), seed=st.integers(0, 2**16))
@hypothesis.example(problem=((0, 7, 0, 0), 7), seed=0)
@hypothesis.example(problem=((0, 0, 0, 0), 7), seed=0)
@hypothesis.example(problem=((3, 0, 4, 0), 7), seed=0)
@hypothesis.example(problem=((BLOCK_ROWS, BLOCK_ROWS + 1, 0, 1), 2 * BLOCK_ROWS + 3), seed=0)
@hypothesis.settings(max_examples=50)
def test_agrees_with_a_slow_reference_and_ignores_the_rows_past_the_sum(
    implementation, problem, seed
):
    group_sizes, num_rows = problem
    used = sum(group_sizes)
    lhs, rhs, sizes, cotangent = random_problem(group_sizes, num_rows, seed=seed)
    expected = reference(lhs, rhs, group_sizes, cotangent)
    lhs, cotangent = lhs.at[used:].set(jnp.nan), cotangent.at[used:].set(jnp.nan)
    out, lhs_gradient, rhs_gradient = value_and_gradients(
        lhs, rhs, sizes, cotangent, implementation
    )
    assert not np.any(out[used:]) and not np.any(lhs_gradient[used:])
    assert not np.any(np.asarray(rhs_gradient)[np.asarray(group_sizes) == 0])
    for actual, wanted in zip((out, lhs_gradient, rhs_gradient), expected, strict=True):
        assert_close(actual, wanted, TOLERANCE[jnp.float32])


@every_implementation
def test_bfloat16_agrees_with_a_slow_reference(implementation):
    group_sizes = (300, 0, 130, 60)
    problem = random_problem(group_sizes, 2 * BLOCK_ROWS + 3, jnp.bfloat16)
    results = value_and_gradients(*problem, implementation)
    assert [result.dtype for result in results] == [jnp.bfloat16] * 3
    for actual, wanted in zip(results, reference(*problem), strict=True):
        assert_close(actual, wanted, TOLERANCE[jnp.bfloat16])


@every_implementation
def test_widths_need_not_be_multiples_of_a_tile(implementation):
    problem = random_problem((0, 11, 2, 0), 13, inner=37, outer=129)
    results = value_and_gradients(*problem, implementation)
    for actual, wanted in zip(results, reference(*problem), strict=True):
        assert_close(actual, wanted, TOLERANCE[jnp.float32])


@every_implementation
def test_nan_in_a_row_stays_in_its_row_and_its_group(implementation):
    lhs, rhs, group_sizes, cotangent = random_problem((3, 2, 0, 2), 7)
    clean = value_and_gradients(lhs, rhs, group_sizes, cotangent, implementation)
    for dirty_lhs, dirty_cotangent in (
        (lhs.at[3].set(jnp.nan), cotangent),
        (lhs, cotangent.at[3].set(jnp.nan)),
    ):
        dirty = value_and_gradients(dirty_lhs, rhs, group_sizes, dirty_cotangent, implementation)
        for before, after, mine in zip(clean, dirty, (3, 3, 1), strict=True):
            np.testing.assert_array_equal(np.delete(before, mine, 0), np.delete(after, mine, 0))
    assert np.all(np.isnan(dirty[1][3])) and np.all(np.isnan(dirty[2][1]))


@every_implementation
def test_bfloat16_products_accumulate_in_float32(implementation):
    # Counting in bfloat16 sticks at 256: 256 + 1 rounds to 256.
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    results = value_and_gradients(
        ones((512, 512)), ones((1, 512, 512)), jnp.array([512]), ones((512, 512)), implementation
    )
    for result in results:
        np.testing.assert_array_equal(result.astype(jnp.float32), 512.0)


@every_implementation
def test_gradients_agree_with_finite_differences(implementation):
    lhs, rhs, group_sizes, _ = random_problem((3, 0, 2, 1), 7)
    # The product is bilinear, so a central difference is exact whatever its step.
    jax.test_util.check_grads(
        jax.jit(lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes, implementation)),
        (lhs, rhs),
        order=1,
        modes=["rev"],
        eps=0.5,
        rtol=1e-4,
        atol=1e-4,
    )


@every_implementation
def test_second_derivatives_agree_with_those_of_indexed_matrices(implementation):
    sizes = (3, 0, 2, 1)
    lhs, rhs, group_sizes, cotangent = random_problem(sizes, 7)
    group = np.repeat(np.arange(5), (*sizes, 1))

    def indexed(lhs, rhs):
        padded = jnp.concatenate([rhs, jnp.zeros_like(rhs[:1])])
        return jnp.einsum("mk,mkn->mn", lhs, padded[group])

    @functools.partial(jax.jit, static_argnums=0)
    def second(function, *args):
        def slope(*args):
            gradients = jax.grad(
                lambda *args: jnp.sum(jnp.sin(function(*args)) * cotangent), argnums=(0, 1)
            )(*args)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in gradients)

        return jax.grad(slope, argnums=(0, 1))(*args)

    mine = second(lambda *args: grouped_matmul(*args, group_sizes, implementation), lhs, rhs)
    for actual, wanted in zip(mine, second(indexed, lhs, rhs), strict=True):
        assert_close(actual, wanted, TOLERANCE[jnp.float32])


def test_dense_has_forward_mode_derivatives_and_the_others_refuse_them():
    lhs, rhs, group_sizes, _ = random_problem((3, 0, 2, 1), 7)
    jax.test_util.check_grads(
        jax.jit(lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes, "dense")),
        (lhs, rhs),
        order=2,
        modes=["fwd"],
        eps=0.5,
        rtol=1e-3,
        atol=1e-3,
    )
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda lhs: grouped_matmul(lhs, rhs, group_sizes, "loop"), (lhs,), (lhs,))


@every_implementation
def test_rows_in_excess_are_left_out_of_the_last_groups(implementation):
    lhs, rhs, group_sizes, cotangent = random_problem((3, 2, 9, 4), 7)
    results = value_and_gradients(lhs, rhs, group_sizes, cotangent, implementation)
    expected = reference(lhs, rhs, (3, 2, 2, 0), cotangent)
    for actual, wanted in zip(results, expected, strict=True):
        assert_close(actual, wanted, TOLERANCE[jnp.float32])


@pytest.mark.parametrize("implementation", ["loop", "ragged_dot", "dense"])
def test_shard_map_over_rows_sums_the_gradient_of_the_matrices(implementation):
    problem = random_problem((3, 0, 2, 1), 7)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    @jax.jit
    def sharded(lhs, rhs, group_sizes, cotangent):
        product = jax.shard_map(
            functools.partial(grouped_matmul, implementation=implementation),
            mesh=mesh,
            in_specs=(data, whole, data),
            out_specs=data,
        )
        out, pullback = jax.vjp(lambda lhs, rhs: product(lhs, rhs, group_sizes), lhs, rhs)
        return out, *pullback(cotangent)

    expected = value_and_gradients(*problem, implementation)
    for actual, wanted in zip(sharded(*problem), expected, strict=True):
        assert_close(actual, wanted, TOLERANCE[jnp.float32])


@every_implementation
def test_vmap_scan_and_remat_change_nothing(implementation):
    sizes = [(3, 0, 4, 0), (0, 0, 0, 7), (2, 1, 0, 1)]
    problems = [random_problem(sizes[seed], 7, seed=seed) for seed in range(3)]

    def gradients(*problem):
        return value_and_gradients(*problem, implementation)

    @jax.jit
    def transformed(lhs, rhs, group_sizes, cotangent):
        def remat(problem):
            lhs, group_sizes, cotangent = problem
            out, pullback = jax.vjp(
                jax.checkpoint(lambda *args: grouped_matmul(*args, group_sizes, implementation)),
                lhs,
                rhs[0],
            )
            return out, *pullback(cotangent)

        return {
            "vmap": jax.vmap(gradients)(lhs, rhs, group_sizes, cotangent),
            "vmap over rows": jax.vmap(gradients, (0, None, 0, 0))(
                lhs, rhs[0], group_sizes, cotangent
            ),
            "vmap over matrices": jax.vmap(gradients, (None, 0, None, None))(
                lhs[0], rhs, group_sizes[0], cotangent[0]
            ),
            "scan and remat": jax.lax.map(remat, (lhs, group_sizes, cotangent)),
        }

    results = transformed(*(jnp.stack(leaves) for leaves in zip(*problems, strict=True)))
    first = problems[0]
    for number, (lhs, rhs, _, cotangent) in enumerate(problems):
        shared = reference(lhs, first[1], sizes[number], cotangent)
        expected = {
            "vmap": reference(lhs, rhs, sizes[number], cotangent),
            "vmap over rows": shared,
            "vmap over matrices": reference(first[0], rhs, sizes[0], first[3]),
            "scan and remat": shared,
        }
        for name, wanted in expected.items():
            for actual, array in zip(results[name], wanted, strict=True):
                assert_close(actual[number], array, TOLERANCE[jnp.float32])


def test_default_implementation_on_cpu_is_the_loop():
    problem = random_problem((3, 2, 0, 1), 7)[:3]
    jaxpr = str(jax.make_jaxpr(grouped_matmul)(*problem))
    assert jaxpr == str(jax.make_jaxpr(lambda *args: grouped_matmul(*args, "loop"))(*problem))
    assert "ragged_dot" not in jaxpr


@every_implementation
def test_runs_with_float64_switched_on(implementation):
    problem = random_problem((3, 0, 2, 1), 7)
    results = value_and_gradients(*problem, implementation)
    with jax.enable_x64(True):
        again = value_and_gradients(*problem, implementation)
    for before, after in zip(results, again, strict=True):
        assert after.dtype == jnp.float32
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("lhs", "rhs", "group_sizes"),
    [
        ((6, 3), (2, 4, 5), (2,)),
        ((6, 3), (2, 3, 5), (3,)),
        ((6, 3), (3, 5), (2,)),
        ((6,), (2, 3, 5), (2,)),
        ((6, 3), (2, 3, 5), ()),
    ],
)
def test_shapes_that_do_not_fit_are_refused(without_runtime_checks, lhs, rhs, group_sizes):
    with pytest.raises(ValueError) as error:
        grouped_matmul(jnp.zeros(lhs), jnp.zeros(rhs), jnp.zeros(group_sizes, jnp.int32))
    assert str(error.value) == (
        f"lhs {lhs}, rhs {rhs} and group_sizes {group_sizes} do not fit: "
        "expected [rows, inner], [groups, inner, outer] and [groups]"
    )


def test_types_that_differ_are_refused():
    lhs, rhs, group_sizes, _ = random_problem((3, 4), 7)
    with pytest.raises(ValueError) as error:
        grouped_matmul(lhs, rhs.astype(jnp.bfloat16), group_sizes)
    assert str(error.value) == "lhs has type float32 and rhs bfloat16; they must be the same"


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError) as error:
        grouped_matmul(*random_problem((3, 4), 7)[:3], implementation="fast")
    assert str(error.value) == (
        "implementation='fast' is not one of ('loop', 'ragged_dot', 'pallas', 'dense')"
    )
