"""Routers in which tokens choose; what all routers share is in test_routing.py."""

import collections
import functools
import math

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import (
    dense_routing,
    hash_routing,
    load_balance_loss,
    noisy_top_k_routing,
    routing_metrics,
    sigmoid_routing,
    top_k_routing,
)
from tests.core import reference

GROUP_OPTIONS = ("renormalize", "scale", "num_groups", "num_selected_groups")
route = jax.jit(top_k_routing, static_argnums=1, static_argnames=("renormalize", "softmax"))
route_sigmoid = jax.jit(sigmoid_routing, static_argnums=1, static_argnames=GROUP_OPTIONS)
route_noisy = jax.jit(noisy_top_k_routing, static_argnums=(2, 3))
route_hash = jax.jit(hash_routing, static_argnums=(1, 2), static_argnames="seed")
log_softmax = jax.jit(jax.nn.log_softmax)


def logits_of(*probabilities):
    return jnp.log(jnp.array(probabilities, jnp.float32))


def scores_of(*scores):
    """Logits whose sigmoids are the scores."""
    scores = np.array(scores, np.float64)
    return jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)


def random_logits(num_tokens=6, num_experts=4, seed=0):
    return 2.0 * jax.random.normal(jax.random.key(seed), (num_tokens, num_experts))


@pytest.mark.parametrize(
    ("num_selected", "options", "weights"),
    [
        (1, {}, [0.5]),
        (1, {"renormalize": False}, [0.5]),
        (1, {"softmax": "after"}, [1.0]),
        (2, {}, [0.625, 0.375]),
        (2, {"renormalize": False}, [0.5, 0.3]),
        (2, {"softmax": "after"}, [0.625, 0.375]),
        (2, {"softmax": "after", "renormalize": False}, [0.625, 0.375]),
        (3, {}, [0.5, 0.3, 0.2]),
        (3, {"renormalize": False}, [0.5, 0.3, 0.2]),
    ],
)
def test_weights_computed_by_hand(num_selected, options, weights):
    routing = route(logits_of([0.3, 0.5, 0.2]), num_selected, **options)
    np.testing.assert_array_equal(routing.expert_index, [[1, 0, 2][:num_selected]])
    np.testing.assert_allclose(routing.combine_weight, [weights], rtol=1e-6)
    assert np.all(routing.keep) and np.all(routing.mask)


@hypothesis.given(
    gate_logits=hypothesis.extra.numpy.arrays(
        np.float32,
        (5, 6),
        elements=st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1e15, 1e15]),
    )
)
@hypothesis.settings(max_examples=100)
def test_experts_are_distinct_best_first_and_renormalised_weights_sum_to_1(gate_logits):
    routing = route(jnp.asarray(gate_logits), 3)
    for token in range(5):
        # A logit counts through its distance to the others, which float32 rounds.
        score = np.asarray(log_softmax(gate_logits[token]))
        wanted = sorted(range(6), key=lambda expert: (-score[expert], expert))[:3]
        assert routing.expert_index[token].tolist() == wanted
    weight = np.asarray(routing.combine_weight)
    assert np.all(weight >= 0) and np.all(np.diff(weight, axis=1) <= 0)
    np.testing.assert_allclose(weight.sum(axis=1), 1.0, rtol=1e-6)
    for leaf in jax.tree.leaves(routing):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("gate_logits", "chosen"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([1.0, 2.0, 2.0, 2.0], [1, 2]),
        ([3.0, 1.0, 4.0, 3.0], [2, 0]),
        ([-0.0, 0.0, -0.0, 0.0], [0, 1]),
        ([-1.0, -0.0, 0.0, -1.0], [1, 2]),
    ],
)
def test_ties_go_to_the_lower_index(dtype, gate_logits, chosen):
    gate_logits = jnp.array([gate_logits], dtype)
    np.testing.assert_array_equal(route(gate_logits, 2).expert_index, [chosen])
    np.testing.assert_array_equal(route_sigmoid(gate_logits, 2).expert_index, [chosen])


