import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.core import top_k_routing
from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.fit import (
    LossConfig,
    batch_weight,
    forward,
    make_loss_function,
    make_model_state_update,
    sparse_layers_of,
    token_losses,
)
from moe_jax.language.model import LanguageModel
from moe_jax.training.state import init_state
from moe_jax.training.step import make_train_step

CONFIG = LanguageModelConfig(
    vocab_size=16,
    model_dim=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    layer_pattern=("dense",),
    hidden_dim=8,
    num_experts=4,
    num_selected=2,
    expert_hidden_dim=8,
    qk_norm=False,
)
SPARSE = dataclasses.replace(CONFIG, layer_pattern=("sparse",))
ONE = jnp.ones((), jnp.float32)
KEY = jax.random.key(0)
COMPILER = {"compiler_options": {"xla_backend_optimization_level": 0}}


class FixedModel(LanguageModel):
    """Its parameters are the logits, and the gate logits [layers, tokens, experts]."""

    @nn.compact
    def __call__(self, tokens, segment_ids=None, positions=None, *, deterministic=True):
        shape = (*tokens.shape, self.config.vocab_size)
        logits = self.param("logits", nn.initializers.zeros, shape)
        if self.config.num_sparse_layers == 0:
            return logits, None
        shape = (self.config.num_sparse_layers, tokens.size, self.config.num_experts)
        gate_logits = self.param("gate_logits", nn.initializers.zeros, shape)
        mask = (segment_ids > 0).reshape(-1)
        return logits, jax.vmap(
            lambda logits: top_k_routing(logits, self.config.num_selected, mask=mask)
        )(gate_logits)


def batch_of(inputs, targets, loss_mask, segment_ids=None):
    inputs = jnp.asarray(inputs, jnp.int32)
    if segment_ids is None:
        segment_ids = jnp.ones_like(inputs)
    return {
        "inputs": inputs,
        "targets": jnp.asarray(targets, jnp.int32),
        "segment_ids": jnp.asarray(segment_ids, jnp.int32),
        "positions": jnp.broadcast_to(
            jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape
        ),
        "loss_mask": jnp.asarray(loss_mask, jnp.bool_),
    }


BATCH = batch_of([[0, 1], [1, 0]], [[1, 0], [0, 1]], [[True, True], [True, False]])
# p(1) = 3/4 at the first place, p(0) = 1/2 at the second, p(0) = 1/5 at the third.
LOGITS = jnp.log(jnp.asarray([[[1.0, 3.0], [5.0, 5.0]], [[1.0, 4.0], [9.0, 1.0]]], jnp.float32))
NATS = (math.log(4 / 3) + math.log(2) + math.log(5)) / 3


def test_loss_is_the_mean_cross_entropy_of_counted_tokens():
    loss_function = make_loss_function(
        FixedModel(dataclasses.replace(CONFIG, vocab_size=2)), LossConfig(), tokens_per_byte=0.5
    )
    loss, (metrics, _) = loss_function({"logits": LOGITS}, {}, BATCH, ONE, KEY)
    assert loss == pytest.approx(NATS, rel=1e-6)
    assert set(metrics) == {"bits_per_byte"}
    # Half a token a byte, log 2 nats a bit.
    assert metrics["bits_per_byte"] == pytest.approx(NATS / math.log(2) * 0.5, rel=1e-6)


