import functools
import math

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from moe_jax.core import load_balance_loss, router_z_loss, top_k_routing

LOG_2 = math.log(2.0)


def best(gate_logits, num_selected):
    return jax.lax.top_k(gate_logits, num_selected)[1]


def cyclic_logits(scale=1.0):
    """Every expert of 4 comes first, second, third and last equally often."""
    return scale * jnp.stack([jnp.roll(jnp.arange(4.0), shift) for shift in range(4)] * 2)


def random_logits(num_tokens=6, num_experts=4, seed=0):
    return 2.0 * jax.random.normal(jax.random.key(seed), (num_tokens, num_experts))


@jax.jit
def both_losses(gate_logits, expert_index, mask=None):
    return jnp.stack(
        [load_balance_loss(gate_logits, expert_index, mask), router_z_loss(gate_logits, mask)]
    )


gradients = jax.jit(jax.jacrev(both_losses))


@pytest.mark.parametrize("num_selected", [1, 2, 4])
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_balance_loss_is_1_at_perfect_balance(num_selected, scale):
    loss = load_balance_loss(cyclic_logits(scale), best(cyclic_logits(), num_selected))
    # Eight probabilities are averaged in float32.
    assert loss == pytest.approx(1.0, abs=3e-7)


def test_balance_loss_of_a_uniform_gate_is_1_whatever_the_load():
    assert load_balance_loss(jnp.zeros((8, 4)), jnp.zeros((8, 1), jnp.int32)) == 1.0


@pytest.mark.parametrize(("num_selected", "collapsed"), [(1, 4.0), (2, 2.0), (4, 1.0)])
def test_balance_loss_at_collapse_is_experts_over_k(num_selected, collapsed):
    # The same K experts share all the probability and all the load, 1 / K each: E K / K^2.
    gate_logits = jnp.where(jnp.arange(4) < num_selected, 100.0, 0.0)[None].repeat(8, axis=0)
    assert load_balance_loss(gate_logits, best(gate_logits, num_selected)) == collapsed


def test_balance_loss_computed_by_hand():
    # Probabilities (3/4, 1/4) and (1/2, 1/2), both tokens choose expert 0:
    # f = (1, 0), P = (5/8, 3/8), 2 (1 * 5/8 + 0) = 5/4. The first token alone: 2 * 3/4 = 3/2.
    gate_logits, index = jnp.array([[math.log(3.0), 0.0], [0.0, 0.0]]), jnp.zeros((2, 1), jnp.int32)
    assert load_balance_loss(gate_logits, index) == pytest.approx(5 / 4, rel=1e-6)
    alone = load_balance_loss(gate_logits, index, jnp.array([True, False]))
    assert alone == pytest.approx(3 / 2, rel=1e-6)


def test_z_loss_computed_by_hand():
    # The partition functions are 3 + 1 = 4 and 1 + 1 = 2: ((2 log 2)^2 + (log 2)^2) / 2.
    gate_logits = jnp.array([[math.log(3.0), 0.0], [0.0, 0.0]])
    assert router_z_loss(gate_logits) == pytest.approx(2.5 * LOG_2**2, rel=1e-6)
    alone = router_z_loss(gate_logits, jnp.array([True, False]))
    assert alone == pytest.approx(4 * LOG_2**2, rel=1e-6)


def test_balance_loss_times_k_is_the_one_of_hugging_face_mixtral():
    gate_logits = random_logits()
    index = best(gate_logits, 2)
    probability = jax.nn.softmax(gate_logits, axis=-1)
    tokens_per_expert = jnp.mean(jax.nn.one_hot(index, 4, dtype=jnp.float32), axis=0)
    theirs = 4.0 * jnp.sum(tokens_per_expert * jnp.mean(probability, axis=0, keepdims=True))
    assert 2.0 * load_balance_loss(gate_logits, index) == pytest.approx(float(theirs), rel=1e-6)


def test_gradients_agree_with_finite_differences():
    gate_logits = random_logits()
    index, mask = best(gate_logits, 2), jnp.arange(6) != 2
    jax.test_util.check_grads(
        lambda gate_logits: both_losses(gate_logits, index, mask),
        (gate_logits,),
        order=1,
        modes=["rev", "fwd"],
        eps=1e-2,  # error of a central difference eps^2 = 1e-4, rounding 1e-7 / eps = 1e-5
        rtol=1e-3,
        atol=1e-3,
    )


def test_balance_gradient_takes_probability_from_the_overloaded_expert():
    gate_logits = jnp.zeros((8, 4)).at[:, 1].set(0.5)
    gradient = gradients(gate_logits, best(gate_logits, 1))[0]
    assert np.all(gradient[:, 1] > 0) and np.all(np.delete(gradient, 1, axis=1) < 0)


@pytest.mark.parametrize(
    "mask",
    [[False] * 6 + [True] * 6, [True] * 6 + [False] * 6, [True, False] * 6],
    ids=["left", "right", "between"],
)
@pytest.mark.parametrize("padding", [0.0, 1e30, jnp.nan, jnp.inf])
def test_half_the_tokens_being_padding_changes_no_loss_and_no_gradient(mask, padding):
    mask = np.array(mask)
    unpadded = random_logits()
    padded = jnp.full((12, 4), padding).at[np.flatnonzero(mask)].set(unpadded)
    index = jnp.zeros((12, 2), jnp.int32).at[np.flatnonzero(mask)].set(best(unpadded, 2))

    # Only the order of summation differs.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    close(both_losses(padded, index, jnp.asarray(mask)), both_losses(unpadded, best(unpadded, 2)))
    gradient = np.asarray(gradients(padded, index, jnp.asarray(mask)))
    close(gradient[:, mask], gradients(unpadded, best(unpadded, 2), None))
    np.testing.assert_array_equal(gradient[:, ~mask], 0.0)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_losses_are_0_if_no_token_counts(num_tokens):
    gate_logits, mask = jnp.ones((num_tokens, 4)), jnp.zeros(num_tokens, bool)
    index = jnp.zeros((num_tokens, 2), jnp.int32)
    np.testing.assert_array_equal(both_losses(gate_logits, index, mask), 0.0)
    gradient = gradients(gate_logits, index, mask)
    np.testing.assert_array_equal(gradient, np.zeros((2, num_tokens, 4)))


def test_logits_of_any_size_give_finite_losses():
    gate_logits = jnp.array([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]])
    balance, z = both_losses(gate_logits, best(gate_logits, 1))
    assert z == pytest.approx(1e8, rel=1e-3)
    # f = (1, 0, 0), P = ((1 + 1/3) / 2, ...): 3 * 2/3.
    assert balance == pytest.approx(2.0, rel=1e-6)


def test_losses_are_computed_in_float32_whatever_the_type_of_the_logits():
    rounded = random_logits().astype(jnp.bfloat16)
    index = best(rounded, 2)
    losses = both_losses(rounded, index)
    assert losses.dtype == jnp.float32
    np.testing.assert_array_equal(losses, both_losses(rounded.astype(jnp.float32), index))


def test_losses_of_a_routing_are_those_of_its_scores_before_the_softmax():
    gate_logits, mask = random_logits(), jnp.arange(6) < 4
    routing = top_k_routing(gate_logits, 2, mask=mask)
    losses = jnp.stack([routing.load_balance_loss, routing.router_z_loss])
    np.testing.assert_array_equal(losses, both_losses(gate_logits, routing.expert_index, mask))
