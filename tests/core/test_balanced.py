"""Expert choice, Sinkhorn and the balance bias; what all routers share is in test_routing.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import (
    expert_choice_routing,
    routing_metrics,
    sigmoid_routing,
    sinkhorn_plan,
    sinkhorn_routing,
    top_k_routing,
    update_balance_bias,
)
from tests.core import reference

choose = jax.jit(expert_choice_routing, static_argnums=1)
plan_of = jax.jit(sinkhorn_plan, static_argnums=1)
update = jax.jit(update_balance_bias)


def random_logits(num_tokens=8, num_experts=4, seed=0, skew=0.0):
    """Random scores; a skew favours the experts of low index."""
    logits = 2.0 * np.random.default_rng(seed).standard_normal((num_tokens, num_experts))
    return jnp.asarray(logits - skew * np.arange(num_experts), jnp.float32)


def in_float64(values):
    return np.asarray(values, np.float64)


def test_expert_choice_computed_by_hand():
    # Probabilities of 3 tokens for 2 experts; each takes 2. Expert 0: tokens 0 (0.9), 2 (0.6).
    # Expert 1: tokens 1 (0.7), 2 (0.4). Token 2 has both, tokens 0 and 1 one each.
    logits = jnp.log(jnp.array([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]]))
    routing = choose(logits, 2)
    np.testing.assert_array_equal(routing.keep, [[True, False], [False, True], [True, True]])
    np.testing.assert_allclose(
        routing.combine_weight, [[0.9, 0.0], [0.0, 0.7], [0.6, 0.4]], rtol=1e-6
    )
    np.testing.assert_array_equal(routing.expert_index, [[0, 1]] * 3)


@pytest.mark.parametrize("capacity", [1, 3, 8, 100])
def test_expert_choice_agrees_with_a_loop_and_has_equal_load(capacity):
    for seed in range(3):
        logits = random_logits(seed=seed, skew=1.0)
        routing = choose(logits, capacity)
        actual = reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)
        reference.assert_same_choice(actual, reference.expert_choice(in_float64(logits), capacity))
        np.testing.assert_array_equal(np.sum(routing.keep, axis=0), [min(capacity, 8)] * 4)


def test_experts_take_no_more_than_asked_of_the_best_tokens():
    logits = random_logits()
    fewer = jax.jit(expert_choice_routing, static_argnums=1)(logits, 5, num_taken=jnp.int32(2))
    np.testing.assert_array_equal(fewer.keep, choose(logits, 2).keep)


def test_expert_choice_takes_the_unmasked_tokens_if_they_are_fewer_than_its_capacity():
    mask = jnp.array([True, False, True, False, False, False, True, False])
    routing = choose(random_logits(), 5, mask=mask)
    np.testing.assert_array_equal(routing.keep, np.broadcast_to(mask[:, None], (8, 4)))


def test_expert_choice_gives_equal_tokens_to_the_earlier():
    logits = jnp.tile(random_logits(1), (8, 1))
    np.testing.assert_array_equal(choose(logits, 3).keep, [[t < 3] * 4 for t in range(8)])


def test_no_expert_takes_a_token_whose_scores_are_nan():
    logits = random_logits().at[3].set(jnp.nan)
    routing = choose(logits, 8)
    assert not np.any(routing.keep[3]) and np.all(np.delete(routing.keep, 3, 0))
    assert np.all(np.isfinite(routing.combine_weight))


@pytest.mark.parametrize("capacity", [0, -2])
def test_a_capacity_below_1_is_refused(capacity):
    with pytest.raises(ValueError) as error:
        expert_choice_routing(random_logits(), capacity)
    assert str(error.value) == f"capacity={capacity} must be at least 1"


@pytest.mark.parametrize("num_iterations", [1, 3, 20])
def test_sinkhorn_plan_agrees_with_a_loop(num_iterations):
    mask = np.arange(8) != 5
    logits = random_logits()
    plan = np.exp(in_float64(plan_of(logits, num_iterations, mask=jnp.asarray(mask))))
    wanted = reference.sinkhorn_plan(in_float64(logits), num_iterations, mask=mask)
    np.testing.assert_allclose(plan[mask], wanted[mask], rtol=2e-5)


def test_sinkhorn_plan_has_the_marginals():
    logits, mask = random_logits(12, 4, skew=2.0), jnp.arange(12) < 10
    plan = np.exp(in_float64(plan_of(logits, 200, mask=mask)))[:10]
    np.testing.assert_allclose(plan.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(plan.sum(axis=0), 10 / 4, rtol=1e-4)
    # diag(u) exp(l) diag(v): what is left of log plan - l without row and column means is 0.
    rest = np.log(plan) - in_float64(logits[:10])
    rest -= rest.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(rest - rest.mean(axis=0, keepdims=True), 0.0, atol=1e-4)


def test_a_closed_expert_has_no_share_in_the_plan_and_the_others_divide_it():
    logits = random_logits(12, 4).at[:, 1].set(-jnp.inf)
    plan = np.exp(in_float64(plan_of(logits, 200)))
    np.testing.assert_allclose(plan.sum(axis=0), [4, 0, 4, 4], rtol=1e-4)


def test_sinkhorn_balances_what_top_k_does_not():
    logits = random_logits(64, 8, skew=0.7)
    for num_selected in (1, 2):
        before = routing_metrics(top_k_routing(logits, num_selected)).balance
        after = routing_metrics(sinkhorn_routing(logits, num_selected)).balance
        assert after < 0.7 * before and after < 2.0


def test_sinkhorn_weights_and_gradient_are_those_of_top_k_for_the_same_experts():
    logits = random_logits(skew=1.0)
    cotangent = jnp.asarray(random_logits(8, 2, seed=5))

    def weights(logits):
        return sinkhorn_routing(logits, 2, renormalize=False).combine_weight

    index = sinkhorn_routing(logits, 2).expert_index

    def plain(logits):
        return jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), index, axis=-1)

    actual, wanted = (
        jax.jit(lambda logits, f=f: (f(logits), jax.vjp(f, logits)[1](cotangent)))(logits)
        for f in (weights, plain)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, actual, wanted)


def test_the_plan_passes_through_shard_map_which_checks_what_varies_over_the_mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    plan = functools.partial(sinkhorn_plan, num_iterations=3)
    sharded = jax.jit(jax.shard_map(plan, mesh=mesh, in_specs=spec, out_specs=spec))
    logits = random_logits()
    np.testing.assert_allclose(sharded(logits), plan_of(logits, 3), rtol=1e-6)


@pytest.mark.parametrize("num_iterations", [0, -1])
def test_a_number_of_iterations_below_1_is_refused(num_iterations):
    with pytest.raises(ValueError) as error:
        sinkhorn_routing(random_logits(), 2, num_iterations=num_iterations)
    assert str(error.value) == f"num_iterations={num_iterations} must be at least 1"


def test_bias_update_computed_by_hand():
    # Mean load 2: signs -1, +1, +1, 0; moved 0.1 * sign = (-.1, .1, .1, 0), mean 0.025.
    bias = update(jnp.zeros(4), jnp.array([5.0, 1.0, 0.0, 2.0]), 0.1)
    np.testing.assert_allclose(bias, [-0.125, 0.075, 0.075, -0.025], rtol=1e-5)


def test_bias_update_is_the_same_for_counts_and_shares_and_for_stacked_layers():
    bias = jnp.array([[0.1, -0.1, 0.0], [0.0, 0.2, -0.2]])
    load = jnp.array([[9.0, 1.0, 2.0], [0.0, 4.0, 8.0]])
    stacked = update(bias, load)
    for layer in range(2):
        np.testing.assert_allclose(stacked[layer], update(bias[layer], load[layer]), rtol=1e-6)
    np.testing.assert_allclose(update(bias, load / 12.0), stacked, rtol=1e-6)


def test_equal_load_and_no_load_leave_the_bias():
    bias = jnp.array([0.1, -0.3, 0.2])
    for load in (jnp.zeros(3), jnp.full(3, 7.0), jnp.full(3, 1.0 / 3.0)):
        np.testing.assert_allclose(update(bias, load), bias, atol=1e-7)


def test_a_closed_expert_keeps_its_bias_and_counts_in_no_mean():
    opened = jnp.array([True, True, True, False])
    load = jnp.array([0.4, 0.3, 0.3, 0.0])
    bias = jnp.array([0.0, 0.0, 0.0, 0.2])
    # Mean load of the open 1/3: signs -1, +1, +1; moved 0.1 * sign, mean 0.1 / 3.
    moved = update_balance_bias(bias, load, 0.1, expert_mask=opened)
    np.testing.assert_allclose(moved, [-4 / 30, 2 / 30, 2 / 30, 0.2], rtol=1e-5)
    alone = update_balance_bias(bias[:3], load[:3], 0.1)
    np.testing.assert_allclose(moved[:3], alone, rtol=1e-6)
    none = update_balance_bias(bias, load, 0.1, expert_mask=jnp.zeros(4, bool))
    np.testing.assert_array_equal(none, bias)


def test_bias_keeps_a_mean_of_0_over_many_updates():
    def step(bias, key):
        return update_balance_bias(bias, jax.random.uniform(key, (7,)) ** 4), None

    bias, _ = jax.lax.scan(step, jnp.zeros(7), jax.random.split(jax.random.key(0), 1000))
    # 1000 sums of 7 values near 0.01, each rounded to 1e-9.
    assert abs(float(jnp.mean(bias))) < 1e-7 and np.any(np.abs(bias) > 1e-3)


@jax.jit
def balance_by_bias(gate_logits, rate):
    """The bias after 400 steps of routing the same tokens, those along the way, and the loads."""

    def step(bias, _):
        load = routing_metrics(sigmoid_routing(gate_logits, 2, balance_bias=bias)).load
        moved = update_balance_bias(bias, load, rate)
        return moved, (moved, load)

    return jax.lax.scan(step, jnp.zeros(gate_logits.shape[1]), length=400)


def test_bias_moves_against_the_load_and_balances_a_skewed_gate():
    _, (biases, loads) = balance_by_bias(random_logits(256, 8, skew=0.6), 0.002)
    assert loads[0].max() * 8 > 2.0 and loads[0].min() * 8 < 0.5
    early = biases[9]
    assert early[np.argmax(loads[0])] < -0.01 and early[np.argmin(loads[0])] > 0.01
    np.testing.assert_allclose(np.mean(biases, axis=1), 0.0, atol=1e-6)
    assert np.mean(loads[-20:], axis=0).max() * 8 < 1.15
