import math

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import Routing, RoutingMetrics, routing_metrics, top_k_routing
from moe_jax.core.routing import expert_counts

route = jax.jit(top_k_routing, static_argnums=1, static_argnames="renormalize")
log_softmax = jax.jit(jax.nn.log_softmax)
summarize = jax.jit(routing_metrics)


def logits_of(*probabilities):
    return jnp.log(jnp.array(probabilities, jnp.float32))


def random_logits(num_tokens=6, num_experts=4, seed=0):
    return 2.0 * jax.random.normal(jax.random.key(seed), (num_tokens, num_experts))


@jax.jit
def everything(gate_logits, mask):
    """A routing, its metrics, and the gradient of all that is differentiable in it."""

    def total(gate_logits):
        routing = top_k_routing(gate_logits, 2, mask=mask)
        first = jnp.sum(routing.combine_weight[:, 0])
        return first + routing.load_balance_loss + routing.router_z_loss, routing

    gradient, routing = jax.grad(total, has_aux=True)(gate_logits)
    return routing, routing_metrics(routing), gradient


def assert_finite(tree):
    for leaf in jax.tree.leaves(tree):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize(
    ("num_selected", "renormalize", "weights"),
    [
        (1, True, [0.5]),
        (1, False, [0.5]),
        (2, True, [0.625, 0.375]),
        (2, False, [0.5, 0.3]),
        (3, True, [0.5, 0.3, 0.2]),
        (3, False, [0.5, 0.3, 0.2]),
    ],
)
def test_weights_computed_by_hand(num_selected, renormalize, weights):
    routing = route(logits_of([0.3, 0.5, 0.2]), num_selected, renormalize=renormalize)
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
    assert_finite(routing)


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
    routing = route(jnp.array([gate_logits], dtype), 2)
    np.testing.assert_array_equal(routing.expert_index, [chosen])


def test_experts_whose_probability_underflows_are_still_told_apart():
    routing = route(jnp.array([[200.0, 0.0, 1.0, 2.0]]), 3)
    np.testing.assert_array_equal(routing.expert_index, [[0, 3, 2]])
    np.testing.assert_array_equal(routing.combine_weight, [[1.0, 0.0, 0.0]])


