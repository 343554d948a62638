"""Routers as Flax modules: each is its pure function on its gate's scores."""

import functools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import (
    GATES,
    ROUTERS,
    dense_routing,
    expert_choice_routing,
    hash_routing,
    sigmoid_routing,
    sinkhorn_routing,
    soft_routing,
    top_k_routing,
)
from moe_jax.core.routers import check_options

TOKENS, MODEL, EXPERTS, SELECTED = 10, 6, 4, 2
MASK = jnp.arange(TOKENS) != 3
EXPERT_MASK = jnp.arange(EXPERTS) != 1
IDS = jnp.arange(TOKENS, dtype=jnp.int32) + 7
BIAS = jnp.array([0.3, -0.1, 0.0, -0.2])


def random_tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((TOKENS, MODEL)), jnp.float32)


def make(name, **options):
    num_selected = EXPERTS if name == "dense" else SELECTED
    return ROUTERS[name](num_experts=EXPERTS, num_selected=num_selected, **options)


def call(router, variables, tokens, mask=MASK, expert_mask=EXPERT_MASK, rngs=None, **options):
    """Applies a router with everything given, whichever kind it is."""
    if type(router) is ROUTERS["soft"]:
        return router.apply(
            variables, tokens[None], mask[None], expert_mask=expert_mask, rngs=rngs, **options
        )
    return router.apply(
        variables, tokens, mask, token_ids=IDS, expert_mask=expert_mask, rngs=rngs, **options
    )


def variables_of(router, tokens):
    keys = {"params": jax.random.key(0), "router": jax.random.key(1)}
    if type(router) is ROUTERS["soft"]:
        return router.init(keys, tokens[None], MASK[None])
    return router.init(keys, tokens, MASK, token_ids=IDS)


ROUTE = {
    "top_k": functools.partial(top_k_routing, num_selected=SELECTED, renormalize=False),
    "noisy_top_k": functools.partial(top_k_routing, num_selected=SELECTED),
    "sigmoid": functools.partial(
        sigmoid_routing,
        num_selected=SELECTED,
        balance_bias=BIAS,
        num_groups=2,
        num_selected_groups=1,
        scale=2.0,
    ),
    "expert_choice": functools.partial(expert_choice_routing, capacity=7),  # ceil(1.5 * 9 * 2 / 4)
    "sinkhorn": functools.partial(top_k_routing, num_selected=SELECTED),
    "dense": dense_routing,
}
OPTIONS = {
    "top_k": {"renormalize": False},
    "sigmoid": {"num_groups": 2, "num_selected_groups": 1, "scale": 2.0},
    "expert_choice": {"capacity_factor": 1.5},
}


@pytest.mark.parametrize("name", ROUTE)
def test_router_is_its_function_on_the_scores_of_its_gate(name):
    tokens = random_tokens()
    router = make(name, **OPTIONS.get(name, {}))
    variables = variables_of(router, tokens)
    if name == "sigmoid":
        variables = {**variables, "router_state": {"balance_bias": BIAS}}
    routing = jax.jit(functools.partial(call, router))(variables, tokens)
    scores = tokens @ variables["params"]["gate"]["kernel"]
    wanted = jax.jit(ROUTE[name])(scores, mask=MASK, expert_mask=EXPERT_MASK)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, routing, wanted)


def test_hash_router_hashes_the_ids_and_has_no_variables():
    router = make("hash", seed=5)
    variables = variables_of(router, random_tokens())
    assert jax.tree.leaves(variables) == []
    routing = call(router, variables, random_tokens())
    wanted = hash_routing(IDS, EXPERTS, SELECTED, seed=5, mask=MASK, expert_mask=EXPERT_MASK)
    jax.tree.map(np.testing.assert_array_equal, routing, wanted)


def test_soft_router_routes_each_sequence_by_itself():
    router = make("soft", slots_per_expert=3, gate="linear", gate_options={})
    sequences = jnp.stack([random_tokens(seed) for seed in range(2)])
    masks = jnp.stack([MASK, jnp.arange(TOKENS) < 5])
    variables = router.init(jax.random.key(0), sequences, masks)
    routing, weights = router.apply(variables, sequences, masks, expert_mask=EXPERT_MASK)
    kernel = variables["params"]["gate"]["kernel"]
    assert kernel.shape == (MODEL, 3 * EXPERTS)
    for number in range(2):
        wanted = soft_routing(
            sequences[number] @ kernel, EXPERTS, mask=masks[number], expert_mask=EXPERT_MASK
        )
        jax.tree.map(
            lambda leaf, other, i=number: np.testing.assert_allclose(
                leaf[i], other, rtol=1e-4, atol=1e-5
            ),
            (routing, weights),
            wanted,
        )


