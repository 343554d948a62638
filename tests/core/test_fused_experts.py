import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.core.fused_experts import fused_experts
from moe_jax.core.grouped_matmul import grouped_matmul
from moe_jax.core.row_blocks import BLOCK_ROWS

EXPERTS, MODEL, HIDDEN, ROWS = 4, 3, 5, 75
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def gated(gate, up):
    return jax.nn.silu(gate) * up


ACTIVATIONS = {"gated": (gated, 2), "plain": (jax.nn.gelu, 1)}


def plainly(activate, rows, inner, down, group_sizes):
    """The experts product by product; `dense` has derivatives of every order and kind."""
    multiply = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation="dense")
    products = [multiply(rows, weight) for weight in inner]
    return multiply(activate(*products), down)


def with_equal_groups(activate, rows, inner, down, group_sizes):
    return fused_experts(activate, rows, inner, down, None)


def random_problem(group_sizes, activation="gated", num_rows=ROWS, sizes=(MODEL, HIDDEN), seed=0):
    generator = np.random.default_rng(seed)
    model, hidden = sizes

    def normal(*shape):
        return jnp.asarray(generator.standard_normal(shape), jnp.float32)

    num_inner = ACTIVATIONS[activation][1]
    inner = tuple(normal(len(group_sizes), model, hidden) for _ in range(num_inner))
    down = normal(len(group_sizes), hidden, model)
    arrays = normal(num_rows, model), inner, down, jnp.asarray(group_sizes, jnp.int32)
    return arrays, normal(num_rows, model)


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_gradients(function, activation, arrays, cotangent):
    *arrays, group_sizes = arrays
    activate = ACTIVATIONS[activation][0]
    out, pullback = jax.vjp(lambda *args: function(activate, *args, group_sizes), *arrays)
    return out, *pullback(cotangent)


def assert_close(actual, expected, dtype=jnp.float32):
    for mine, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        mine, wanted = np.asarray(mine, np.float64), np.asarray(wanted, np.float64)
        assert mine.shape == wanted.shape
        assert np.linalg.norm(mine - wanted) <= TOLERANCE[dtype] * np.linalg.norm(wanted)


@st.composite
def sizes(draw):
    ends = sorted(draw(st.lists(st.integers(0, ROWS), min_size=EXPERTS, max_size=EXPERTS)))
    return tuple(int(size) for size in np.diff(ends, prepend=0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@hypothesis.given(group_sizes=sizes())
@hypothesis.example(group_sizes=(0, ROWS, 0, 0))
@hypothesis.example(group_sizes=(0, 0, 0, 0))
@hypothesis.example(group_sizes=(40, 0, 20, ROWS - 60))
@hypothesis.settings(max_examples=30)
def test_agrees_with_its_products_taken_in_turn(activation, group_sizes):
    arrays, cotangent = random_problem(group_sizes, activation)
    assert_close(
        value_and_gradients(fused_experts, activation, arrays, cotangent),
        value_and_gradients(plainly, activation, arrays, cotangent),
    )


# XLA multiplies bfloat16 in some shapes and layouts only, and where it errs fails in the run.
@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [(1, (1, 1)), (20, (129, 37)), *((ROWS, s) for s in ((1, 1), (1, 9), (33, 1), (16, 16)))],
)
def test_bfloat16_rows_and_float32_weights_at_any_width(num_rows, sizes):
    group_sizes = (num_rows // 2, 0, num_rows - num_rows // 2, 0)
    arrays, cotangent = random_problem(group_sizes, num_rows=num_rows, sizes=sizes)
    narrow = (arrays[0].astype(jnp.bfloat16), *arrays[1:])
    results = value_and_gradients(fused_experts, "gated", narrow, cotangent.astype(jnp.bfloat16))
    out, rows_gradient, *weight_gradients = results
    assert out.dtype == rows_gradient.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(weight_gradients))
    assert_close(results, value_and_gradients(plainly, "gated", arrays, cotangent), jnp.bfloat16)


def test_nan_stays_in_its_row_and_its_expert():
    group_sizes = (40, 20, 0, 10)
    (rows, *weights), cotangent = random_problem(group_sizes)
    clean = value_and_gradients(fused_experts, "gated", (rows, *weights), cotangent)
    nan = jnp.nan
    for dirty_rows, dirty_cotangent in (
        (rows.at[50].set(nan), cotangent),
        (rows, cotangent.at[50].set(nan)),
        # Rows that belong to no expert.
        (rows.at[70:].set(nan), cotangent.at[70:].set(nan)),
    ):
        dirty = value_and_gradients(fused_experts, "gated", (dirty_rows, *weights), dirty_cotangent)
        for place, (before, after) in enumerate(
            zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True)
        ):
            mine = 50 if place < 2 else 1
            np.testing.assert_array_equal(np.delete(before, mine, 0), np.delete(after, mine, 0))