def test_one_selected_expert_gives_the_gate_a_gradient_by_default():
    def weight(gate_logits):
        return jnp.sum(top_k_routing(gate_logits, 1).combine_weight)

    # d p_0 / d l = p_0 (1 - p_0), -p_0 p_1, -p_0 p_2.
    gradient = jax.jit(jax.grad(weight))(logits_of([0.5, 0.3, 0.2]))
    np.testing.assert_allclose(gradient, [[0.25, -0.15, -0.1]], rtol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient_of_the_weights_is_that_of_the_softmax_over_the_chosen(renormalize):
    gate_logits, cotangent = random_logits(), random_logits(num_experts=2, seed=1)

    def weights(gate_logits):
        return top_k_routing(gate_logits, 2, renormalize=renormalize).combine_weight

    def plain(gate_logits):
        index = jnp.argsort(-gate_logits, axis=-1)[:, :2]
        if renormalize:
            return jax.nn.softmax(jnp.take_along_axis(gate_logits, index, axis=-1), axis=-1)
        return jnp.take_along_axis(jax.nn.softmax(gate_logits, axis=-1), index, axis=-1)

    actual, expected = (
        jax.jit(lambda logits, f=function: jax.vjp(f, logits)[1](cotangent)[0])(gate_logits)
        for function in (weights, plain)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_an_expert_closed_by_minus_infinity_is_not_chosen_and_spoils_nothing():
    gate_logits = random_logits().at[:, 1].set(-jnp.inf)
    routing, metrics, gradient = everything(gate_logits, jnp.ones(6, bool))
    assert not np.any(routing.expert_index == 1) and metrics.load[1] == 0.0
    assert_finite((routing.combine_weight, metrics, gradient, routing.router_z_loss))
    open_metrics = everything(jnp.delete(gate_logits, 1, axis=1), jnp.ones(6, bool))[1]
    assert metrics.entropy == pytest.approx(float(open_metrics.entropy), rel=1e-6)


@pytest.mark.parametrize("padding", [0.0, 1e30, jnp.nan, jnp.inf])
def test_masked_tokens_get_no_expert_and_change_nothing_else(padding):
    mask = jnp.array([True, False, True, True, False, True])
    gate_logits = random_logits()
    padded = jnp.where(mask[:, None], gate_logits, padding)
    routing, metrics, gradient = everything(padded, mask)
    expected = everything(gate_logits, mask)
    jax.tree.map(np.testing.assert_array_equal, (routing, metrics, gradient), expected)
    assert not np.any(routing.keep[~mask]) and not np.any(routing.combine_weight[~mask])
    assert not np.any(gradient[~mask]) and np.all(np.any(gradient[mask] != 0.0, axis=1))
    alone, alone_metrics, alone_gradient = everything(gate_logits[mask], jnp.ones(4, bool))
    # Another shape is compiled to other vector code: equal up to rounding.
    np.testing.assert_array_equal(routing.expert_index[mask], alone.expert_index)
    for actual, wanted in (
        (routing.combine_weight[mask], alone.combine_weight),
        (metrics, alone_metrics),
        (routing.load_balance_loss, alone.load_balance_loss),
        (routing.router_z_loss, alone.router_z_loss),
        (gradient[mask], alone_gradient),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), actual, wanted
        )


def test_nan_in_one_token_leaves_the_others_as_they_were_and_its_experts_in_range():
    gate_logits = random_logits()
    clean, dirty = route(gate_logits, 2), route(gate_logits.at[2, 1].set(jnp.nan), 2)
    for field in ("expert_index", "combine_weight"):
        np.testing.assert_array_equal(
            np.delete(dirty[field], 2, axis=0), np.delete(clean[field], 2, axis=0)
        )
    assert len(set(dirty.expert_index[2].tolist()) & set(range(4))) == 2


def test_permuting_tokens_permutes_the_routing():
    gate_logits, order = random_logits(), jnp.array([3, 0, 5, 1, 4, 2])
    routing, permuted = route(gate_logits, 2), route(gate_logits[order], 2)
    np.testing.assert_array_equal(permuted.expert_index, routing.expert_index[order])
    np.testing.assert_array_equal(permuted.combine_weight, routing.combine_weight[order])


def test_scores_are_float32_whatever_the_type_of_the_logits():
    rounded = random_logits().astype(jnp.bfloat16)
    routing = route(rounded, 2)
    jax.tree.map(np.testing.assert_array_equal, routing, route(rounded.astype(jnp.float32), 2))
    assert {name: leaf.dtype for name, leaf in routing.items() if leaf is not None} == {
        "expert_index": jnp.int32,
        "combine_weight": jnp.float32,
        "gate_logits": jnp.float32,
        "keep": jnp.bool_,
        "mask": jnp.bool_,
        "load_balance_loss": jnp.float32,
        "router_z_loss": jnp.float32,
    }


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (1, 1), (1, 4), (5, 1)])
def test_few_tokens_and_few_experts_are_routed(num_tokens, num_experts):
    routing = route(jnp.ones((num_tokens, num_experts)), num_experts)
    metrics = summarize(routing)
    assert routing.expert_index.shape == (num_tokens, num_experts)
    np.testing.assert_allclose(routing.combine_weight, 1.0 / num_experts, rtol=1e-6)
    assert_finite((routing, metrics))
    assert metrics.dropped == 0.0 and metrics.balance == float(num_tokens > 0)