def test_experts_whose_probability_underflows_are_still_told_apart():
    routing = route(jnp.array([[200.0, 0.0, 1.0, 2.0]]), 3)
    np.testing.assert_array_equal(routing.expert_index, [[0, 3, 2]])
    np.testing.assert_array_equal(routing.combine_weight, [[1.0, 0.0, 0.0]])


def test_sigmoid_scores_that_saturate_are_still_told_apart():
    routing = route_sigmoid(jnp.array([[-200.0, -201.0, -199.0, -300.0], [30.0, 31, 33, 32]]), 2)
    np.testing.assert_array_equal(routing.expert_index, [[2, 0], [2, 3]])
    # exp(-199) / (exp(-199) + exp(-200)) although both underflow in float32.
    share = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(routing.combine_weight, [[share, 1 - share], [0.5, 0.5]], rtol=1e-5)


def test_one_selected_expert_gives_the_gate_a_gradient_by_default():
    def weight(gate_logits):
        return jnp.sum(top_k_routing(gate_logits, 1).combine_weight)

    def sigmoid_weight(gate_logits):
        return jnp.sum(sigmoid_routing(gate_logits, 1).combine_weight)

    def constant(gate_logits):
        return jnp.sum(top_k_routing(gate_logits, 1, softmax="after").combine_weight)

    # d p_0 / d l = p_0 (1 - p_0), -p_0 p_1, -p_0 p_2.
    gradient = jax.jit(jax.grad(weight))(logits_of([0.5, 0.3, 0.2]))
    np.testing.assert_allclose(gradient, [[0.25, -0.15, -0.1]], rtol=1e-6)
    # d s_1 / d l_1 = s_1 (1 - s_1).
    gradient = jax.jit(jax.grad(sigmoid_weight))(scores_of([0.5, 0.8, 0.2]))
    np.testing.assert_allclose(gradient, [[0.0, 0.16, 0.0]], rtol=1e-5)
    assert not np.any(jax.jit(jax.grad(constant))(logits_of([0.5, 0.3, 0.2])))


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient_of_the_weights_is_that_of_the_plain_formula_at_the_chosen(renormalize, name):
    gate_logits, cotangent = random_logits(), random_logits(num_experts=2, seed=1)
    router = {"softmax": top_k_routing, "sigmoid": sigmoid_routing}[name]

    def weights(gate_logits):
        return router(gate_logits, 2, renormalize=renormalize).combine_weight

    def plain(gate_logits):
        index = jnp.argsort(-gate_logits, axis=-1)[:, :2]
        score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[name](gate_logits)
        chosen = jnp.take_along_axis(score, index, axis=-1)
        return chosen / jnp.sum(chosen, axis=-1, keepdims=True) if renormalize else chosen

    actual, wanted = (
        jax.jit(lambda logits, f=function: jax.vjp(f, logits)[1](cotangent)[0])(gate_logits)
        for function in (weights, plain)
    )
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-6)


def test_an_expert_closed_by_minus_infinity_is_not_chosen_and_spoils_nothing():
    gate_logits = random_logits().at[:, 1].set(-jnp.inf)

    @jax.jit
    def everything(gate_logits):
        def total(gate_logits):
            routing = top_k_routing(gate_logits, 2)
            losses = routing.load_balance_loss + routing.router_z_loss
            return jnp.sum(routing.combine_weight[:, 0]) + losses, routing

        gradient, routing = jax.grad(total, has_aux=True)(gate_logits)
        return routing, routing_metrics(routing), gradient

    routing, metrics, gradient = everything(gate_logits)
    assert not np.any(routing.expert_index == 1) and metrics.load[1] == 0.0
    for leaf in jax.tree.leaves((routing.combine_weight, metrics, gradient, routing.router_z_loss)):
        assert np.all(np.isfinite(leaf))
    open_metrics = everything(jnp.delete(gate_logits, 1, axis=1))[1]
    assert metrics.entropy == pytest.approx(float(open_metrics.entropy), rel=1e-6)


