"""What all routers have in common, and the record and metrics that they fill."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import (
    Routing,
    RoutingMetrics,
    dense_routing,
    expert_choice_routing,
    hash_routing,
    noisy_top_k_routing,
    routing_metrics,
    sigmoid_routing,
    sinkhorn_routing,
    soft_routing,
    top_k_routing,
)
from moe_jax.core.routing import check_num_selected, expert_counts
from tests.core import reference

TOKENS, EXPERTS, SELECTED, CAPACITY, ITERATIONS = 8, 6, 2, 3, 8
BIAS = np.array([0.02, -0.03, 0.05, 0.02, -0.06, 0.0], np.float32)
GROUPS = {"num_groups": 3, "num_selected_groups": 2}
# What the objective below weighs an expert's answer to a token with.
COTANGENT = np.random.default_rng(7).standard_normal((TOKENS, EXPERTS))
BALANCE, Z = 0.3, 0.2


def token_ids(gate_logits):
    return jnp.arange(gate_logits.shape[0], dtype=jnp.int32)


def small(gate_logits):
    return min(SELECTED, gate_logits.shape[-1])


def bias_of(gate_logits):
    return jnp.asarray(BIAS[: gate_logits.shape[-1]])


def groups_of(gate_logits):
    return GROUPS if gate_logits.shape[-1] == EXPERTS else {}


# name -> route(gate_logits, mask=, expert_mask=, axis_names=)
ROUTES = {
    "top_k": lambda x, **masks: top_k_routing(x, small(x), **masks),
    "top_1": lambda x, **masks: top_k_routing(x, 1, **masks),
    "top_k_raw": lambda x, **masks: top_k_routing(x, small(x), renormalize=False, **masks),
    "top_k_after": lambda x, **masks: top_k_routing(x, small(x), softmax="after", **masks),
    "noisy": lambda x, **masks: noisy_top_k_routing(jax.random.key(3), x, 0.5, small(x), **masks),
    "sigmoid": lambda x, **masks: sigmoid_routing(x, small(x), balance_bias=bias_of(x), **masks),
    "sigmoid_groups": lambda x, **masks: sigmoid_routing(
        x, small(x), balance_bias=bias_of(x), scale=2.5, **groups_of(x), **masks
    ),
    "expert_choice": lambda x, **masks: expert_choice_routing(x, CAPACITY, **masks),
    "sinkhorn": lambda x, **masks: sinkhorn_routing(
        x, small(x), num_iterations=ITERATIONS, **masks
    ),
    "hash": lambda x, **masks: hash_routing(token_ids(x), x.shape[-1], small(x), **masks),
    "dense": dense_routing,
    "soft": lambda x, **masks: soft_routing(x, x.shape[-1], **masks)[0],
}
REFERENCES = {
    "top_k": functools.partial(reference.top_k, num_selected=SELECTED),
    "top_1": functools.partial(reference.top_k, num_selected=1),
    "top_k_raw": functools.partial(reference.top_k, num_selected=SELECTED, renormalize=False),
    "top_k_after": functools.partial(reference.top_k, num_selected=SELECTED, softmax_after=True),
    "sigmoid": functools.partial(reference.sigmoid, num_selected=SELECTED, bias=BIAS),
    "sigmoid_groups": functools.partial(
        reference.sigmoid, num_selected=SELECTED, bias=BIAS, scale=2.5, **GROUPS
    ),
    "expert_choice": functools.partial(reference.expert_choice, capacity=CAPACITY),
    "sinkhorn": functools.partial(
        reference.sinkhorn, num_selected=SELECTED, num_iterations=ITERATIONS
    ),
    "dense": reference.dense,
    "soft": reference.dense,  # with one slot an expert
}
EACH_EXPERT = ("expert_choice", "dense", "soft")
# A token's choice depends on the others.
JOINT = ("expert_choice", "sinkhorn", "soft")

every_router = pytest.mark.parametrize("name", ROUTES)
route = jax.jit(top_k_routing, static_argnums=1, static_argnames="renormalize")
summarize = jax.jit(routing_metrics)


@functools.partial(jax.jit, static_argnums=0)
def everything(name, gate_logits, mask=None, expert_mask=None):
    """A routing, its metrics, and the gradient of all that is differentiable in it."""
    if mask is None:
        mask = jnp.ones(gate_logits.shape[0], bool)
    if expert_mask is None:
        expert_mask = jnp.ones(gate_logits.shape[1], bool)

    def total(gate_logits):
        routing = ROUTES[name](gate_logits, mask=mask, expert_mask=expert_mask)
        cotangent = jnp.asarray(COTANGENT[: gate_logits.shape[0]], jnp.float32)
        cotangent = jnp.take_along_axis(cotangent, routing.expert_index, axis=1)
        losses = BALANCE * routing.load_balance_loss + Z * routing.router_z_loss
        return jnp.sum(cotangent * routing.combine_weight) + losses, routing

    gradient, routing = jax.grad(total, has_aux=True)(gate_logits)
    return routing, routing_metrics(routing), gradient


def run(name, gate_logits, mask=None, expert_mask=None):
    """`everything`, with the same compiled function whether masks are given or not."""
    tokens, experts = gate_logits.shape
    mask = np.ones(tokens, bool) if mask is None else np.asarray(mask)
    expert_mask = np.ones(experts, bool) if expert_mask is None else np.asarray(expert_mask)
    return everything(name, jnp.asarray(gate_logits), jnp.asarray(mask), jnp.asarray(expert_mask))


def expected(name, gate_logits, mask, expert_mask):
    """Choice, balance loss and z-loss of the reference."""
    choice = REFERENCES[name](gate_logits, mask=mask, is_open=expert_mask)
    selected = choice
    if name in EACH_EXPERT:
        selected = [range(EXPERTS)] * TOKENS
    probability = np.array([reference.softmax(row, expert_mask) for row in gate_logits])
    if name.startswith("sigmoid"):
        score = np.where(expert_mask, 1 / (1 + np.exp(-gate_logits)), 0)
        probability = score / score.sum(axis=1, keepdims=True)
    balance = reference.load_balance(probability, selected, mask, expert_mask)
    return choice, balance, reference.router_z(gate_logits, mask, expert_mask)


def random_logits(num_tokens=TOKENS, num_experts=EXPERTS, seed=0):
    logits = 2.0 * np.random.default_rng(seed).standard_normal((num_tokens, num_experts))
    return logits.astype(np.float32)


def logits_of(*probabilities):
    return jnp.log(jnp.array(probabilities, jnp.float32))


def assert_finite(tree):
    for leaf in jax.tree.leaves(tree):
        assert np.all(np.isfinite(leaf))


def assert_distinct_and_in_range(expert_index, num_experts=EXPERTS):
    for row in np.asarray(expert_index):
        assert len(set(row.tolist()) & set(range(num_experts))) == len(row)


def cases(count=8):
    """Masks of tokens and of experts: all, half on either side, at random, none."""
    generator = np.random.default_rng(1)
    token_masks = [np.ones(TOKENS, bool), np.arange(TOKENS) < 4, np.arange(TOKENS) >= 4]
    expert_masks = [np.ones(EXPERTS, bool), np.arange(EXPERTS) != 2, np.arange(EXPERTS) >= 2]
    for seed in range(count):
        if seed < 3:
            yield seed, token_masks[seed], expert_masks[seed]
        else:
            opened = generator.permutation(EXPERTS) < generator.integers(SELECTED, EXPERTS + 1)
            yield seed, generator.random(TOKENS) < 0.7, opened
    yield 0, np.zeros(TOKENS, bool), np.ones(EXPERTS, bool)


@pytest.mark.parametrize("name", REFERENCES)
def test_choice_weights_losses_and_gradient_agree_with_a_loop(name):
    for seed, mask, expert_mask in cases():
        logits = random_logits(seed=seed)
        routing, _, gradient = run(name, logits, mask, expert_mask)

        def objective(logits, mask=mask, expert_mask=expert_mask):
            choice, balance, z = expected(name, logits, mask, expert_mask)
            weighted = sum(
                COTANGENT[token, expert] * weight
                for token, weights in enumerate(choice)
                for expert, weight in weights.items()
            )
            return weighted + BALANCE * balance + Z * z

        logits = logits.astype(np.float64)
        choice, balance, z = expected(name, logits, mask, expert_mask)
        actual = reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)
        reference.assert_same_choice(actual, choice)
        if name not in EACH_EXPERT:
            best_first = [list(weights) for weights in choice]
            assert [list(weights) for weights in actual] == best_first
        if name != "sigmoid_groups" or expert_mask.all():
            assert routing.load_balance_loss == pytest.approx(balance, rel=1e-5)
            (wanted,) = reference.gradients(objective, logits)
            reference.assert_close(gradient, wanted, 1e-5)
        assert routing.router_z_loss == pytest.approx(z, rel=1e-5)


@every_router
@pytest.mark.parametrize(
    "mask",
    [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4, [True, False] * 4],
    ids=["right", "left", "between"],
)
def test_padding_gets_nothing_and_changes_nothing_else_bit_for_bit(name, mask):
    mask, logits = np.array(mask), random_logits()
    clean = run(name, logits, mask)
    routing, _, gradient = clean
    assert not np.any(routing.keep[~mask]) and not np.any(routing.combine_weight[~mask])
    assert not np.any(gradient[~mask])
    for padding in (0.0, 1e30, np.nan, np.inf, -np.inf):
        dirty = run(name, np.where(mask[:, None], logits, np.float32(padding)), mask)
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@every_router
def test_a_token_that_is_not_finite_leaves_the_others_as_if_it_were_masked(name):
    logits = random_logits()
    without = run(name, logits, np.arange(TOKENS) != 2)
    for bad in (np.nan, np.inf):
        dirty_logits = logits.copy()
        dirty_logits[2, 1] = bad
        routing, _, gradient = run(name, dirty_logits)
        for field in ("combine_weight", "keep", "expert_index"):
            got, wanted = (np.delete(record[field], 2, 0) for record in (routing, without[0]))
            np.testing.assert_array_equal(got, wanted)
        assert np.all(np.isfinite(np.delete(gradient, 2, 0)))
        assert_distinct_and_in_range(routing.expert_index)


@every_router
@pytest.mark.parametrize("num_open", [5, 1, 0])
def test_closed_experts_get_no_token_and_everything_stays_finite(name, num_open):
    expert_mask = np.isin(np.arange(EXPERTS), [4, 1, 5, 0, 3][:num_open])
    routing, metrics, gradient = run(name, random_logits(), None, expert_mask)
    taken = np.asarray(routing.expert_index)[np.asarray(routing.keep)]
    assert expert_mask[taken].all() and np.any(routing.keep) == (num_open > 0)
    assert np.all(metrics.load[~expert_mask] == 0.0)
    assert not np.any(np.asarray(routing.combine_weight)[~np.asarray(routing.keep)])
    assert_finite((routing.combine_weight, metrics, gradient))
    assert_finite((routing.load_balance_loss, routing.router_z_loss))
    if num_open:
        assert np.all(np.isneginf(routing.gate_logits[:, ~expert_mask]))
    if num_open == 1 and name in ("top_k", "top_k_after", "noisy", "hash", "dense", "soft"):
        np.testing.assert_allclose(np.sum(routing.combine_weight, axis=1), 1.0, rtol=1e-6)
        assert metrics.entropy == 0.0
    if num_open < 2:
        # All the probability and all the load of the open experts is in one place.
        assert routing.load_balance_loss == pytest.approx(num_open, rel=1e-6)


@pytest.mark.parametrize("name", REFERENCES)
def test_equal_scores_go_to_the_lower_index(name):
    alternating = np.tile(np.array([-0.0, 0.0], np.float32), (TOKENS, EXPERTS // 2))
    flat = np.full((TOKENS, EXPERTS), -3.0, np.float32)
    for logits in (flat, alternating, -alternating):
        routing = run(name, logits)[0]
        choice = REFERENCES[name](logits.astype(np.float64))
        if name in EACH_EXPERT:
            actual = reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)
            reference.assert_same_choice(actual, choice)
        else:
            assert routing.expert_index.tolist() == [list(weights) for weights in choice]


@every_router
def test_huge_logits_give_finite_weights_and_distinct_experts(name):
    logits = np.array([[1e30, 0, -1e30, -1e30, 0, 0], [-1e30] * 6, [1e30] * 6, [3e38, -3e38] * 3])
    logits = np.concatenate([logits, random_logits(4)]).astype(np.float32)
    routing, metrics, _ = run(name, logits)
    assert_finite((routing.combine_weight, metrics, routing.load_balance_loss))
    assert_distinct_and_in_range(routing.expert_index)
    if name in ("top_k", "top_k_raw", "top_1", "top_k_after", "dense"):
        np.testing.assert_array_equal(routing.combine_weight[0, 0], 1.0)


@every_router
def test_everything_is_float32_whatever_the_type_of_the_logits(name):
    rounded = jnp.asarray(random_logits(), jnp.bfloat16)
    routing = jax.jit(ROUTES[name])(rounded)
    exact = run(name, rounded.astype(jnp.float32))[0]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, routing, exact)
    assert {key: leaf.dtype.name for key, leaf in routing.items() if leaf is not None} == {
        "expert_index": "int32",
        "combine_weight": "float32",
        "gate_logits": "float32",
        "keep": "bool",
        "mask": "bool",
        "load_balance_loss": "float32",
        "router_z_loss": "float32",
    }


@every_router
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (1, 1), (2, 4)])
def test_few_tokens_and_few_experts_are_routed(name, num_tokens, num_experts):
    routing, metrics, gradient = everything(name, jnp.ones((num_tokens, num_experts)))
    assert routing.expert_index.shape[0] == num_tokens
    assert_finite((routing.combine_weight, routing.load_balance_loss, metrics, gradient))
    assert metrics.dropped == 0.0 and metrics.load.shape == (num_experts,)
    if num_tokens and name not in ("top_k_raw", "sigmoid_groups", "top_1", "expert_choice"):
        unit = 1.0 / (1.0 + math.exp(-1.0)) if name == "sigmoid" and num_experts == 1 else 1.0
        np.testing.assert_allclose(np.sum(routing.combine_weight, axis=1), unit, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in ROUTES if name not in ("hash", "noisy")])
def test_permuting_tokens_permutes_the_routing(name):
    logits, order = random_logits(), np.array([3, 0, 5, 1, 7, 4, 2, 6])
    routing, permuted = run(name, logits)[0], run(name, logits[order])[0]
    np.testing.assert_array_equal(permuted.expert_index, routing.expert_index[order])
    np.testing.assert_array_equal(permuted.keep, routing.keep[order])
    np.testing.assert_allclose(permuted.combine_weight, routing.combine_weight[order], rtol=1e-5)


@pytest.mark.parametrize("name", ["top_k", "sigmoid_groups", "dense"])
def test_losses_of_shards_with_axis_names_are_those_of_the_batch_and_so_is_the_gradient(name):
    logits = jnp.asarray(random_logits())
    mask = jnp.array([True, True, False, True, True, True, False, False])

    def loss(gate_logits, mask, **options):
        routing = ROUTES[name](gate_logits, mask=mask, **options)
        return BALANCE * routing.load_balance_loss + Z * routing.router_z_loss

    def sharded(logits):
        shard = functools.partial(loss, axis_names=("data",))
        halves = logits.reshape(2, 4, EXPERTS), mask.reshape(2, 4)
        losses = jax.vmap(shard, axis_name="data")(*halves)
        return losses[0], losses

    gradient, losses = jax.jit(jax.grad(sharded, has_aux=True))(logits)
    value, wanted = jax.jit(jax.value_and_grad(loss))(logits, mask)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(losses, np.full(2, value), rtol=1e-6)


@pytest.mark.parametrize("name", ["top_k", "expert_choice"])
def test_passes_through_vmap_scan_eval_shape_and_tree_functions(name):
    layers = jnp.stack([jnp.asarray(random_logits(seed=seed)) for seed in range(3)])
    mask = jnp.arange(TOKENS) != 1

    def layer(gate_logits):
        return ROUTES[name](gate_logits, mask=mask)

    @jax.jit
    def transformed(layers):
        batched = jax.vmap(layer)(layers)
        _, scanned = jax.lax.scan(lambda carry, logits: (carry, layer(logits)), 0, layers)
        nested = jax.vmap(jax.vmap(layer))(layers[None])
        return batched, scanned, nested, routing_metrics(scanned), routing_metrics(nested)

    batched, scanned, nested, metrics, nested_metrics = transformed(layers)
    for number in range(3):
        one, one_metrics, _ = run(name, layers[number], mask)

        def compare(leaf, wanted, number=number):
            np.testing.assert_allclose(leaf[number], wanted, rtol=1e-5, atol=1e-6)

        jax.tree.map(compare, batched, one)
        jax.tree.map(compare, scanned, one)
        jax.tree.map(compare, metrics, one_metrics)
        first = jax.tree.map(lambda leaf: leaf[0], nested_metrics)
        jax.tree.map(compare, first, one_metrics)
    assert nested.keep.shape[:3] == (1, 3, TOKENS) and isinstance(nested, Routing)
    shapes = jax.eval_shape(transformed, layers)
    assert jax.tree.map(jnp.shape, (batched, nested_metrics)) == jax.tree.map(
        lambda leaf: leaf.shape, (shapes[0], shapes[4])
    )
    host = jax.device_get(scanned)
    assert isinstance(host, Routing) and isinstance(host.keep, np.ndarray)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(host)]
    assert len(paths) == 7 and any("load_balance_loss" in path for path in paths)


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


def test_metrics_of_shards_with_axis_names_are_those_of_the_batch():
    logits, mask = jnp.asarray(random_logits()), jnp.arange(TOKENS) < 5
    routing = route(logits, SELECTED, mask=mask)
    routing = routing.replace(keep=routing.keep.at[1, 0].set(False))

    def split(leaf):
        return leaf.reshape(2, 4, *leaf.shape[1:]) if leaf.ndim else jnp.broadcast_to(leaf, 2)

    sharded = functools.partial(routing_metrics, axis_names=("data",))
    metrics = jax.jit(jax.vmap(sharded, axis_name="data"))(jax.tree.map(split, routing))
    jax.tree.map(
        lambda leaf, wanted: np.testing.assert_allclose(
            leaf, np.broadcast_to(wanted, leaf.shape), rtol=1e-6
        ),
        metrics,
        summarize(routing),
    )


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
    metrics = run("top_k", random_logits(), np.zeros(TOKENS, bool))[1]
    wanted = RoutingMetrics(
        counts=jnp.zeros(EXPERTS, jnp.int32),
        load=jnp.zeros(EXPERTS),
        balance=jnp.zeros(()),
        entropy=jnp.zeros(()),
        dropped=jnp.zeros(()),
    )
    jax.tree.map(np.testing.assert_array_equal, metrics, wanted)


@pytest.mark.parametrize("num_tokens", [3, 24, 50, 100, 384])
def test_nothing_dropped_is_0_exactly(num_tokens):
    metrics = summarize(route(random_logits(num_tokens), 2))
    assert metrics.dropped == 0.0 and np.sum(metrics.counts) == 2 * num_tokens


def test_counts_neither_saturate_nor_wrap():
    # bfloat16 stops counting at 256, int8 wraps at 128, and an index of -1 at the end.
    index = jnp.zeros((1000, 1), jnp.int32).at[0].set(-1).at[1].set(2)
    keep = jnp.ones((1000, 1), bool).at[:2].set(False)
    np.testing.assert_array_equal(expert_counts(index, keep, 2), [998, 0])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 4), "num_selected=0 must be at least 1"),
        ((-1, 4), "num_selected=-1 must be at least 1"),
        ((5, 4), "num_selected=5 exceeds num_experts=4"),
        ((1, 0), "num_experts=0 must be at least 1"),
    ],
)
def test_a_number_of_experts_out_of_range_is_refused(numbers, message):
    with pytest.raises(ValueError) as error:
        check_num_selected(*numbers)
    assert str(error.value) == message


@every_router
def test_masks_that_do_not_fit_are_refused(name):
    logits = jnp.asarray(random_logits(4, 3))
    config = pytest.importorskip("jaxtyping").config
    # Outside the tests nothing checks annotations.
    config.update("jaxtyping_disable", True)
    try:
        for masks, message in (
            ({"mask": jnp.ones(3, bool)}, "mask (3,) does not fit: expected (4,)"),
            ({"mask": jnp.ones((4, 1), bool)}, "mask (4, 1) does not fit: expected (4,)"),
            ({"mask": jnp.ones(4)}, "mask has type float32; expected bool"),
            ({"expert_mask": jnp.ones(4, bool)}, "expert_mask (4,) does not fit: expected (3,)"),
            ({"expert_mask": jnp.ones(3, int)}, "expert_mask has type int32; expected bool"),
        ):
            with pytest.raises(ValueError) as error:
                jax.eval_shape(lambda x, masks=masks: ROUTES[name](x, **masks), logits)
            assert str(error.value) == message
    finally:
        config.update("jaxtyping_disable", False)