def test_share_scales_the_loss_and_not_the_metrics():
    loss_function = make_loss_function(
        FixedModel(dataclasses.replace(CONFIG, vocab_size=2)), LossConfig(), tokens_per_byte=1.0
    )
    loss, (metrics, _) = loss_function({"logits": LOGITS}, {}, BATCH, jnp.float32(0.25), KEY)
    assert loss == pytest.approx(NATS / 4, rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(NATS / math.log(2), rel=1e-6)


def test_token_that_does_not_count_has_no_loss_and_no_gradient():
    gradient = jax.grad(
        lambda logits: jnp.sum(token_losses(logits, BATCH["targets"], BATCH["loss_mask"]))
    )(LOGITS.at[1, 1, 0].set(1e30))
    np.testing.assert_array_equal(gradient[1, 1], 0.0)
    # softmax minus one-hot, at the first place.
    np.testing.assert_allclose(gradient[0, 0], [0.25, -0.25], rtol=1e-6)
    losses = token_losses(LOGITS, BATCH["targets"], BATCH["loss_mask"])
    np.testing.assert_allclose(losses[0], [math.log(4 / 3), math.log(2)], rtol=1e-6)
    assert losses[1, 1] == 0.0


def test_losses_of_large_logits_stay_finite():
    logits = jnp.asarray([[[1e4, -1e4]]], jnp.float32)
    losses = token_losses(logits, jnp.asarray([[1]], jnp.int32), jnp.ones((1, 1), jnp.bool_))
    np.testing.assert_allclose(losses, [[2e4]])


def test_batch_without_counted_tokens_has_loss_0_and_no_gradient():
    loss_function = make_loss_function(
        FixedModel(dataclasses.replace(CONFIG, vocab_size=2)), LossConfig(), tokens_per_byte=1.0
    )
    batch = BATCH | {"loss_mask": jnp.zeros((2, 2), jnp.bool_)}
    (loss, _), gradient = jax.value_and_grad(loss_function, has_aux=True)(
        {"logits": LOGITS}, {}, batch, ONE, KEY
    )
    assert loss == 0.0 and not np.any(gradient["logits"])
    assert batch_weight(batch) == 0.0 and batch_weight(BATCH) == 3.0


def test_auxiliary_losses_are_averaged_over_layers_and_weighted():
    config = dataclasses.replace(SPARSE, vocab_size=2, num_layers=2, num_selected=1)
    # Layer 0 sends the 3 real tokens to expert 0 with certainty: balance loss 4 = num_experts.
    # Layer 1 is uniform: 1. Log-partitions are 50 and log 4.
    certain = jnp.zeros((4, 4), jnp.float32).at[:, 0].set(50.0)
    gate_logits = jnp.stack([certain, jnp.zeros_like(certain)])
    params = {"logits": LOGITS, "gate_logits": gate_logits}
    batch = BATCH | {"segment_ids": jnp.asarray([[1, 1], [1, 0]], jnp.int32)}
    weights = LossConfig(load_balance_weight=0.1, router_z_weight=0.01)
    loss, (metrics, totals) = make_loss_function(FixedModel(config), weights, tokens_per_byte=1.0)(
        params, {}, batch, ONE, KEY
    )
    np.testing.assert_array_equal(totals["expert_counts"], [[3, 0, 0, 0]] * 2)
    balance, z_loss = (4.0 + 1.0) / 2, (50.0**2 + math.log(4) ** 2) / 2
    assert metrics["load_balance_loss"] == pytest.approx(balance, rel=1e-6)
    assert metrics["router_z_loss"] == pytest.approx(z_loss, rel=1e-6)
    assert loss == pytest.approx(NATS + 0.1 * balance + 0.01 * z_loss, rel=1e-6)
    # Ties go to expert 0 in layer 1 as well; padding is left out.
    np.testing.assert_allclose(metrics["load"], [[1.0, 0.0, 0.0, 0.0]] * 2)
    np.testing.assert_allclose(metrics["balance"], [4.0, 4.0])
    np.testing.assert_allclose(metrics["entropy"], [0.0, math.log(4)], atol=1e-6)
    np.testing.assert_allclose(metrics["dropped"], [0.0, 0.0])
    assert set(metrics) == {
        *("bits_per_byte", "load_balance_loss", "router_z_loss"),
        *("load", "balance", "entropy", "dropped"),
    }


@pytest.mark.parametrize("name", ["load_balance_weight", "router_z_weight"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_weights_must_not_be_negative(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must not be negative"):
        LossConfig(**{name: value})


def random_batch():
    """4 rows, of which 6, 1, 0 and 4 tokens count; row 2 holds a document but no counted target."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, 16, (2, 4, 6))
    loss_mask = np.arange(6)[None] < np.array([6, 1, 0, 4])[:, None]
    return batch_of(inputs, targets, loss_mask, loss_mask | (np.arange(6) < 2))


@functools.cache
def initialised(config):
    init = jax.jit(LanguageModel(config).init, **COMPILER)
    return init(KEY, random_batch()["inputs"])["params"]


def gradient_step(config, accumulate):
    """Params after a step of plain gradient descent at rate 1, and the metrics."""
    optimizer = optax.sgd(1.0)
    train_step = make_train_step(
        make_loss_function(LanguageModel(config), LossConfig(0.1, 0.01), tokens_per_byte=1.0),
        optimizer,
        batch_weight=batch_weight,
        accumulate=accumulate,
    )
    # The step deletes the state it is given.
    params = jax.tree.map(jnp.copy, initialised(config))
    state, metrics = train_step(init_state(jax.random.key(1), params, optimizer), random_batch())
    return state.params, metrics


def test_accumulation_changes_neither_loss_nor_gradient_of_a_dense_model():
    params, metrics = gradient_step(CONFIG, 1)
    accumulated_params, accumulated_metrics = gradient_step(CONFIG, 4)
    for name in ("loss", "bits_per_byte", "gradient_norm"):
        np.testing.assert_allclose(
            accumulated_metrics[name], metrics[name], rtol=1e-5, err_msg=name
        )
    for first, second in zip(
        jax.tree.leaves(params), jax.tree.leaves(accumulated_params), strict=True
    ):
        np.testing.assert_allclose(first, second, atol=1e-6)


def test_accumulation_balances_each_part_by_itself():
    """The balance loss multiplies averages over tokens, so parts do not add up to the whole."""
    _, accumulated = gradient_step(SPARSE, 2)
    loss_function = jax.jit(
        make_loss_function(LanguageModel(SPARSE), LossConfig(), tokens_per_byte=1.0), **COMPILER
    )

    def metrics_of(batch):
        return loss_function(initialised(SPARSE), {}, batch, ONE, KEY)[1][0]

    whole = metrics_of(random_batch())
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, 2, 6), random_batch())
    first, second = (
        metrics_of(jax.tree.map(lambda leaf, half=half: leaf[half], halves)) for half in (0, 1)
    )
    np.testing.assert_allclose(accumulated["bits_per_byte"], whole["bits_per_byte"], rtol=1e-5)
    for name in ("load_balance_loss", "router_z_loss", "load"):
        # 7 and 4 tokens count.
        expected = (7 * first[name] + 4 * second[name]) / 11
        np.testing.assert_allclose(accumulated[name], expected, rtol=1e-5)
    assert abs(accumulated["load_balance_loss"] - whole["load_balance_loss"]) > 1e-3
    auxiliary = 0.1 * accumulated["load_balance_loss"] + 0.01 * accumulated["router_z_loss"]
    nats = accumulated["bits_per_byte"] * math.log(2)
    np.testing.assert_allclose(accumulated["loss"], nats + auxiliary, rtol=1e-5)


SIGMOID = dataclasses.replace(
    SPARSE, layer_pattern=("sparse", "dense"), num_layers=5, router="sigmoid"
)


def sigmoid_step(config, accumulate):
    """The state after one step from random parameters, and the load that the step saw."""
    optimizer = optax.adamw(1e-2, weight_decay=0.5)
    loss_config = LossConfig(balance_bias_rate=0.5)
    train_step = make_train_step(
        make_loss_function(LanguageModel(config), loss_config, tokens_per_byte=1.0),
        optimizer,
        batch_weight=batch_weight,
        accumulate=accumulate,
        update_model_state=make_model_state_update(config, loss_config),
    )
    model = LanguageModel(config)
    variables = jax.jit(model.init, **COMPILER)(KEY, random_batch()["inputs"])
    model_state = {name: value for name, value in variables.items() if name != "params"}
    params = variables["params"]
    scored = jax.jit(lambda variables: forward(model, variables, random_batch()), **COMPILER)
    _, routing = scored(variables)
    state, _ = train_step(
        init_state(jax.random.key(1), params, optimizer, model_state), random_batch()
    )
    return state, routing


def biases(state, config):
    """[sparse layers, experts], in the order of the layers."""
    rows = {}
    for block, layers in state.model_state["router_state"].items():
        for layer, leaves in layers.items():
            bias = leaves["moe"]["router"]["balance_bias"]
            for place, row in zip(sparse_layers_of(config, block, layer), bias, strict=True):
                rows[place] = np.asarray(row)
    return np.stack([rows[place] for place in range(config.num_sparse_layers)])


def test_each_layers_balance_bias_moves_against_its_load_once_a_step():
    """However the step is accumulated, and whether layers are scanned and recomputed or not."""
    state, routing = sigmoid_step(SIGMOID, 1)
    counts = np.stack(
        [
            np.bincount(index[keep], minlength=4)
            for index, keep in zip(
                np.asarray(routing.expert_index), np.asarray(routing.keep), strict=True
            )
        ]
    )
    moved = 0.5 * np.sign(counts.mean(axis=1, keepdims=True) - counts)
    expected = moved - moved.mean(axis=1, keepdims=True)
    assert len({tuple(row) for row in expected}) > 1
    np.testing.assert_allclose(biases(state, SIGMOID), expected, atol=1e-6)
    for config, accumulate in (
        (SIGMOID, 4),
        (dataclasses.replace(SIGMOID, scan_layers=False, remat="full"), 2),
    ):
        again, _ = sigmoid_step(config, accumulate)
        np.testing.assert_array_equal(biases(again, config), biases(state, SIGMOID))


def test_balance_bias_is_neither_a_parameter_nor_known_to_the_optimiser():
    variables = jax.eval_shape(LanguageModel(SIGMOID).init, KEY, random_batch()["inputs"])
    opt_state = jax.eval_shape(optax.adamw(1e-2).init, variables["params"])
    for path, _ in jax.tree.leaves_with_path((variables["params"], opt_state)):
        assert "balance_bias" not in jax.tree_util.keystr(path)
    assert "balance_bias" in jax.tree_util.keystr(
        jax.tree.leaves_with_path(variables["router_state"])[0][0]
    )


def test_balance_within_sequences_is_the_same_however_the_step_is_accumulated():
    loss_config = LossConfig(0.1, 0.01, load_balance_scope="sequence")
    # Every token counts, so that the parts' shares of targets are those of routed tokens.
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(0, 16, (2, 4, 6))
    batch = batch_of(inputs, targets, np.ones((4, 6), bool))
    seen = []
    for accumulate in (1, 2, 4):
        optimizer = optax.sgd(1.0)
        train_step = make_train_step(
            make_loss_function(LanguageModel(SPARSE), loss_config, tokens_per_byte=1.0),
            optimizer,
            batch_weight=batch_weight,
            accumulate=accumulate,
        )
        params = jax.tree.map(jnp.copy, initialised(SPARSE))
        state, metrics = train_step(init_state(jax.random.key(1), params, optimizer), batch)
        seen.append((state.params, metrics["load_balance_loss"], metrics["router_z_loss"]))
    for other in seen[1:]:
        for first, second in zip(jax.tree.leaves(seen[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"router": "noisy_top_k"},
        {"router": "sinkhorn"},
        {"router": "hash"},
        {"router": "top_k", "router_options": {"gate": "cosine", "jitter": 0.1}},
        {"router": "top_k", "router_options": {"gate": "hidden_layer"}, "capacity_factor": 1.0},
        {"router": "top_k", "router_options": {"gate": "random"}, "expert_dropout": 0.2},
        {"router": "top_k", "gated": False, "activation": "relu"},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_every_router_trains_and_repeats_with_its_key(options):
    config = dataclasses.replace(SPARSE, num_layers=2, **options)
    model = LanguageModel(config)
    variables = jax.jit(model.init, **COMPILER)(KEY, random_batch()["inputs"])
    state = {name: value for name, value in variables.items() if name != "params"}
    loss_function = jax.jit(
        jax.value_and_grad(
            make_loss_function(model, LossConfig(importance_weight=0.1), tokens_per_byte=1.0),
            has_aux=True,
        ),
        **COMPILER,
    )
    arguments = variables["params"], state, random_batch(), ONE
    (loss, _), gradient = loss_function(*arguments, KEY)
    (again, _), _ = loss_function(*arguments, KEY)
    (other, _), _ = loss_function(*arguments, jax.random.key(5))
    assert np.isfinite(loss) and loss == again
    draws = "jitter" in str(options) or "noisy" in str(options) or "dropout" in str(options)
    assert (other != loss) == draws
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