def test_sigmoid_weights_and_record_computed_by_hand():
    # Scores 0.8, 0.5, 0.2, 0.1 with bias 0, 0, 0.4, 0: ranked 0.8, 0.6 (expert 2), 0.5, 0.1.
    logits = scores_of([0.8, 0.5, 0.2, 0.1])
    bias = jnp.array([0.0, 0.0, 0.4, 0.0])
    routing = route_sigmoid(logits, 2, balance_bias=bias, scale=2.5)
    np.testing.assert_array_equal(routing.expert_index, [[0, 2]])
    # The weights know nothing of the bias: 2.5 * 0.8 / (0.8 + 0.2), 2.5 * 0.2 / 1.
    np.testing.assert_allclose(routing.combine_weight, [[2.0, 0.5]], rtol=1e-6)
    raw = route_sigmoid(logits, 2, balance_bias=bias, renormalize=False)
    np.testing.assert_allclose(raw.combine_weight, [[0.8, 0.2]], rtol=1e-6)
    # The distribution of the record is s / sum s = (8, 5, 2, 1) / 16.
    probability = np.exp(np.asarray(log_softmax(routing.gate_logits)))
    np.testing.assert_allclose(probability, [[8 / 16, 5 / 16, 2 / 16, 1 / 16]], rtol=1e-6)
    # f = (1/2, 0, 1/2, 0): 4 (8 + 2) / 32; the z-loss is that of the logits themselves.
    assert routing.load_balance_loss == pytest.approx(4 * 10 / 32, rel=1e-6)
    partition = sum(s / (1 - s) for s in (0.8, 0.5, 0.2, 0.1))
    assert routing.router_z_loss == pytest.approx(math.log(partition) ** 2, rel=1e-5)


def test_groups_computed_by_hand():
    # Groups (0, 1), (2, 3), (4, 5) have sums 1.0, 1.1, 0.95: the best expert, 4, is in the worst.
    logits = scores_of([0.5, 0.5, 0.6, 0.5, 0.9, 0.05])
    routing = route_sigmoid(logits, 2, num_groups=3, num_selected_groups=1)
    np.testing.assert_array_equal(routing.expert_index, [[2, 3]])
    routing = route_sigmoid(logits, 3, num_groups=3, num_selected_groups=2)
    np.testing.assert_array_equal(routing.expert_index, [[2, 0, 1]])
    routing = route_sigmoid(logits, 3, num_groups=3, num_selected_groups=3)
    np.testing.assert_array_equal(routing.expert_index, [[4, 2, 0]])


@pytest.mark.parametrize(
    ("num_experts", "num_selected", "groups"),
    [(8, 3, (4, 2)), (8, 2, (8, 3)), (8, 4, (2, 1)), (6, 3, (1, 1)), (4, 4, (2, 2))],
)
def test_groups_agree_with_a_loop(num_experts, num_selected, groups):
    names = dict(zip(("num_groups", "num_selected_groups"), groups, strict=True))
    for seed in range(4):
        logits = random_logits(9, num_experts, seed)
        bias = 0.3 * jax.random.normal(jax.random.key(seed + 50), (num_experts,))
        routing = route_sigmoid(logits, num_selected, balance_bias=bias, **names)
        in_float64 = (np.asarray(value, np.float64) for value in (logits, bias))
        logits, bias = in_float64
        choice = reference.sigmoid(logits, num_selected, bias=bias, **names)
        actual = reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)
        reference.assert_same_choice(actual, choice)
        assert routing.expert_index.tolist() == [list(weights) for weights in choice]


def test_a_token_stays_in_its_groups_even_if_too_few_experts_are_open_there():
    logits = scores_of([0.1, 0.1, 0.5, 0.99])
    expert_mask = jnp.array([True, True, False, True])
    routing = route_sigmoid(logits, 2, num_groups=2, num_selected_groups=1, expert_mask=expert_mask)
    actual = reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)
    assert actual == [{3: 1.0}]


