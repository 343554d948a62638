"""Faults that users of other libraries reported, each as a property of this layer.

A comment names a report of the kind. Of what is tested elsewhere: the kernels' tails, empty groups
and odd sizes in test_grouped_matmul.py, loss scales in test_losses.py, devices in
on_eight_devices.py.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.core import (
    SparseMoE,
    expert_choice_routing,
    hash_routing,
    importance_loss,
    load_balance_loss,
    noisy_top_k_routing,
    routing_metrics,
    sequence_load_balance_loss,
    sigmoid_routing,
    sinkhorn_routing,
    top_k_routing,
    update_balance_bias,
)

MODEL, HIDDEN, EXPERTS, SELECTED = 6, 5, 4, 2
KEYS = {"params": jax.random.key(0), "router": jax.random.key(1)}


def make(**options):
    defaults = {"num_experts": EXPERTS, "num_selected": SELECTED, "hidden_dim": HIDDEN}
    return SparseMoE(**(defaults | options))


def random_tokens(*shape, seed=0, dtype=jnp.float32):
    tokens = np.random.default_rng(seed).standard_normal((*shape, MODEL))
    return jnp.asarray(tokens, jnp.float32).astype(dtype)


@functools.lru_cache
def variables_of(layer):
    ids = jnp.zeros(8, jnp.int32)
    return jax.jit(layer.init)(KEYS, random_tokens(8), token_ids=ids)


@functools.partial(jax.jit, static_argnums=0)
def forward(layer, variables, x, mask=None):
    return layer.apply(variables, x, mask)


@functools.partial(jax.jit, static_argnums=0)
def gradients(layer, variables, x, mask=None):
    """Output, routing, and gradients of the mean output over tokens plus both losses."""
    mask = jnp.ones(x.shape[:-1], bool) if mask is None else mask
    state = {key: value for key, value in variables.items() if key != "params"}

    def objective(params):
        out, routing = layer.apply({**state, "params": params}, x, mask)
        total = jnp.sum(jnp.sin(out.astype(jnp.float32))) / jnp.maximum(
            jnp.sum(mask, dtype=float), 1.0
        )
        return total + routing.load_balance_loss + routing.router_z_loss, (out, routing)

    return jax.grad(objective, has_aux=True)(variables["params"])


def close(actual, expected, rtol=1e-5, atol=1e-6):
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(compare, actual, expected)


def with_gate(variables, kernel):
    params = {**variables["params"], "router": {"gate": {"kernel": kernel}}}
    return {**variables, "params": params}


# Padding takes expert capacity (Megatron-LM #1984, #5542).
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("priority", ["position", "score"])
def test_padding_takes_no_capacity(side, priority):
    # 8 tokens and 8 of padding, all for expert 0, capacity ceil(16 * 1 / 4) = 4.
    layer = make(num_selected=1, capacity_factor=1.0, capacity_priority=priority)
    variables = with_gate(variables_of(layer), jnp.zeros((MODEL, EXPERTS)))
    mask = jnp.arange(16) < 8 if side == "right" else jnp.arange(16) >= 8
    _, routing = forward(layer, variables, random_tokens(16), mask)
    assert np.sum(routing.keep) == 4 and not np.any(routing.keep[~mask])
    np.testing.assert_array_equal(np.flatnonzero(routing.keep), np.flatnonzero(mask)[:4])
    assert routing_metrics(routing).dropped == 0.5


# Padding counts in the balance loss (transformers #28505, PR #29363), adds (log E)^2 to the z-loss
# (flaxformer); the last partial batch hangs or differs (Tutel #173, #182).
def test_a_partial_batch_padded_and_masked_equals_the_unpadded_one():
    layer = make(router="sigmoid", num_shared_experts=1)
    variables, x = variables_of(layer), random_tokens(3, 5)
    full, (out, routing) = gradients(layer, variables, x)
    padded = jnp.concatenate([x, jnp.full((2, 5, MODEL), jnp.nan)])
    mask = jnp.arange(5)[:, None] < jnp.full((1, 5), 3)
    got, (padded_out, padded_routing) = gradients(layer, variables, padded, mask)
    close(got, full)
    close(padded_out[:3], out)
    for loss in ("load_balance_loss", "router_z_loss"):
        close(padded_routing[loss], routing[loss])
    close(routing_metrics(padded_routing), routing_metrics(routing))


# Capacity rounded to 0 means dropless (megablocks) or drops everything (MaxText, Tutel); small
# factors differ from a reference (maxtext PR #833).
@pytest.mark.parametrize("factor", [0.01, 0.1, 0.5, 0.9])
def test_a_small_capacity_is_neither_none_nor_unlimited(factor):
    layer = make(num_selected=1, capacity_factor=factor)
    variables = with_gate(variables_of(layer), jnp.zeros((MODEL, EXPERTS)))
    _, routing = forward(layer, variables, random_tokens(3))
    # Fewer tokens than experts: ceil(factor * 3 / 4) = 1, and all three want expert 0.
    np.testing.assert_array_equal(routing.keep, [[True], [False], [False]])


# Capacity from the padded length lets every expert take more, the longer the padding.
def test_padding_does_not_raise_the_capacity_of_expert_choice():
    layer = make(router="expert_choice", router_options={"capacity_factor": 1.0})
    x = random_tokens(6)
    out, routing = forward(layer, variables_of(layer), x)
    mask = np.arange(16) < 6
    padded = jnp.zeros((16, MODEL)).at[:6].set(x)
    out_padded, routing_padded = forward(layer, variables_of(layer), padded, jnp.asarray(mask))
    np.testing.assert_array_equal(routing_padded.keep[:6], routing.keep)
    np.testing.assert_allclose(out_padded[:6], out, rtol=1e-5, atol=1e-6)


# The norm of an empty row has no derivative; sqrt makes it NaN.
def test_norms_of_empty_rows_have_a_finite_gradient():
    layer = make(capacity_factor=1.0)
    variables = variables_of(layer)

    def total(variables, x):
        return jnp.sum(layer.apply(variables, x, capture=True)[1].output_norm)

    gradient = jax.jit(jax.grad(total))(variables, random_tokens(8).at[0].set(0.0))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


# A capacity passed as capacity factor allocates 1 TB (megablocks PR #125).
def test_a_capacity_passed_as_a_factor_is_refused():
    with pytest.raises(ValueError, match=r"capacity_factor=512.0 is not in \(0, 2\]"):
        jax.eval_shape(make(capacity_factor=512.0).init, KEYS, random_tokens(8))


# More capacity than tokens makes top-k fail (flaxformer; marin #8578: 512 of a pool of 256).
def test_a_capacity_beyond_the_tokens_is_all_of_them():
    routing = expert_choice_routing(random_tokens(3)[:, :EXPERTS], 512)
    assert np.all(routing.keep) and routing.keep.shape == (3, EXPERTS)
    layer = make(router="expert_choice", router_options={"capacity_factor": 2.0})
    out, routing = forward(layer, variables_of(layer), random_tokens(5))
    assert np.all(np.isfinite(out)) and np.all(routing.keep)


# Gradients explode on one dispatch path only (marin #4746), a path is a rewrite (marin #8578).
def test_paths_that_drop_nothing_agree_in_value_and_gradient():
    x = random_tokens(7)
    dropless = make()
    variables = variables_of(dropless)
    wanted = gradients(dropless, variables, x)
    for options in (
        {"capacity_factor": 2.0},
        {"capacity_factor": 2.0, "capacity_priority": "score"},
        {"implementation": "dense"},
        {"implementation": "ragged_dot"},
    ):
        close(gradients(make(**options), variables, x), wanted, rtol=1e-4, atol=1e-5)
    # Every expert takes every token: the dense mixture.
    everyone = make(router="expert_choice", router_options={"capacity_factor": 2.0})
    dense = make(router="dense", num_selected=EXPERTS)
    (grads, (out, _)), (dense_grads, (dense_out, _)) = (
        gradients(layer, variables, x) for layer in (everyone, dense)
    )
    close((grads, out), (dense_grads, dense_out), rtol=1e-4, atol=1e-5)


# Weight gradients of empty groups are non-zero or NaN (tokamax #887, #1016); a rank without tokens
# crashes (Megatron-LM PR #3626).
def test_all_tokens_to_one_expert_leave_the_others_a_gradient_of_exactly_0():
    layer = make(num_selected=1)
    kernel = jnp.zeros((MODEL, EXPERTS)).at[:, 2].set(1.0)
    variables = with_gate(variables_of(layer), kernel)
    # The gate sees a positive sum of coordinates.
    grads, (out, routing) = gradients(layer, variables, jnp.abs(random_tokens(9)))
    assert np.all(routing.expert_index == 2) and np.all(np.isfinite(out))
    for leaf in jax.tree.leaves(grads["experts"]):
        assert np.any(leaf[2]) and not np.any(np.delete(leaf, 2, axis=0))


# The uninitialised tail of the rows reaches the output or the gate's gradient as NaN (maxtext
# PR #3699, transformers PR #48205).
def test_rows_that_no_assignment_fills_reach_nothing():
    for options in ({}, {"capacity_factor": 1.0}):
        layer = make(**options)
        mask = jnp.arange(9) < 2
        grads, (out, _) = gradients(layer, variables_of(layer), random_tokens(9), mask)
        for leaf in jax.tree.leaves((grads, out)):
            assert np.all(np.isfinite(leaf))
        assert np.any(grads["router"]["gate"]["kernel"]) and not np.any(out[2:])


# Batch 1 and sequence 1 do not divide into groups (vmoe #182, #160); odd lengths.
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (13,)])
def test_batches_of_one_token_and_of_prime_length_pass_without_groups_to_fill(shape):
    layer = make(capacity_factor=1.25)
    out, routing = forward(layer, variables_of(layer), random_tokens(*shape))
    assert out.shape == (*shape, MODEL) and np.all(np.isfinite(out))
    dropless = forward(make(), variables_of(layer), random_tokens(*shape))[0]
    whole = np.all(routing.keep, axis=1).reshape(shape)
    close(out[whole], dropless[whole])


# With k = 1 the gate gets no gradient (mixture-of-experts #27).
@pytest.mark.parametrize("router", ["top_k", "sigmoid", "noisy_top_k", "sinkhorn"])
def test_one_selected_expert_gives_the_gate_a_gradient_by_default(router):
    layer = make(num_selected=1, router=router)
    variables, x = variables_of(layer), random_tokens(8)
    state = {key: value for key, value in variables.items() if key != "params"}

    def total(params):
        return jnp.sum(jnp.sin(layer.apply({**state, "params": params}, x)[0]))

    gradient = jax.jit(jax.grad(total))(variables["params"])["router"]["gate"]["kernel"]
    assert np.linalg.norm(gradient) > 1e-3


# The balance bias is a parameter: optimiser state and weight decay (maxtext PR #4233).
def test_the_balance_bias_is_no_parameter_and_no_optimiser_moves_it():
    layer = make(router="sigmoid")
    variables = variables_of(layer)
    assert jax.tree.map(jnp.shape, variables["router_state"]) == {
        "router": {"balance_bias": (EXPERTS,)}
    }
    names = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(variables["params"])
    ]
    assert not any("bias" in name for name in names)
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    assert not any(
        "bias" in str(path)
        for path, _ in jax.tree.leaves_with_path(optimizer.init(variables["params"]))
    )
    # Nor does the layer itself: applying it in training leaves the state as it is.
    _, changed = layer.apply(
        variables, random_tokens(8), deterministic=False, mutable=["router_state"]
    )
    close(changed["router_state"], variables["router_state"])


# The bias never changes (maxtext #2494), its mean drifts, it moves once a micro-batch (torchtitan
# PR #1304, #1506).
def test_the_bias_moves_against_the_load_once_a_step_however_the_batch_is_cut():
    logits = np.random.default_rng(0).standard_normal((64, EXPERTS)) - np.arange(EXPERTS)
    logits = jnp.asarray(logits, jnp.float32)

    @functools.partial(jax.jit, static_argnums=1)
    def step(bias, num_parts):
        counts = []
        for part in jnp.split(logits, num_parts):
            routing = sigmoid_routing(part, SELECTED, balance_bias=bias)
            share = routing_metrics(routing).load
            counts.append(share * jnp.sum(routing.keep, dtype=jnp.float32))
        return update_balance_bias(bias, sum(counts), 0.01)

    once, four = jnp.zeros(EXPERTS), jnp.zeros(EXPERTS)
    for _ in range(10):
        once, four = step(once, 1), step(four, 4)
        close(four, once)
    assert once[0] < -0.05 and once[-1] > 0.05
    assert abs(float(jnp.mean(once))) < 1e-7


# The auxiliary loss is over-weighted with gradient accumulation (Automodel PR #3359).
def test_losses_and_gradients_do_not_depend_on_the_number_of_micro_batches():
    layer = make(router="sigmoid")
    variables, x = variables_of(layer), random_tokens(4, 6)
    state = {"router_state": variables["router_state"]}

    def loss(params, x):
        _, routing = layer.apply({**state, "params": params}, x)
        per_sequence = sequence_load_balance_loss(
            routing.gate_logits, routing.expert_index, x.shape[0]
        )
        return per_sequence + routing.router_z_loss

    gradient = jax.jit(jax.value_and_grad(loss))
    whole = gradient(variables["params"], x)
    parts = [gradient(variables["params"], part) for part in jnp.split(x, 2)]
    close(jax.tree.map(lambda *leaves: sum(leaves) / 2.0, *parts), whole)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        out, routing = make(name="moe")(x)
        return x + out, (routing.load_balance_loss, routing.router_z_loss)


# Rematerialisation and pipelines double or lose loss entries (megablocks #113).
def test_rematerialised_layers_hand_out_each_loss_once():
    x = random_tokens(8)

    def scanned(block):
        return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()

    variables = scanned(Block).init(KEYS, x, None)

    def total(model, params):
        _, losses = model.apply({"params": params}, x, None)
        return jnp.sum(losses[0]) + jnp.sum(losses[1]), losses

    plain, remat = (
        jax.jit(jax.grad(functools.partial(total, scanned(block)), has_aux=True))(
            variables["params"]
        )
        for block in (Block, nn.remat(Block))
    )
    assert plain[1][0].shape == (3,)
    close(remat, plain)


# The balance loss flattens the layers into one batch (transformers #31464).
def test_the_losses_of_stacked_layers_are_one_a_layer_and_not_pooled():
    # Each layer sends all tokens to another expert: collapsed twice, yet balanced if pooled.
    logits = jnp.stack([jnp.full((8, 2), -9.0).at[:, layer].set(9.0) for layer in range(2)])
    routing = jax.vmap(lambda logits: top_k_routing(logits, 1))(logits)
    np.testing.assert_allclose(routing.load_balance_loss, [2.0, 2.0], rtol=1e-5)
    pooled = load_balance_loss(logits.reshape(16, 2), routing.expert_index.reshape(16, 1))
    assert pooled == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose(routing_metrics(routing).balance, [2.0, 2.0])


# Scores after the softmax are taken for logits in the loss (transformers PR #45315).
def test_the_record_holds_logits_whose_softmax_is_the_distribution_that_weighs():
    logits = random_tokens(8)[:, :EXPERTS]
    for route, score in ((top_k_routing, jax.nn.softmax), (sigmoid_routing, jax.nn.sigmoid)):
        routing = route(logits, SELECTED, renormalize=False)
        share = score(logits) / jnp.sum(score(logits), axis=1, keepdims=True)
        close(jax.nn.softmax(routing.gate_logits), share)
        loss = load_balance_loss(routing.gate_logits, routing.expert_index)
        close(routing.load_balance_loss, loss)
        wrong = load_balance_loss(jax.nn.softmax(routing.gate_logits), routing.expert_index)
        assert abs(float(wrong - loss)) > 1e-3


# The importance loss fails without noise (Tutel #167).
def test_the_importance_loss_needs_no_noise():
    routing = noisy_top_k_routing(jax.random.key(0), random_tokens(8)[:, :EXPERTS], 0.0, SELECTED)
    value, gradient = jax.value_and_grad(importance_loss)(routing.gate_logits)
    assert np.isfinite(value) and value > 0.0 and np.all(np.isfinite(gradient))


# The scores are computed in the model's bfloat16 (Megatron-LM #2743): 2 % of the choices change.
def test_a_bfloat16_model_routes_in_float32():
    exact, rounded = make(), make(dtype=jnp.bfloat16)
    variables = variables_of(exact)
    x = random_tokens(2000, dtype=jnp.bfloat16)
    wanted = forward(exact, variables, x.astype(jnp.float32))[1]
    got = forward(rounded, variables, x)[1]
    np.testing.assert_array_equal(got.expert_index, wanted.expert_index)
    assert got.combine_weight.dtype == got.gate_logits.dtype == jnp.float32
    logits = wanted.gate_logits.astype(jnp.bfloat16)
    coarse = top_k_routing(logits, SELECTED).expert_index
    assert np.any(coarse != wanted.expert_index)


# Ties of bfloat16 logits make routing depend on the batch or the backend (vLLM PR #58076).
def test_ties_do_not_depend_on_the_batch():
    logits = jnp.round(random_tokens(64)[:, :EXPERTS]).astype(jnp.bfloat16)
    for route in (top_k_routing, sigmoid_routing):
        routing = route(logits, SELECTED)
        ranked = np.argsort(-np.asarray(logits, np.float32), axis=1, kind="stable")
        np.testing.assert_array_equal(routing.expert_index, ranked[:, :SELECTED])
        for start, stop in ((0, 1), (3, 10)):
            part = route(logits[start:stop], SELECTED)
            np.testing.assert_array_equal(part.expert_index, routing.expert_index[start:stop])


# A token goes to one expert twice (MaxText's random routing).
def test_a_token_never_has_the_same_expert_twice():
    logits = jnp.round(random_tokens(200)[:, :EXPERTS])
    ids = jnp.arange(200, dtype=jnp.int32)
    for routing in (
        top_k_routing(logits, 3),
        noisy_top_k_routing(jax.random.key(0), logits, 1.0, 3),
        sigmoid_routing(logits, 3),
        sinkhorn_routing(logits, 3),
        hash_routing(ids, EXPERTS, 3),
    ):
        ordered = np.sort(routing.expert_index, axis=1)
        assert np.all(np.diff(ordered, axis=1) > 0)


# Metrics divide by the number dispatched: NaN at 0 (flaxformer).
def test_metrics_without_a_dispatched_token_are_0():
    layer = make(capacity_factor=1.0)
    _, routing = forward(layer, variables_of(layer), random_tokens(8), jnp.zeros(8, bool))
    for leaf in jax.tree.leaves(routing_metrics(routing)):
        assert not np.any(leaf)


# Capacity differs between ranks and they hang (DeepSpeed #6809).
def test_shapes_depend_on_shapes_alone():
    layer = make(capacity_factor=1.0)
    count = forward._cache_size()
    for seed in range(3):
        mask = jnp.arange(10) < 3 * seed + 1
        forward(layer, variables_of(layer), random_tokens(10, seed=seed), mask)
    assert forward._cache_size() == count + 1


# How to use the layer outside of its home (contrastors #76).
def test_the_layer_stands_alone():
    layer = SparseMoE(
        num_experts=64,
        num_selected=6,
        hidden_dim=4,
        num_shared_experts=2,
        router="sigmoid",
        router_options={"num_groups": 8, "num_selected_groups": 3},
    )
    x = random_tokens(2, 5)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    out, routing = jax.jit(layer.apply)(variables, x)
    assert out.shape == x.shape and routing.expert_index.shape == (10, 6)
    assert len(set((np.asarray(routing.expert_index[0]) // 8).tolist())) <= 3
