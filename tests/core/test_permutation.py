import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np

from moe_jax.core import Routing
from moe_jax.core.permutation import (
    UNROLLED_CHOICES,
    RowOrder,
    combine,
    dispatch,
    sort_by_expert,
)

TOKENS, EXPERTS, SELECTED, MODEL = 6, 3, 2, 4


def routing_to(expert_index, keep=None, num_experts=EXPERTS):
    """A record that sends tokens where a test wants them."""
    expert_index = jnp.asarray(expert_index, jnp.int32)
    keep = jnp.ones(expert_index.shape, bool) if keep is None else jnp.asarray(keep, bool)
    return Routing(
        expert_index=expert_index,
        combine_weight=jnp.where(keep, 1.0 / expert_index.shape[1], 0.0),
        gate_logits=jnp.zeros((expert_index.shape[0], num_experts)),
        keep=keep,
        mask=jnp.any(keep, axis=1),
        load_balance_loss=jnp.float32(0.0),
        router_z_loss=jnp.float32(0.0),
    )


@jax.jit
def sort_and_move(expert_index, keep, tokens):
    routing = routing_to(expert_index, keep)
    order = sort_by_expert(routing)
    rows = dispatch(tokens, order)
    return order, rows, combine(rows, routing.combine_weight, order)


def random_tokens(seed=0):
    return jax.random.normal(jax.random.key(seed), (TOKENS, MODEL))


shape = (TOKENS, SELECTED)
some_assignments = {
    "expert_index": hypothesis.extra.numpy.arrays(np.int32, shape, elements=st.integers(0, 2)),
    "keep": hypothesis.extra.numpy.arrays(np.bool_, shape),
}


@hypothesis.given(**some_assignments)
@hypothesis.settings(max_examples=50)
def test_rows_are_sorted_by_expert_then_token_with_those_not_kept_last(expert_index, keep):
    order, rows, _ = sort_and_move(expert_index, keep, random_tokens())
    wanted = sorted(
        (expert_index[token, choice] if keep[token, choice] else EXPERTS, token, choice)
        for token in range(TOKENS)
        for choice in range(SELECTED)
    )
    np.testing.assert_array_equal(order.token_of_row, [token for _, token, _ in wanted])
    for row, (_, token, choice) in enumerate(wanted):
        assert order.row_of_assignment[token, choice] == row
    np.testing.assert_array_equal(
        order.group_sizes, [sum(entry[0] == expert for entry in wanted) for expert in range(3)]
    )
    np.testing.assert_array_equal(rows, random_tokens()[order.token_of_row])


@hypothesis.given(**some_assignments)
@hypothesis.settings(max_examples=50)
def test_combine_undoes_dispatch_for_the_assignments_kept(expert_index, keep):
    tokens = random_tokens()
    _, _, out = sort_and_move(expert_index, keep, tokens)
    # Halves of one token add up to it without rounding.
    np.testing.assert_array_equal(out, tokens * (keep.sum(axis=1, keepdims=True) / 2.0))


def test_an_order_computed_by_hand():
    # Tokens 0, 1, 2 choose experts (2, 0), (0, 1), (2, 1); token 1's second choice is dropped.
    # By expert: 0 <- tokens 0, 1; 1 <- token 2; 2 <- tokens 0, 2; last, what is not kept: token 1.
    order = sort_by_expert(
        routing_to([[2, 0], [0, 1], [2, 1]], [[True, True], [True, False], [True, True]])
    )
    np.testing.assert_array_equal(order.token_of_row, [0, 1, 2, 0, 2, 1])
    np.testing.assert_array_equal(order.row_of_assignment, [[3, 0], [1, 5], [4, 2]])
    np.testing.assert_array_equal(order.group_sizes, [2, 1, 2])


def test_an_absent_expert_that_is_not_kept_takes_no_place():
    order = sort_by_expert(routing_to([[-1, 0], [7, -1]], [[False, True], [False, False]]))
    np.testing.assert_array_equal(order.group_sizes, [1, 0, 0])
    assert order.token_of_row[0] == 0


def move_plainly(tokens, rows, combine_weight, order):
    """Both moves with nothing but indexing, whose derivative JAX finds by itself."""
    answers = rows[order.row_of_assignment]
    return tokens[order.token_of_row], jnp.sum(answers * combine_weight[:, :, None], axis=1)


def move(tokens, rows, combine_weight, order):
    return dispatch(tokens, order), combine(rows, combine_weight, order)


def random_move():
    generator = np.random.default_rng(1)
    tokens, rows = (
        jnp.asarray(generator.standard_normal((num, MODEL)), jnp.float32)
        for num in (TOKENS, TOKENS * SELECTED)
    )
    weight = jnp.asarray(generator.uniform(0.1, 1.0, shape), jnp.float32)
    expert_index = jnp.asarray(generator.integers(0, EXPERTS, shape), jnp.int32)
    order, _, _ = sort_and_move(expert_index, jnp.ones(shape, bool), tokens)
    return (tokens, rows, weight), order


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, inputs, order):
    out, pullback = jax.vjp(lambda *inputs: function(*inputs, order), *inputs)
    return out, pullback(jax.tree.map(jnp.sin, out))


