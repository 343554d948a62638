import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import (
    combine,
    dispatch,
    expert_capacity,
    limit_capacity,
    order_by_capacity,
    routing_metrics,
    sort_by_expert,
    top_k_routing,
)
from moe_jax.core.capacity import capacity_of_mask
from tests.core import reference

TOKENS, EXPERTS, SELECTED, MODEL = 12, 4, 2, 3
PRIORITIES = ("position", "score")

route = jax.jit(top_k_routing, static_argnums=1)
limit = jax.jit(limit_capacity, static_argnums=1, static_argnames="priority")
lay_out = jax.jit(order_by_capacity, static_argnums=1)
every_priority = pytest.mark.parametrize("priority", PRIORITIES)


def random_routing(seed=0, skew=1.0, num_selected=SELECTED, mask=None):
    logits = np.random.default_rng(seed).standard_normal((TOKENS, EXPERTS))
    logits = jnp.asarray(2 * logits - skew * np.arange(EXPERTS), jnp.float32)
    return route(logits, num_selected, mask=None if mask is None else jnp.asarray(mask))


def choice_of(routing):
    return reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)


@pytest.mark.parametrize(
    ("arguments", "capacity"),
    [
        # tokens, selected, experts, factor: ceil(factor T K / E), at least 1.
        ((100, 2, 8, 1.0), 25),
        ((100, 2, 8, 1.25), 32),  # 31.25
        ((100, 2, 8, 0.1), 3),  # 2.5
        ((3, 1, 8, 1.0), 1),  # 0.375
        ((3, 1, 8, 0.1), 1),
        ((1, 1, 64, 0.001), 1),
        ((0, 2, 8, 1.0), 1),
        ((100, 2, 8, 4.0), 100),  # nothing dropped
        ((7, 3, 9, 3.0), 7),
        ((5, 4, 4, 1.0), 5),
        ((4, 1, 1, 1.0), 4),
        ((10, 1, 1, 0.7), 7),  # 0.7 * 10 is 7.000000000000001
        ((110, 1, 11, 1.1), 11),  # 1.1 * 10 is 11.000000000000002
        ((208896, 8, 64, 1.25), 32640),
        ((100, 6, 64, 64 / 6), 100),
    ],
)
def test_capacity_computed_by_hand(arguments, capacity):
    assert expert_capacity(*arguments) == capacity


def test_capacity_is_at_least_1_and_at_most_the_tokens_and_grows_with_the_factor():
    for num_tokens in range(1, 20):
        for num_experts in (1, 2, 3, 7, 16):
            for num_selected in range(1, num_experts + 1):
                largest = num_experts / num_selected
                sizes = [
                    expert_capacity(num_tokens, num_selected, num_experts, share * largest)
                    for share in (0.01, 0.1, 0.25, 0.5, 0.9, 1.0)
                ]
                assert sizes[0] >= 1 and sizes[-1] == num_tokens and sizes == sorted(sizes)


@pytest.mark.parametrize("factor", [0.0, -1.0, 4.1, 512.0, float("nan"), float("inf")])
def test_a_factor_out_of_range_is_refused(factor):
    with pytest.raises(ValueError) as error:
        expert_capacity(100, 2, 8, factor)
    assert str(error.value) == (
        f"capacity_factor={factor} is not in (0, 4]: at num_experts/num_selected=4 nothing is "
        "dropped"
    )


def test_the_largest_factor_that_the_message_names_is_accepted():
    with pytest.raises(ValueError) as error:
        expert_capacity(100, 6, 64, 11.0)
    named = str(error.value).split("(0, ")[1].split("]")[0]
    assert expert_capacity(100, 6, 64, float(named)) == 100