@pytest.mark.parametrize("name", ["noisy_top_k", "sinkhorn"])
def test_training_differs_from_inference_where_the_router_says_so(name):
    tokens, router = random_tokens(), make(name)
    variables = variables_of(router, tokens)
    train = jax.jit(functools.partial(call, router, deterministic=False))
    routing = train(variables, tokens, rngs={"router": jax.random.key(1)})
    still = call(router, variables, tokens)
    assert np.any(routing.combine_weight != still.combine_weight)
    if name == "sinkhorn":
        scores = tokens @ variables["params"]["gate"]["kernel"]
        masks = {"mask": MASK, "expert_mask": EXPERT_MASK}
        wanted = sinkhorn_routing(scores, SELECTED, **masks)
        np.testing.assert_array_equal(routing.expert_index, wanted.expert_index)
    else:
        again = train(variables, tokens, rngs={"router": jax.random.key(1)})
        other = train(variables, tokens, rngs={"router": jax.random.key(2)})
        jax.tree.map(np.testing.assert_array_equal, routing, again)
        assert np.any(routing.gate_logits != other.gate_logits)


def test_scale_of_the_noise_is_the_softplus_of_a_learned_score():
    tokens, router = random_tokens(), make("noisy_top_k")
    variables = variables_of(router, tokens)
    assert not np.any(variables["params"]["noise"])
    kernel = jnp.asarray(np.random.default_rng(1).standard_normal((MODEL, EXPERTS)), jnp.float32)
    params = {**variables["params"], "noise": kernel}

    def weights(params):
        rngs = {"router": jax.random.key(1)}
        routing = call(router, {"params": params}, tokens, rngs=rngs, deterministic=False)
        return jnp.sum(routing.combine_weight[:, 0]), routing

    gradient, routing = jax.jit(jax.grad(weights, has_aux=True))(params)
    still = call(router, {"params": params}, tokens)
    opened = np.asarray(MASK)[:, None] & np.asarray(EXPERT_MASK)[None]
    noise = np.asarray(routing.gate_logits)[opened] - np.asarray(still.gate_logits)[opened]
    scale = np.log1p(np.exp(np.asarray(tokens) @ np.asarray(kernel)))[opened]
    # 27 draws: largest of |normal| above 5 has probability 2e-5; the spread tells a scale apart.
    assert np.max(np.abs(noise / scale)) < 5 and 0.5 < np.std(noise / scale) < 1.6
    assert np.any(gradient["noise"]) and np.all(np.isfinite(gradient["noise"]))


@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "hash"])
def test_jitter_acts_in_training_only_and_stays_within_its_width(name):
    tokens = jnp.abs(random_tokens()) + 0.1
    router = make(name, jitter=0.2, gate="linear", gate_options={})
    variables = variables_of(router, tokens)
    variables = {**variables, "params": {**variables["params"]}}
    columns = router.slots_per_expert * EXPERTS if name == "soft" else EXPERTS
    kernel = jnp.zeros((MODEL, columns)).at[0].set(1.0)
    variables["params"]["gate"] = {"kernel": kernel}
    still = call(router, variables, tokens)
    same = call(make(name, gate="linear", gate_options={}), variables, tokens)
    jax.tree.map(np.testing.assert_array_equal, still, same)
    if name in ("noisy_top_k", "sigmoid"):
        return
    rngs = {"router": jax.random.key(3)}
    routing = call(router, variables, tokens, rngs=rngs, deterministic=False)
    again = call(router, variables, tokens, rngs=rngs, deterministic=False)
    jax.tree.map(np.testing.assert_array_equal, routing, again)
    if name == "soft":
        routing, still = (jax.tree.map(lambda leaf: leaf[0], r[0]) for r in (routing, still))
    # Every logit is the token's first coordinate, times the factor.
    ratio = np.asarray(routing.gate_logits / still.gate_logits)[np.asarray(MASK)][:, 0]
    assert np.all(ratio > 0.8) and np.all(ratio < 1.2) and len(np.unique(ratio)) == TOKENS - 1


def test_jitter_without_its_random_stream_is_refused():
    router = make("top_k", jitter=0.1)
    variables = variables_of(router, random_tokens())
    with pytest.raises(flax.errors.InvalidRngError):
        call(router, variables, random_tokens(), deterministic=False)


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_serves_every_router_that_has_one(gate):
    for name in ROUTERS:
        if name == "hash":
            continue
        router = make(name, gate=gate, gate_options={})
        variables = jax.eval_shape(functools.partial(variables_of, router), random_tokens())
        state = variables.get("router_state", {})
        assert ("gate" in variables.get("params", {})) == (gate != "random")
        assert ("gate" in state) == (gate == "random")
        assert ("balance_bias" in state) == (name == "sigmoid")