def test_derivatives_agree_with_those_of_plain_indexing():
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        value_and_gradients(move, *random_move()),
        value_and_gradients(move_plainly, *random_move()),
    )


def test_derivatives_agree_with_finite_differences():
    inputs, order = random_move()
    # Both moves are linear in each argument, so a central difference is exact whatever its step.
    jax.test_util.check_grads(
        jax.jit(functools.partial(move, order=order)),
        inputs,
        order=1,
        modes=["rev"],
        eps=0.5,
        rtol=1e-4,
        atol=1e-4,
    )


def test_derivatives_add_nothing_by_scatter():
    inputs, order = random_move()

    def gradients(function):
        def loss(*inputs):
            return sum(jnp.sum(jnp.sin(out)) for out in function(*inputs, order))

        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*inputs))

    assert "scatter-add" in gradients(move_plainly)
    assert "scatter-add" not in gradients(move)


def test_an_assignment_of_weight_0_contributes_nothing_even_if_it_is_not_finite():
    (tokens, rows, weight), order = random_move()
    weight = weight.at[2, 1].set(0.0)
    row = order.row_of_assignment[2, 1]
    (_, clean), _ = value_and_gradients(move, (tokens, rows.at[row].set(0.0), weight), order)
    dirty_rows = rows.at[row].set(jnp.nan)
    (_, dirty), (_, gradient, _) = value_and_gradients(move, (tokens, dirty_rows, weight), order)
    np.testing.assert_array_equal(dirty, clean)
    assert np.all(gradient[row] == 0.0) and np.all(np.isfinite(gradient))


def test_bfloat16_answers_and_gradients_are_summed_in_float32():
    @jax.jit
    def sums(rows):
        order = sort_by_expert(routing_to([[0, 1, 2]]))
        tokens = jnp.zeros((1, 1), jnp.bfloat16)
        _, pullback = jax.vjp(lambda tokens: dispatch(tokens, order), tokens)
        return combine(rows, jnp.ones((1, 3)), order), *pullback(rows)

    # In bfloat16 256 + 1 rounds to 256, and 256 + 1 + 1 to 256 again.
    for total in sums(jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)):
        assert total.dtype == jnp.bfloat16 and total[0, 0] == 258.0


def capacity_order():
    """Token 0 goes to expert 0, token 1 to experts 1 and 0; of two rows each, one stays empty."""
    return RowOrder(
        token_of_row=jnp.array([0, 1, 1, 3], jnp.int32),
        row_of_assignment=jnp.array([[0, 4], [2, 1], [4, 4]], jnp.int32),
        group_sizes=jnp.array([2, 2], jnp.int32),
    )


def test_rows_and_assignments_without_a_partner_are_0_both_ways():
    order = capacity_order()
    generator = np.random.default_rng(2)
    tokens, rows = (
        jnp.asarray(generator.standard_normal((num, MODEL)), jnp.float32) for num in (3, 4)
    )
    weight = jnp.asarray(generator.uniform(0.1, 1.0, (3, 2)), jnp.float32)

    def plainly(tokens, rows, weight, order):
        # One more token and one more row, of zeros, for the index past the end.
        padded = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])[order.row_of_assignment]
        moved = jnp.concatenate([tokens, jnp.zeros_like(tokens[:1])])[order.token_of_row]
        return moved, jnp.sum(padded * weight[:, :, None], axis=1)

    inputs = tokens, rows, weight
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        value_and_gradients(move, inputs, order),
        value_and_gradients(plainly, inputs, order),
    )


def test_many_choices_give_what_few_do():
    # Past UNROLLED_CHOICES they are summed in a loop.
    num_choices = UNROLLED_CHOICES + 3
    row = jnp.arange(2 * num_choices, dtype=jnp.int32).reshape(2, num_choices)
    order = RowOrder(
        token_of_row=jnp.repeat(jnp.arange(2, dtype=jnp.int32), num_choices),
        row_of_assignment=row,
        group_sizes=jnp.array([2 * num_choices], jnp.int32),
    )
    generator = np.random.default_rng(3)
    tokens, rows = (
        jnp.asarray(generator.standard_normal((num, MODEL)), jnp.float32)
        for num in (2, 2 * num_choices)
    )
    weight = jnp.asarray(generator.uniform(0.1, 1.0, (2, num_choices)), jnp.float32)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        value_and_gradients(move, (tokens, rows, weight), order),
        value_and_gradients(move_plainly, (tokens, rows, weight), order),
    )