@every_priority
@pytest.mark.parametrize("capacity", [1, 3, 6, 12, 500])
def test_drops_agree_with_a_loop(capacity, priority):
    for seed in range(3):
        mask = np.random.default_rng(seed).random(TOKENS) < 0.8
        routing = random_routing(seed, mask=mask)
        limited = limit(routing, capacity, priority=priority)
        wanted = reference.limit_capacity(choice_of(routing), capacity, priority)
        assert choice_of(limited) == wanted
        assert not np.any(np.asarray(limited.combine_weight)[~np.asarray(limited.keep)])
        kept = np.asarray(limited.keep)
        np.testing.assert_array_equal(limited.combine_weight[kept], routing.combine_weight[kept])
        assignments = sum(map(len, choice_of(routing)))
        dropped = 1 - sum(map(len, wanted)) / assignments
        assert jax.jit(routing_metrics)(limited).dropped == pytest.approx(dropped, abs=1e-6)


def test_drops_computed_by_hand():
    # Three tokens to expert 0 with weights 0.6, 0.9, 0.7 and capacity 2.
    logits = jnp.log(jnp.array([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]))
    routing = route(logits, 1)
    by_position, by_score = (limit(routing, 2, priority=priority) for priority in PRIORITIES)
    np.testing.assert_array_equal(by_position.keep, [[True], [True], [False]])
    np.testing.assert_array_equal(by_score.keep, [[False], [True], [True]])
    np.testing.assert_allclose(by_score.combine_weight, [[0.0], [0.9], [0.7]], rtol=1e-6)
    assert jax.jit(routing_metrics)(by_score).dropped == pytest.approx(1 / 3, rel=1e-6)


def test_equal_scores_keep_the_earlier_tokens_and_nan_comes_last():
    routing = route(jnp.zeros((5, 2)), 1)
    np.testing.assert_array_equal(limit(routing, 3, priority="score").keep[:, 0], [1, 1, 1, 0, 0])
    spoilt = routing.replace(combine_weight=routing.combine_weight.at[0].set(jnp.nan))
    limited = limit(spoilt, 4, priority="score")
    np.testing.assert_array_equal(limited.keep[:, 0], [0, 1, 1, 1, 1])
    assert np.all(np.isfinite(limited.combine_weight))


def test_position_never_lets_a_later_token_decide_on_an_earlier_one():
    routing = random_routing()
    limited = limit(routing, 3)
    for length in (1, 5, 9):
        start = jax.tree.map(lambda leaf, n=length: leaf[:n] if leaf.ndim else leaf, routing)
        np.testing.assert_array_equal(limit_capacity(start, 3).keep, limited.keep[:length])


@every_priority
def test_masked_tokens_use_no_capacity(priority):
    mask = np.arange(TOKENS) >= 6
    routing = random_routing(mask=mask)
    limited = limit(routing, 3, priority=priority)
    compact = jax.tree.map(lambda leaf: leaf[6:] if leaf.ndim else leaf, routing)
    np.testing.assert_array_equal(
        limited.keep[6:], limit_capacity(compact, 3, priority=priority).keep
    )
    assert not np.any(limited.keep[:6])


@every_priority
def test_a_dropped_assignment_gives_its_gate_no_gradient_and_the_kept_ones_theirs(priority):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)), jnp.float32)

    def total(logits):
        routing = top_k_routing(logits, 1)
        return jnp.sum(limit_capacity(routing, 2, priority=priority).combine_weight), routing

    (_, routing), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    kept = np.asarray(limit(routing, 2, priority=priority).keep)[:, 0]
    np.testing.assert_array_equal(np.any(gradient != 0.0, axis=1), kept)
    assert 0 < kept.sum() < TOKENS


def test_layout_has_one_row_per_kept_assignment_and_sentinels_elsewhere():
    capacity = 4
    limited = limit(random_routing(mask=np.arange(TOKENS) != 1), capacity)
    order = lay_out(limited, capacity)
    np.testing.assert_array_equal(order.group_sizes, [capacity] * EXPERTS)
    choice, rows = choice_of(limited), np.full(EXPERTS * capacity, TOKENS)
    for expert in range(EXPERTS):
        takers = [token for token in range(TOKENS) if expert in choice[token]]
        rows[expert * capacity : expert * capacity + len(takers)] = takers
    np.testing.assert_array_equal(order.token_of_row, rows)
    for token in range(TOKENS):
        for number in range(SELECTED):
            row = int(order.row_of_assignment[token, number])
            if limited.keep[token, number]:
                assert row // capacity == limited.expert_index[token, number]
                assert order.token_of_row[row] == token
            else:
                assert row == EXPERTS * capacity
    assert order.token_of_row.dtype == jnp.int32 and order.row_of_assignment.dtype == jnp.int32