def test_passes_through_vmap_scan_eval_shape_and_tree_functions():
    layers = jnp.stack([random_logits(seed=seed) for seed in range(3)])
    mask = jnp.array([True, False, True, True, False, True])

    def layer(gate_logits):
        return top_k_routing(gate_logits, 2, mask=mask)

    @jax.jit
    def transformed(layers):
        batched = jax.vmap(layer)(layers)
        _, scanned = jax.lax.scan(lambda carry, logits: (carry, layer(logits)), 0, layers)
        nested = jax.vmap(jax.vmap(layer))(layers[None])
        return batched, scanned, nested, jax.vmap(routing_metrics)(scanned)

    batched, scanned, nested, metrics = transformed(layers)
    for number in range(3):
        one = route(layers[number], 2, mask=mask)
        for stacked in (batched, scanned):
            jax.tree.map(
                lambda leaf, wanted, i=number: np.testing.assert_allclose(leaf[i], wanted, 1e-6),
                stacked,
                one,
            )
        jax.tree.map(
            lambda leaf, wanted, i=number: np.testing.assert_allclose(leaf[i], wanted, 1e-6),
            metrics,
            summarize(one),
        )
    assert nested.expert_index.shape == (1, 3, 6, 2) and isinstance(nested, Routing)
    shapes = jax.eval_shape(transformed, layers)
    assert jax.tree.map(jnp.shape, (batched, scanned, nested, metrics)) == jax.tree.map(
        lambda leaf: leaf.shape, shapes
    )
    host = jax.device_get(scanned)
    assert isinstance(host, Routing) and isinstance(host.keep, np.ndarray)
    leaves, structure = jax.tree.flatten(host)
    assert len(leaves) == 7 and isinstance(jax.tree.unflatten(structure, [None] * 7), Routing)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(host)]
    assert any("load_balance_loss" in path for path in paths)


def test_metrics_computed_by_hand():
    # Tokens choose (0, 1), (0, 2), (0, 1); token 2's second choice is dropped, token 3 is masked.
    # Kept: 3, 1, 1 of 5. Largest load 3/5 over mean load 1/3: 9/5. Dropped: 1 of 6.
    gate_logits = logits_of([0.5, 0.3, 0.2], [0.8, 0.05, 0.15], [0.4, 0.35, 0.25], [0.1, 0.1, 0.8])
    routing = route(gate_logits, 2, mask=jnp.array([True, True, True, False]))
    routing = routing.replace(keep=routing.keep.at[2, 1].set(False))
    metrics = summarize(routing)
    np.testing.assert_allclose(metrics.load, [0.6, 0.2, 0.2], rtol=1e-6)
    assert metrics.balance == pytest.approx(9 / 5, rel=1e-6)
    assert metrics.dropped == pytest.approx(1 / 6, rel=1e-6)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2, 0.8, 0.05, 0.15, 0.4, 0.35, 0.25)) / 3
    assert metrics.entropy == pytest.approx(entropy, rel=1e-6)


@pytest.mark.parametrize("num_selected", [1, 2, 4])
def test_balance_is_1_at_perfect_balance_and_experts_over_k_at_collapse(num_selected):
    balanced = jnp.stack([jnp.roll(jnp.arange(4.0), shift) for shift in range(4)] * 2)
    assert summarize(route(balanced, num_selected)).balance == 1.0
    collapsed = summarize(route(jnp.zeros((8, 4)), num_selected))
    assert collapsed.balance == 4.0 / num_selected
    assert collapsed.entropy == pytest.approx(math.log(4.0), rel=1e-6)


def test_entropy_of_a_certain_gate_is_0():
    assert summarize(route(jnp.array([[1e4, 0.0, 0.0]]), 1)).entropy == 0.0


def test_metrics_of_a_layer_where_no_token_counts_are_0():
    metrics = everything(random_logits(), jnp.zeros(6, bool))[1]
    expected = RoutingMetrics(
        load=jnp.zeros(4), balance=jnp.zeros(()), entropy=jnp.zeros(()), dropped=jnp.zeros(())
    )
    jax.tree.map(np.testing.assert_array_equal, metrics, expected)


def test_counts_neither_saturate_nor_wrap():
    # bfloat16 stops counting at 256, int8 wraps at 128, and an index of -1 at the end.
    index = jnp.zeros((1000, 1), jnp.int32).at[0].set(-1).at[1].set(2)
    keep = jnp.ones((1000, 1), bool).at[:2].set(False)
    np.testing.assert_array_equal(expert_counts(index, keep, 2), [998, 0])


@pytest.mark.parametrize(
    ("num_selected", "message"),
    [
        (0, "num_selected=0 must be at least 1"),
        (-1, "num_selected=-1 must be at least 1"),
        (5, "num_selected=5 exceeds num_experts=4"),
    ],
)
def test_a_number_of_experts_out_of_range_is_refused(num_selected, message):
    with pytest.raises(ValueError) as error:
        top_k_routing(random_logits(), num_selected)
    assert str(error.value) == message