def test_the_balance_bias_gets_no_gradient():
    def total(bias, gate_logits):
        routing = sigmoid_routing(gate_logits, 2, balance_bias=bias, renormalize=False)
        losses = routing.load_balance_loss + routing.router_z_loss
        return jnp.sum(jnp.sin(routing.combine_weight)) + losses

    gradient, logits_gradient = jax.jit(jax.grad(total, (0, 1)))(jnp.zeros(4), random_logits())
    assert not np.any(gradient) and np.all(logits_gradient != 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "num_groups=0 does not divide num_experts=4"),
        ({"num_groups": 3}, "num_groups=3 does not divide num_experts=4"),
        (
            {"num_groups": 2, "num_selected_groups": 3},
            "num_selected_groups=3 is not in [1, num_groups=2]",
        ),
        (
            {"num_groups": 2, "num_selected_groups": 0},
            "num_selected_groups=0 is not in [1, num_groups=2]",
        ),
        (
            {"num_groups": 4, "num_selected_groups": 1},
            "num_selected=2 exceeds the 1 experts of num_selected_groups=1 groups",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        sigmoid_routing(random_logits(), 2, **options)
    assert str(error.value) == message


@pytest.mark.parametrize("place", ["between", ""])
def test_an_unknown_place_of_the_softmax_is_refused(place):
    with pytest.raises(ValueError) as error:
        top_k_routing(random_logits(), 2, softmax=place)
    assert str(error.value) == f"softmax={place!r} is not one of ('before', 'after')"


def test_noise_is_the_same_for_the_same_key_and_0_of_it_is_top_k():
    logits = random_logits(64, 8)
    once = route_noisy(jax.random.key(1), logits, 1.0, 2)
    again = route_noisy(jax.random.key(1), logits, 1.0, 2)
    other = route_noisy(jax.random.key(2), logits, 1.0, 2)
    silent = route_noisy(jax.random.key(1), logits, 0.0, 2)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert np.any(once.expert_index != other.expert_index)
    jax.tree.map(np.testing.assert_array_equal, silent, route(logits, 2))


def test_noise_is_standard_normal_times_its_scale():
    logits, scale = random_logits(500, 8), jnp.full((500, 8), 0.5).at[:, 3].set(2.0)
    noisy = noisy_top_k_routing(jax.random.key(1), logits, scale, 2).gate_logits
    noise = np.asarray(noisy - logits) / np.asarray(scale)
    # 4000 draws: the mean has standard deviation 0.016, the variance 0.022; false alarm at 5
    # standard deviations 6e-7 each.
    assert abs(noise.mean()) < 5 / math.sqrt(4000)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / 4000)
    assert len(np.unique(noise)) > 3990


def test_the_scale_of_the_noise_gets_a_gradient():
    def weight(scale):
        routing = noisy_top_k_routing(jax.random.key(0), random_logits(), scale, 2)
        return jnp.sum(routing.combine_weight[:, 0])

    gradient = jax.jit(jax.grad(weight))(jnp.full((6, 4), 0.5))
    # Only the two experts of a token that were chosen; the others get rounding.
    assert np.count_nonzero(np.abs(gradient) > 1e-6) == 12


def test_dense_routing_is_the_softmax_in_order_of_the_experts():
    routing = dense_routing(logits_of([0.3, 0.5, 0.2]))
    np.testing.assert_array_equal(routing.expert_index, [[0, 1, 2]])
    np.testing.assert_allclose(routing.combine_weight, [[0.3, 0.5, 0.2]], rtol=1e-6)
    # The load is equal by construction, so this loss has nothing to say.
    assert routing.load_balance_loss == pytest.approx(1.0, rel=1e-6)


def test_hash_chooses_distinct_experts_by_token_id_alone_with_equal_weights():
    ids = jnp.array([5, 17, 5, 0, 17, 2**31 - 1, -1], jnp.int32)
    routing = route_hash(ids, 8, 3)
    index = np.asarray(routing.expert_index)
    assert all(len(set(row)) == 3 for row in index.tolist())
    np.testing.assert_array_equal(index[[0, 1]], index[[2, 4]])
    np.testing.assert_allclose(routing.combine_weight, 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(routing.expert_index, route_hash(ids, 8, 3).expert_index)
    np.testing.assert_array_equal(index[1:3], route_hash(ids[1:3], 8, 3).expert_index)
    chosen = np.isfinite(np.asarray(routing.gate_logits))
    np.testing.assert_array_equal(np.sort(index, 1), [np.flatnonzero(row) for row in chosen])
    alone = route_hash(ids, 8, 1)
    np.testing.assert_array_equal(alone.combine_weight, np.ones((7, 1)))
    np.testing.assert_array_equal(alone.expert_index[:, 0], index[:, 0])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32 + 5])