def test_rows_beyond_the_sentinels_are_zeros_and_a_dropped_token_comes_back_as_zeros():
    tokens = jnp.asarray(np.random.default_rng(3).standard_normal((TOKENS, MODEL)), jnp.float32)
    limited = limit(random_routing(skew=6.0), 2)
    order = lay_out(limited, 2)
    rows = jax.jit(dispatch)(tokens, order)
    empty = np.asarray(order.token_of_row) == TOKENS
    assert empty.any() and not np.any(rows[empty])
    # Even NaN in an empty row must not come back.
    out = jax.jit(combine)(jnp.where(empty[:, None], jnp.nan, rows), limited.combine_weight, order)
    share = np.sum(limited.combine_weight, axis=1, keepdims=True)
    np.testing.assert_allclose(out, share * tokens, rtol=1e-6)
    gone = ~np.any(limited.keep, axis=1)
    assert gone.any() and not np.any(out[gone])


@pytest.mark.parametrize("capacity", [TOKENS, 3 * TOKENS])
def test_with_room_for_all_nothing_is_dropped_and_the_sum_is_that_of_the_sorted_layout(capacity):
    routing = random_routing(skew=6.0)
    limited = limit(routing, capacity)
    jax.tree.map(np.testing.assert_array_equal, limited, routing)
    tokens = jnp.asarray(np.random.default_rng(3).standard_normal((TOKENS, MODEL)), jnp.float32)

    def there_and_back(order, scale):
        # Each expert multiplies by its number, so a row in another's place would show.
        size = order.token_of_row.shape[0]
        expert = jnp.repeat(jnp.arange(EXPERTS), order.group_sizes, total_repeat_length=size)
        factor = (1.0 + expert.astype(jnp.float32))[:, None]
        return combine(dispatch(scale * tokens, order) * factor, routing.combine_weight, order)

    results = [
        jax.jit(jax.value_and_grad(lambda s, o=order: jnp.sum(jnp.sin(there_and_back(o, s)))))(1.0)
        for order in (order_by_capacity(limited, capacity), sort_by_expert(routing))
    ]
    np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.parametrize("function", [limit_capacity, order_by_capacity])
def test_a_capacity_below_1_is_refused(function):
    for capacity in (0, -3):
        with pytest.raises(ValueError) as error:
            function(random_routing(), capacity)
        assert str(error.value) == f"capacity={capacity} must be at least 1"


def test_an_unknown_priority_is_refused():
    with pytest.raises(ValueError) as error:
        limit_capacity(random_routing(), 3, priority="random")
    assert str(error.value) == "priority='random' is not one of ('position', 'score')"


@every_priority
def test_passes_through_vmap(priority):
    routings = [random_routing(seed) for seed in range(2)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)
    together = jax.vmap(functools.partial(limit_capacity, capacity=3, priority=priority))(stack)
    for number, routing in enumerate(routings):
        wanted = limit(routing, 3, priority=priority)
        np.testing.assert_array_equal(together.keep[number], wanted.keep)


def test_a_factor_in_place_of_a_capacity_is_refused():
    routing = random_routing()
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="capacity=1.25 is not an integer"):
            limit_capacity(routing, 1.25)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1, 2.0])
def test_the_capacity_of_a_mask_is_that_of_as_many_tokens(factor):
    for count in range(41):
        wanted = expert_capacity(count, 2, 4, factor)
        assert capacity_of_mask(jnp.arange(40) < count, 2, 4, factor) == wanted
