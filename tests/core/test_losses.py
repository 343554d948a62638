import functools
import math

import jax
import jax.numpy as jnp
import jax.test_util
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import (
    gate_entropy,
    importance_loss,
    load_balance_loss,
    router_z_loss,
    sequence_load_balance_loss,
    top_k_routing,
)

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


def perfect_balance(num_selected):
    """Logits of which every expert of 4 is among the K best equally often, and the K best."""
    gate_logits = cyclic_logits()
    return gate_logits, best(gate_logits, num_selected)


def in_numpy(gate_logits, expert_index):
    """Softmax over experts and one-hot choices [tokens, k, experts], in float64."""
    logits = np.asarray(gate_logits, np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probability, np.eye(logits.shape[1])[np.asarray(expert_index)]


def maxtext(probability, chosen):
    """Of tokens [batch, length, ...]: per sequence, averaged over sequences."""
    density = chosen.sum(axis=2).mean(axis=1)
    return np.mean(density * probability.mean(axis=1)) * probability.shape[-1] ** 2


def hugging_face(probability, chosen):
    return np.sum(chosen.mean(axis=0) * probability.mean(axis=0)[None]) * probability.shape[-1]


def megablocks(probability, chosen):
    num_tokens, num_selected, num_experts = chosen.shape
    tokens_per_expert = chosen.sum(axis=(0, 1))
    scale = num_experts / (num_tokens * num_selected)
    return scale * tokens_per_expert @ probability.mean(axis=0)


def levanter(probability, chosen):
    num_tokens, num_selected, num_experts = chosen.shape
    expert_loads = chosen.sum(axis=(0, 1)) / (num_tokens * num_selected)
    return np.sum(expert_loads * num_experts / num_selected * probability.mean(axis=0))


# loss there = factor(K) x loss here, so a weight c there is c factor(K) here.
CONVERSIONS = {
    "megablocks": (megablocks, lambda k: 1.0),
    "hugging_face": (hugging_face, lambda k: k),
    "maxtext": (lambda p, chosen: maxtext(p[None], chosen[None]), lambda k: k),
    "levanter": (levanter, lambda k: 1.0 / k),
}


@pytest.mark.parametrize("num_selected", [1, 2, 3])
@pytest.mark.parametrize("library", CONVERSIONS)
def test_conversion_table_of_the_balance_loss(library, num_selected):
    theirs, factor = CONVERSIONS[library]
    gate_logits, index = perfect_balance(num_selected)
    assert theirs(*in_numpy(gate_logits, index)) == pytest.approx(factor(num_selected), rel=1e-6)
    for seed in range(5):
        gate_logits = random_logits(seed=seed)
        index = best(gate_logits, num_selected)
        ours = float(load_balance_loss(gate_logits, index))
        wanted = theirs(*in_numpy(gate_logits, index))
        assert ours * factor(num_selected) == pytest.approx(wanted, rel=1e-5)


def test_maxtext_averages_sequences_as_the_sequence_loss_does():
    gate_logits = random_logits(12)
    index = best(gate_logits, 2)
    probability, chosen = in_numpy(gate_logits, index)
    theirs = maxtext(probability.reshape(3, 4, 4), chosen.reshape(3, 4, 2, 4))
    assert 2 * sequence_load_balance_loss(gate_logits, index, 3) == pytest.approx(theirs, rel=1e-5)
    assert 2 * load_balance_loss(gate_logits, index) != pytest.approx(theirs, rel=1e-3)


def test_balance_loss_over_open_experts_is_that_of_a_gate_without_the_closed_ones():
    gate_logits, expert_mask = random_logits(), jnp.array([True, False, True, True])
    closed = jnp.where(expert_mask[None], gate_logits, -jnp.inf)
    fewer = jnp.delete(gate_logits, 1, axis=1)
    loss = load_balance_loss(closed, best(closed, 2), expert_mask=expert_mask)
    assert loss == pytest.approx(float(load_balance_loss(fewer, best(fewer, 2))), rel=1e-6)
    # A dense record lists the closed expert too; its share must not count.
    every = jnp.broadcast_to(jnp.arange(4)[None], (6, 4))
    assert load_balance_loss(closed, every, expert_mask=expert_mask) == pytest.approx(1.0, rel=1e-6)


def test_importance_loss_computed_by_hand():
    # Mean probabilities (5/8, 3/8): 2 (25 + 9) / 64 - 1 = 1/16. The first token alone: 3/4, 1/4.
    gate_logits = jnp.array([[math.log(3.0), 0.0], [0.0, 0.0]])
    assert importance_loss(gate_logits) == pytest.approx(1 / 16, rel=1e-5)
    alone = importance_loss(gate_logits, jnp.array([True, False]))
    assert alone == pytest.approx(2 * (9 + 1) / 16 - 1, rel=1e-5)


@pytest.mark.parametrize("num_experts", [1, 2, 7])
def test_importance_loss_is_0_at_equal_importance_and_experts_minus_1_at_collapse(num_experts):
    flat = jnp.zeros((3, num_experts))
    assert importance_loss(flat) == pytest.approx(0.0, abs=1e-12)
    assert importance_loss(flat.at[:, 0].set(100.0)) == pytest.approx(num_experts - 1, rel=1e-6)


def test_importance_loss_is_the_squared_coefficient_of_variation():
    probability, _ = in_numpy(random_logits(), jnp.zeros((6, 1), jnp.int32))
    importance = probability.sum(axis=0)
    wanted = np.var(importance) / np.mean(importance) ** 2
    assert importance_loss(random_logits()) == pytest.approx(wanted, rel=1e-5)


def test_entropy_computed_by_hand():
    # (1/2, 1/4, 1/4) has entropy log 2 / 2 + 2 log 4 / 4 = 3/2 log 2; a closed expert adds none.
    gate_logits = jnp.array([[0.0, -LOG_2, -LOG_2, -jnp.inf], [0.0, 0.0, 0.0, 0.0]])
    assert gate_entropy(gate_logits[:1]) == pytest.approx(1.5 * LOG_2, rel=1e-6)
    assert gate_entropy(gate_logits) == pytest.approx(1.75 * LOG_2, rel=1e-6)
    gradient = jax.jit(jax.grad(gate_entropy))(gate_logits)
    # d H / d l_e = -p_e (log p_e + H): at (1/2, 1/4, 1/4), (-1/4, 1/8, 1/8) log 2; halved.
    wanted = np.array([[-0.125, 0.0625, 0.0625, 0.0], [0.0, 0.0, 0.0, 0.0]]) * LOG_2
    np.testing.assert_allclose(gradient, wanted, atol=1e-7)


def test_sequence_loss_computed_by_hand():
    # Two sequences of two tokens. First: the example above, 5/4. Second: only its first token
    # counts, probabilities (3/4, 1/4), expert 1 chosen: 2 * 1/4 = 1/2. (2 * 5/4 + 1 * 1/2) / 3 = 1.
    gate_logits = jnp.array([[math.log(3.0), 0.0], [0.0, 0.0]] * 2)
    index = jnp.array([[0], [0], [1], [0]])
    mask = jnp.array([True, True, True, False])
    assert sequence_load_balance_loss(gate_logits, index, 2, mask) == pytest.approx(1.0, rel=1e-6)
    whole = load_balance_loss(gate_logits[:2], index[:2])
    assert sequence_load_balance_loss(gate_logits[:2], index[:2], 1) == whole


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_sequence_loss_and_its_gradient_do_not_depend_on_the_micro_batches(num_parts):
    gate_logits, mask = random_logits(16), jnp.arange(16) % 5 != 4
    index = best(gate_logits, 2)

    def accumulated(gate_logits):
        # What a training loop does: the mean over micro-batches, weighted by their tokens.
        parts = zip(*(jnp.split(a, num_parts) for a in (gate_logits, index, mask)), strict=True)
        losses = [
            sequence_load_balance_loss(logits, chosen, 4 // num_parts, counted)
            * jnp.sum(counted, dtype=jnp.float32)
            for logits, chosen, counted in parts
        ]
        return sum(losses) / jnp.sum(mask, dtype=jnp.float32)

    def together(gate_logits):
        return sequence_load_balance_loss(gate_logits, index, 4, mask)

    value, gradient = jax.jit(jax.value_and_grad(accumulated))(gate_logits)
    wanted, wanted_gradient = jax.jit(jax.value_and_grad(together))(gate_logits)
    assert value == pytest.approx(float(wanted), rel=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_sequences", [0, 4, -1])
def test_sequences_that_do_not_divide_the_tokens_are_refused(num_sequences):
    with pytest.raises(ValueError) as error:
        sequence_load_balance_loss(jnp.zeros((6, 4)), jnp.zeros((6, 1), jnp.int32), num_sequences)
    assert str(error.value) == f"num_sequences={num_sequences} does not divide tokens=6"


ALL_LOSSES = {
    "load_balance": load_balance_loss,
    "sequence": lambda logits, index, mask, **axes: sequence_load_balance_loss(
        logits, index, logits.shape[0] // 4, mask, **axes
    ),
    "z": lambda logits, index, mask, **axes: router_z_loss(logits, mask, **axes),
    "importance": lambda logits, index, mask, **axes: importance_loss(logits, mask, **axes),
    "entropy": lambda logits, index, mask, **axes: gate_entropy(logits, mask, **axes),
}


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_loss_over_named_axes_is_that_of_the_whole_batch_and_so_is_the_gradient(name):
    gate_logits = random_logits(16)
    index, mask = best(gate_logits, 2), jnp.arange(16) % 5 != 4

    def split(leaf):
        return leaf.reshape(2, 2, 4, *leaf.shape[1:])

    def shard(*arguments):
        return ALL_LOSSES[name](*arguments, axis_names=("data", "model"))

    def on_shards(gate_logits):
        inner = jax.vmap(shard, axis_name="model")
        losses = jax.vmap(inner, axis_name="data")(*map(split, (gate_logits, index, mask)))
        return losses[1, 0], losses

    # Differentiated within the shards, as in data parallelism, the mean over them is the gradient.
    def shard_gradient(gate_logits, *others):
        gradient = jax.grad(lambda scale: shard(scale * gate_logits, *others))(jnp.ones(()))
        return jax.lax.pmean(gradient, ("data", "model"))

    @jax.jit
    def everything(gate_logits):
        whole = jax.value_and_grad(ALL_LOSSES[name])(gate_logits, index, mask)
        inner = jax.vmap(shard_gradient, axis_name="model")
        within = jax.vmap(inner, axis_name="data")(*map(split, (gate_logits, index, mask)))
        return *whole, *jax.grad(on_shards, has_aux=True)(gate_logits), within

    value, gradient, sharded_gradient, losses, within = everything(gate_logits)
    np.testing.assert_allclose(losses, np.full((2, 2), value), rtol=1e-5)
    np.testing.assert_allclose(sharded_gradient, gradient, rtol=1e-5, atol=1e-7)
    wanted = np.sum(np.asarray(gradient) * np.asarray(gate_logits))
    np.testing.assert_allclose(within, np.full((2, 2), wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_every_loss_ignores_padding_and_is_0_without_tokens(name):
    gate_logits, index = random_logits(8), best(random_logits(8), 2)
    loss = jax.jit(jax.value_and_grad(ALL_LOSSES[name]))
    for mask in (np.arange(8) < 4, np.arange(8) >= 4):
        clean = loss(gate_logits, index, jnp.asarray(mask))
        for padding in (jnp.nan, jnp.inf, 1e30):
            dirty = loss(jnp.where(mask[:, None], gate_logits, padding), index, jnp.asarray(mask))
            jax.tree.map(np.testing.assert_array_equal, dirty, clean)
        assert clean[0] != 0.0 and not np.any(clean[1][~mask])
    value, gradient = loss(gate_logits, index, jnp.zeros(8, bool))
    assert value == 0.0 and not np.any(gradient)


@pytest.mark.parametrize("name", ALL_LOSSES)
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (jnp.ones(1, bool), "mask (1,) does not fit: expected (8,)"),
        (jnp.ones(8), "mask has type float32; expected bool"),
    ],
)
def test_every_loss_refuses_a_mask_that_would_weigh_or_spread(name, mask, message):
    gate_logits, index = random_logits(8), best(random_logits(8), 2)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError) as error:
            ALL_LOSSES[name](gate_logits, index, mask)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert str(error.value) == message


def test_every_loss_agrees_with_finite_differences():
    gate_logits = random_logits(8)
    index, mask = best(gate_logits, 2), jnp.arange(8) != 2

    @jax.jit
    def all_losses(gate_logits):
        return jnp.stack([loss(gate_logits, index, mask) for loss in ALL_LOSSES.values()])

    jax.test_util.check_grads(
        lambda gate_logits: all_losses(jnp.asarray(gate_logits)),
        (gate_logits,),
        order=1,
        modes=["rev", "fwd"],
        eps=1e-2,  # error of a central difference eps^2 = 1e-4, rounding 1e-7 / eps = 1e-5
        rtol=1e-3,
        atol=1e-3,
    )


def test_importance_loss_over_open_experts_is_that_of_a_gate_without_the_closed_ones():
    gate_logits, expert_mask = random_logits(), jnp.array([True, False, True, True])
    closed = jnp.where(expert_mask[None], gate_logits, -jnp.inf)
    loss = importance_loss(closed, expert_mask=expert_mask)
    assert loss == pytest.approx(
        float(importance_loss(gate_logits[:, np.array([0, 2, 3])])), rel=1e-5
    )
    uniform = jnp.where(expert_mask[None], 0.0, -jnp.inf) * jnp.ones((5, 1))
    assert importance_loss(uniform, expert_mask=expert_mask) == pytest.approx(0.0, abs=1e-6)


def test_balance_loss_counts_the_assignments_that_are_kept():
    gate_logits, index = random_logits(6), best(random_logits(6), 2)
    keep = jnp.ones((6, 2), bool).at[4:].set(False)
    load = np.bincount(np.asarray(index)[:4].reshape(-1), minlength=4) / 8
    probability = np.asarray(jax.nn.softmax(gate_logits, axis=-1)).mean(axis=0)
    loss = load_balance_loss(gate_logits, index, keep=keep)
    assert loss == pytest.approx(4 * float(load @ probability), rel=1e-5)


@pytest.mark.parametrize("loss", [router_z_loss, importance_loss, gate_entropy])
def test_scores_that_are_no_matrix_are_refused(loss):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError) as error:
            loss(jnp.zeros((2, 5, 4)))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert str(error.value) == "gate_logits (2, 5, 4): expected [tokens, experts]"