def test_state_that_is_missing_is_refused_and_not_taken_for_zeros():
    router = make("sigmoid")
    variables = variables_of(router, random_tokens())
    assert not np.any(variables["router_state"]["balance_bias"])
    with pytest.raises(flax.errors.FlaxError):
        call(router, {"params": variables["params"]}, random_tokens())
    router = make("top_k", gate="random")
    with pytest.raises(flax.errors.FlaxError):
        call(router, {"params": {}}, random_tokens())


def test_which_routers_look_ahead_in_inference():
    looking = {name for name, router in ROUTERS.items() if router.looks_ahead}
    assert looking == {"expert_choice", "soft"}
    tokens = random_tokens()
    changed = tokens.at[-1].multiply(-3.0)
    for name in ROUTERS:
        router = make(name)
        variables = variables_of(router, tokens)
        apply = jax.jit(functools.partial(call, router))
        before, after = apply(variables, tokens), apply(variables, changed)
        if name == "soft":
            assert np.any(before[1].dispatch[:, :-1] != after[1].dispatch[:, :-1])
        elif name not in looking:
            for field in ("expert_index", "combine_weight", "keep"):
                np.testing.assert_array_equal(before[field][:-1], after[field][:-1])


def test_expert_choice_does_look_ahead():
    # One expert of capacity 1: whether the first token is taken depends on the last.
    router = ROUTERS["expert_choice"](num_experts=2, num_selected=1, capacity_factor=0.4)
    x = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.5, 0.0]])
    variables = {"params": {"gate": {"kernel": jnp.array([[1.0, 0.0], [0.0, 0.0]])}}}
    apply = jax.jit(router.apply)
    assert apply(variables, x).keep[0, 0] and not apply(variables, x.at[2, 0].set(2.0)).keep[0, 0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("top_k", {"jitter": 1.0}, "jitter=1.0 is not in [0, 1)"),
        ("top_k", {"jitter": -0.1}, "jitter=-0.1 is not in [0, 1)"),
        (
            "top_k",
            {"gate": "quadratic"},
            "gate='quadratic' is not one of ('linear', 'cosine', 'hidden_layer', 'random')",
        ),
        (
            "top_k",
            {"gate": "hidden_layer", "gate_options": {"hiden_dim": 3}},
            "gate_options of 'hidden_layer': 'hiden_dim' is not one of ['hidden_dim']",
        ),
        (
            "top_k",
            {"gate_options": {"features": 3}},
            "gate_options of 'linear': 'features' is not one of []",
        ),
        (
            "expert_choice",
            {"capacity_factor": 3.0},
            "capacity_factor=3.0 is not in (0, 2]: at num_experts/num_selected=2 nothing is "
            "dropped",
        ),
        ("soft", {"slots_per_expert": 0}, "slots_per_expert=0 must be at least 1"),
        ("sinkhorn", {"num_iterations": 0}, "num_iterations=0 must be at least 1"),
        (
            "hash",
            {"gate": "cosine"},
            "gate='cosine', gate_options={} and jitter=0.0 do not apply to the hash router, which "
            "has no gate",
        ),
    ],
)
def test_options_out_of_range_are_refused(name, options, message):
    router = make(name, **options)
    with pytest.raises(ValueError) as error:
        keys = {"params": jax.random.key(0), "router": jax.random.key(1)}
        if name == "soft":
            jax.eval_shape(router.init, keys, random_tokens()[None], MASK[None])
        else:
            jax.eval_shape(router.init, keys, random_tokens(), MASK)
    assert str(error.value) == message


def test_a_dense_router_selects_every_expert():
    router = ROUTERS["dense"](num_experts=4, num_selected=2)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(router.init, jax.random.key(0), random_tokens())
    message = "num_selected=2 must equal num_experts=4 for the dense router"
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "token_ids None does not fit: expected (10,)"),
        (IDS[:4], "token_ids (4,) does not fit: expected (10,)"),
    ],
)
def test_a_hash_router_needs_an_id_a_token(ids, message):
    config = pytest.importorskip("jaxtyping").config
    # Outside the tests nothing checks annotations.
    config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError) as error:
            make("hash").apply({}, random_tokens(), token_ids=ids)
    finally:
        config.update("jaxtyping_disable", False)
    assert str(error.value) == message


def test_options_name_the_attributes_of_the_router_only():
    accepted = check_options("router_options", "top_k", ROUTERS["top_k"], {"renormalize": False})
    assert accepted == {"renormalize": False}
    for option in ("num_experts", "name", "parent", "renormalise"):
        with pytest.raises(ValueError) as error:
            check_options("router_options", "top_k", ROUTERS["top_k"], {option: 1})
        assert str(error.value).startswith(f"router_options of 'top_k': {option!r} is not one of [")
        assert "'renormalize'" in str(error.value) and "'parent']" not in str(error.value)