def test_hash_spreads_consecutive_ids_evenly_over_experts_and_over_pairs(seed):
    routing = route_hash(jnp.arange(16000, dtype=jnp.int32), 8, 2, seed=seed)
    index = np.asarray(routing.expert_index)
    # Chi-square with 7 and with 55 degrees of freedom; false-alarm rate 1e-6 each, for fixed ids
    # and seeds, so that the test passes always or never.
    counts = np.bincount(index[:, 0], minlength=8)
    assert np.sum((counts - 2000) ** 2 / 2000) < 40.5
    pairs = collections.Counter(map(tuple, index.tolist()))
    assert len(pairs) == 56
    wanted = 16000 / 56
    assert sum((count - wanted) ** 2 / wanted for count in pairs.values()) < 122.0


def test_another_seed_is_another_independent_assignment():
    ids = jnp.arange(8000, dtype=jnp.int32)
    first, second = (route_hash(ids, 8, 1, seed=seed).expert_index for seed in (0, 1))
    # Agreement by chance is binomial(8000, 1/8), standard deviation 29.6; false alarm 6e-7.
    assert abs(int(np.sum(first == second)) - 1000) < 5 * math.sqrt(8000 * 7 / 64)


def test_closing_an_expert_moves_only_its_own_tokens():
    ids = jnp.arange(500, dtype=jnp.int32)
    before = route_hash(ids, 8, 2)
    after = route_hash(ids, 8, 2, expert_mask=jnp.arange(8) != 3)
    moved = np.any(np.asarray(before.expert_index) == 3, axis=1)
    assert 0 < moved.sum() < 250 and not np.any(after.expert_index == 3)
    np.testing.assert_array_equal(before.expert_index[~moved], after.expert_index[~moved])
    for token in np.flatnonzero(moved):
        stayed = set(before.expert_index[token].tolist()) - {3}
        assert stayed < set(after.expert_index[token].tolist())
    # Those that move spread over the others: chi-square with 6 degrees, false-alarm rate 1e-6.
    added = [
        (set(after.expert_index[t].tolist()) - set(before.expert_index[t].tolist())).pop()
        for t in np.flatnonzero(moved)
    ]
    counts = np.delete(np.bincount(added, minlength=8), 3)
    assert np.sum((counts - counts.mean()) ** 2 / counts.mean()) < 38.3


def test_hash_with_fewer_experts_open_than_selected_shares_among_those():
    routing = route_hash(jnp.arange(3, dtype=jnp.int32), 4, 3, expert_mask=jnp.arange(4) == 2)
    np.testing.assert_array_equal(routing.combine_weight, [[1.0, 0.0, 0.0]] * 3)
    np.testing.assert_array_equal(routing.expert_index[:, 0], 2)
    closed = jnp.arange(4) != 2
    assert np.all(np.isneginf(np.asarray(routing.gate_logits)[:, closed]))


def test_losses_of_a_routing_are_those_of_its_scores_before_the_softmax():
    gate_logits, mask = random_logits(), jnp.arange(6) < 4
    routing = route(gate_logits, 2, mask=mask)
    loss = jax.jit(load_balance_loss)(gate_logits, routing.expert_index, mask)
    assert routing.load_balance_loss == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize(
    "router",
    [
        top_k_routing,
        sigmoid_routing,
        functools.partial(hash_routing, jnp.arange(6, dtype=jnp.int32)),
        lambda logits, k: noisy_top_k_routing(jax.random.key(0), logits, 0.1, k),
    ],
)
def test_a_number_of_experts_out_of_range_is_refused(router):
    experts = 4 if isinstance(router, functools.partial) else random_logits()
    for number, message in (
        (0, "num_selected=0 must be at least 1"),
        (5, "num_selected=5 exceeds num_experts=4"),
    ):
        with pytest.raises(ValueError) as error:
            router(experts, number)
        assert str(error.value) == message