def test_rows_past_the_sum_and_experts_without_rows_give_exactly_0():
    arrays, cotangent = random_problem((40, 0, 20, 0))
    results = value_and_gradients(fused_experts, "gated", arrays, cotangent)
    out, rows_gradient, inner_gradients, down_gradient = results
    assert not np.any(out[60:]) and not np.any(rows_gradient[60:])
    for leaf in (*inner_gradients, down_gradient):
        assert not np.any(leaf[1]) and not np.any(leaf[3]) and np.all(np.any(leaf[::2], (1, 2)))


def test_second_derivatives_agree_with_those_of_its_products_taken_in_turn():
    (*arrays, group_sizes), cotangent = random_problem((40, 0, 20, 10))

    @functools.partial(jax.jit, static_argnums=0)
    def second(function, arrays):
        def slope(arrays):
            def loss(arrays):
                return jnp.sum(jnp.sin(function(gated, *arrays, group_sizes)) * cotangent)

            gradients = jax.grad(loss)(arrays)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(gradients))

        return jax.grad(slope)(arrays)

    assert_close(second(fused_experts, tuple(arrays)), second(plainly, tuple(arrays)))


def test_vmap_scan_and_remat_change_nothing():
    problems = [
        random_problem(group_sizes, seed=seed)
        for seed, group_sizes in enumerate([(40, 0, 20, 10), (0, 0, 0, 75), (1, 1, 0, 0)])
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    run = functools.partial(value_and_gradients, fused_experts, "gated")
    remat = functools.partial(value_and_gradients, jax.checkpoint(fused_experts, static_argnums=0))

    @jax.jit
    def transformed(stacked):
        (rows, inner, down, group_sizes), cotangent = stacked
        first = jax.tree.map(lambda leaf: leaf[0], (inner, down))
        return {
            "vmap": jax.vmap(run)(*stacked),
            "vmap over rows": jax.vmap(
                lambda rows, group_sizes, cotangent: run((rows, *first, group_sizes), cotangent)
            )(rows, group_sizes, cotangent),
            "scan and remat": jax.lax.map(lambda problem: remat("gated", *problem), stacked),
        }

    results = transformed(stacked)
    for number, ((rows, inner, down, group_sizes), cotangent) in enumerate(problems):
        shared = (rows, *problems[0][0][1:3], group_sizes)
        for name, arrays in {
            "vmap": (rows, inner, down, group_sizes),
            "vmap over rows": shared,
            "scan and remat": (rows, inner, down, group_sizes),
        }.items():
            leaves, structure = jax.tree.flatten(results[name])
            actual = jax.tree.unflatten(structure, [leaf[number] for leaf in leaves])
            assert_close(actual, run(arrays, cotangent))


@pytest.mark.parametrize("size", [0, 1, 17, BLOCK_ROWS[-1] + 1])
def test_groups_without_sizes_are_equal(size):
    arrays, cotangent = random_problem((size,) * EXPERTS, num_rows=EXPERTS * size)
    assert_close(
        value_and_gradients(with_equal_groups, "gated", arrays, cotangent),
        value_and_gradients(plainly, "gated", arrays, cotangent),
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_rows_sums_the_gradients_of_the_weights(check_vma):
    (rows, inner, down, group_sizes), cotangent = random_problem((40, 0, 20, 10))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    def sharded(rows, inner, down, group_sizes):
        return fused_experts(gated, rows, inner, down, group_sizes)

    def one(activate, *arrays):
        return sharded(*arrays)

    arrays = (rows, inner, down, group_sizes)
    assert_close(
        value_and_gradients(one, "gated", arrays, cotangent),
        value_and_gradients(fused_experts, "gated", arrays, cotangent),
    )


def test_keeps_nothing_but_the_rows_and_the_products_for_the_derivative():
    arrays, _ = random_problem((40, 0, 20, 10))
    _, pullback = jax.vjp(functools.partial(fused_experts, gated), *arrays)
    saved = {leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")}
    known = {array.shape for array in jax.tree.leaves(arrays)}
    assert saved - known == {(ROWS, HIDDEN)}
