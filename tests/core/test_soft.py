"""Soft mixtures; what all routers share is in test_routing.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import soft_routing
from moe_jax.core.soft import answer_tokens, fill_slots
from tests.core import reference

TOKENS, EXPERTS, SLOTS, MODEL = 5, 3, 6, 4

weigh = jax.jit(soft_routing, static_argnums=1)


def random_array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@jax.jit
def mix(slot_logits, tokens, mask, expert_mask):
    """Weights, routing, slots, tokens answered by slots times their number, and all gradients."""
    number = 1.0 + jnp.arange(SLOTS, dtype=jnp.float32)[:, None]

    def total(slot_logits, tokens):
        routing, weights = soft_routing(slot_logits, EXPERTS, mask=mask, expert_mask=expert_mask)
        slots = fill_slots(tokens, weights)
        out = answer_tokens(number * slots, weights)
        finite = jnp.where(jnp.isnan(out), 0.0, out)
        return jnp.sum(jnp.sin(finite)), (routing, weights, slots, out)

    gradients, results = jax.grad(total, (0, 1), has_aux=True)(slot_logits, tokens)
    return *results, gradients


def run(slot_logits, tokens, mask=None, expert_mask=None):
    mask = np.ones(TOKENS, bool) if mask is None else mask
    expert_mask = np.ones(EXPERTS, bool) if expert_mask is None else expert_mask
    return mix(slot_logits, tokens, jnp.asarray(mask), jnp.asarray(expert_mask))


def test_weights_computed_by_hand():
    # Two tokens, two slots, exp of the logits (1, 3; 1, 1): over tokens 1/2, 3/4; over slots
    # 1/4, 3/4 and 1/2, 1/2.
    logits = jnp.log(jnp.array([[1.0, 3.0], [1.0, 1.0]]))
    routing, weights = weigh(logits, 2)
    np.testing.assert_allclose(weights.dispatch, [[0.5, 0.75], [0.5, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(weights.combine, [[0.25, 0.75], [0.5, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(routing.combine_weight, weights.combine, rtol=1e-6)
    # As slots of one expert, its logit is log 4 and log 2.
    routing, _ = weigh(logits, 1)
    np.testing.assert_allclose(routing.gate_logits, np.log([[4.0], [2.0]]), rtol=1e-6)
    np.testing.assert_allclose(routing.combine_weight, [[1.0], [1.0]], rtol=1e-6)


@pytest.mark.parametrize("closed", [[], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("masked", [[], [0, 3], [0, 1, 2, 3, 4]])
def test_agrees_with_a_loop_and_all_is_finite(masked, closed):
    mask, expert_mask = ~np.isin(np.arange(TOKENS), masked), ~np.isin(np.arange(EXPERTS), closed)
    logits, tokens = 2 * random_array(TOKENS, SLOTS), random_array(TOKENS, MODEL, seed=1)
    routing, weights, slots, out, gradients = run(logits, tokens, mask, expert_mask)
    dispatch, combine = reference.soft_weights(
        np.asarray(logits, np.float64), EXPERTS, mask=mask, is_open=expert_mask
    )
    np.testing.assert_allclose(weights.dispatch, dispatch, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(weights.combine, combine, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(slots, dispatch.T @ np.asarray(tokens), rtol=1e-4, atol=1e-6)
    number = 1 + np.arange(SLOTS)[:, None]
    wanted = combine @ (number * (dispatch.T @ np.asarray(tokens, np.float64)))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-6)
    share = combine.reshape(TOKENS, EXPERTS, -1).sum(axis=2)
    np.testing.assert_allclose(routing.combine_weight, share, rtol=1e-5, atol=1e-7)
    assert np.array_equal(routing.keep, mask[:, None] & expert_mask[None, :])
    for leaf in jax.tree.leaves((gradients, routing.load_balance_loss, routing.router_z_loss)):
        assert np.all(np.isfinite(leaf))
    assert not np.any(gradients[0][~mask]) and not np.any(gradients[1][~mask])
    assert not np.any(gradients[0][:, np.repeat(~expert_mask, 2)])


def test_gradients_agree_with_complex_steps():
    logits, tokens = 2 * random_array(TOKENS, SLOTS), random_array(TOKENS, MODEL, seed=1)

    def objective(logits, tokens):
        dispatch, combine = reference.soft_weights(logits, EXPERTS)
        slots = (1 + np.arange(SLOTS))[:, None] * (dispatch.T @ tokens)
        return np.sum(np.sin(combine @ slots))

    wanted = reference.gradients(objective, logits, tokens)
    actual = run(logits, tokens)[-1]
    jax.tree.map(lambda a, b: reference.assert_close(a, b, 1e-5), actual, wanted)


@pytest.mark.parametrize("masked", [[0, 1, 2], [3, 4], [1, 3]])
def test_masked_tokens_change_nothing_bit_for_bit(masked):
    mask = ~np.isin(np.arange(TOKENS), masked)
    logits, tokens = random_array(TOKENS, SLOTS), random_array(TOKENS, MODEL, seed=1)
    clean = run(logits, tokens, mask)
    for padding in (np.nan, np.inf, 1e30):
        hidden = (jnp.where(mask[:, None], array, padding) for array in (logits, tokens))
        jax.tree.map(np.testing.assert_array_equal, run(*hidden, mask), clean)
    assert not np.any(clean[3][~mask])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_stays_out_of_the_slots(bad):
    logits, tokens = random_array(TOKENS, SLOTS), random_array(TOKENS, MODEL, seed=1)
    without = run(logits, tokens, np.arange(TOKENS) != 2)
    _, weights, slots, out, _ = run(logits.at[2, 1].set(bad), tokens.at[2].set(bad))
    np.testing.assert_array_equal(slots, without[2])
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(without[3], 2, 0))
    assert not np.any(weights.dispatch[2]) and np.all(np.isnan(out[2]))


def test_permuting_tokens_permutes_the_answers_and_leaves_the_slots():
    logits, tokens = random_array(TOKENS, SLOTS), random_array(TOKENS, MODEL, seed=1)
    order = np.array([3, 0, 4, 2, 1])
    _, _, slots, out, _ = run(logits, tokens)
    _, _, permuted_slots, permuted, _ = run(logits[order], tokens[order])
    np.testing.assert_allclose(permuted_slots, slots, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(permuted, out[order], rtol=1e-4, atol=1e-6)


def test_one_token_fills_every_slot_and_sharp_logits_pick_one_token():
    token = random_array(1, MODEL)
    _, weights = weigh(random_array(1, SLOTS), EXPERTS)
    np.testing.assert_allclose(fill_slots(token, weights), jnp.tile(token, (SLOTS, 1)), rtol=1e-6)
    tokens = random_array(SLOTS, MODEL)
    _, weights = weigh(1e4 * jnp.eye(SLOTS), EXPERTS)
    np.testing.assert_array_equal(fill_slots(tokens, weights), tokens)
    np.testing.assert_array_equal(answer_tokens(tokens, weights), tokens)


def test_no_token_leaves_the_slots_empty():
    _, weights = weigh(jnp.zeros((0, SLOTS)), EXPERTS)
    slots = fill_slots(jnp.zeros((0, MODEL)), weights)
    np.testing.assert_array_equal(slots, np.zeros((SLOTS, MODEL)))
    assert answer_tokens(slots, weights).shape == (0, MODEL)


def test_means_are_taken_in_float32_and_returned_in_the_type_of_the_tokens():
    # 257 ones: bfloat16 sums stop at 256, and 1/257 rounds by 0.2 %.
    _, weights = weigh(jnp.zeros((257, 2)), 2)
    slots = fill_slots(jnp.ones((257, MODEL), jnp.bfloat16), weights)
    assert slots.dtype == jnp.bfloat16 and weights.dispatch.dtype == jnp.float32
    np.testing.assert_allclose(slots.astype(jnp.float32), 1.0, rtol=5e-3)
    out = answer_tokens(slots, weights)
    assert out.dtype == jnp.bfloat16 and out.shape == (257, MODEL)


@pytest.mark.parametrize("num_experts", [0, 4, -1])
def test_experts_that_do_not_divide_the_slots_are_refused(num_experts):
    with pytest.raises(ValueError) as error:
        soft_routing(jnp.zeros((TOKENS, SLOTS)), num_experts)
    assert str(error.value) == f"num_experts={num_experts} does not divide slots={SLOTS}"


def test_passes_through_vmap():
    logits = random_array(2, TOKENS, SLOTS)
    together = jax.vmap(functools.partial(soft_routing, num_experts=EXPERTS))(logits)
    for number in range(2):
        alone = weigh(logits[number], EXPERTS)
        jax.tree.map(
            lambda leaf, wanted, i=number: np.testing.assert_allclose(
                leaf[i], wanted, rtol=1e-5, atol=1e-6
            ),
            together,
            alone,
        )
