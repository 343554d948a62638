"""Run by test_expert_parallel.py in a process of its own, which sees the CPU as eight devices.

Every result of a mesh is compared with that of one device, without a mesh.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core import SparseMoE, grouped_matmul, routing_metrics, update_balance_bias
from moe_jax.language import LanguageModel, LanguageModelConfig
from moe_jax.language.fit import LossConfig, make_loss_function, make_model_state_update
from moe_jax.sharding import ExpertParallel, MeshConfig, make_mesh, state_shardings
from moe_jax.sharding.global_batches import GlobalBatches
from moe_jax.training import (
    Checkpoints,
    OptimizerConfig,
    init_state,
    make_optimizer,
    restore_or_init,
    split_variables,
)

MESHES = {  # sizes of data, fsdp, expert, tensor: how tokens are exchanged, and the capacity factor
    (1, 1, 1, 1): ("auto", None),
    (1, 2, 1, 1): ("auto", 0.75),
    (1, 1, 2, 1): ("ragged", None),
    (1, 1, 1, 2): ("auto", None),
    (2, 1, 1, 2): ("ragged", 0.75),
    (1, 1, 4, 1): ("fixed", 0.75),
    (1, 2, 2, 1): ("gather", None),
    (8, 1, 1, 1): ("auto", None),
    (2, 2, 2, 1): ("fixed", None),
    (1, 1, 4, 2): ("auto", None),
    (1, 2, 2, 2): ("ragged", 0.75),
    (1, 1, 8, 1): ("gather", 0.75),
}
EXPERTS, CLOSED = 8, (3, 4)
LOSS = LossConfig(load_balance_weight=0.3, router_z_weight=0.1, balance_bias_rate=0.01)
CONFIG = {
    "vocab_size": 16,
    "model_dim": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_experts": EXPERTS,
    "num_selected": 2,
    "expert_hidden_dim": 6,
    "num_shared_experts": 1,
    "router": "sigmoid",
}


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(compare, actual, expected)


def mesh_of(sizes):
    return make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])


class OneBatch:
    """Rows of padding, a row that ends in it, and documents; position 0."""

    def __next__(self):
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 16, (8, 9)).astype(np.int32)
        segment_ids = np.ones((8, 8), np.int32)
        segment_ids[1], segment_ids[2, 5:], segment_ids[5, 4:] = 0, 0, 2
        positions = np.tile(np.arange(8, dtype=np.int32), (8, 1))
        positions[5, 4:] -= 4
        return {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": segment_ids,
            "positions": positions,
            "loss_mask": segment_ids > 0,
        }

    def get_state(self):
        return {}

    def set_state(self, state):
        del state


def model_step(sizes, exchange):
    """Loss, every leaf of the gradient, metrics and the new balance bias of one training step."""
    config = LanguageModelConfig(**CONFIG)
    plain = LanguageModel(config)
    batch = next(OneBatch())
    variables = jax.jit(plain.init)(jax.random.key(0), batch["inputs"])
    params, state = split_variables(variables)
    state = close_experts(state)
    model, shardings = plain, None
    if sizes is not None:
        mesh = mesh_of(sizes)
        model = LanguageModel(config, ExpertParallel(mesh, exchange))
        batch = next(GlobalBatches(OneBatch(), 8, mesh))
        shardings = state_shardings((params, state), mesh)
        params, state = jax.device_put((params, state), shardings)
        shardings = (shardings[0], None)
    loss_function = make_loss_function(model, LOSS, tokens_per_byte=1.0)
    update = make_model_state_update(config, LOSS)

    def value(params, state, batch):
        one = jnp.ones((), jnp.float32)
        loss, (metrics, totals) = loss_function(params, state, batch, one, jax.random.key(1))
        return loss, (loss, metrics, totals, update(state, totals))

    gradient = jax.jit(jax.grad(value, has_aux=True), out_shardings=shardings)
    return jax.device_get(gradient(params, state, batch))


def layer_step(sizes, exchange, capacity_factor):
    """Loss, every leaf of the gradient, metrics and the new balance bias of one layer."""
    layer = SparseMoE(
        num_experts=EXPERTS,
        num_selected=2,
        hidden_dim=6,
        num_shared_experts=1,
        router="sigmoid",
        capacity_factor=capacity_factor,
    )
    batch = next(OneBatch())
    x = np.random.default_rng(1).standard_normal((8, 8, 4)).astype(np.float32)
    params, state = split_variables(jax.jit(layer.init)(jax.random.key(0), x))
    state = close_experts(state)
    inputs = {"x": x, "mask": batch["loss_mask"]}
    shardings = None
    if sizes is not None:
        mesh = mesh_of(sizes)
        layer = layer.clone(exchange=ExpertParallel(mesh, exchange))
        inputs = next(GlobalBatches(iter([inputs]), 8, mesh))
        shardings = state_shardings({"moe": params}, mesh)["moe"]
        params, shardings = jax.device_put(params, shardings), ((shardings, None), None)

    def value(params, x, mask):
        out, routing = layer.apply({"params": params, **state}, x, mask)
        metrics = routing_metrics(routing)
        loss = jnp.sum(jnp.sin(out)) / jnp.sum(mask, dtype=jnp.float32)
        loss += 0.3 * routing.load_balance_loss + 0.1 * routing.router_z_loss
        bias = update_balance_bias(jax.tree.leaves(state)[0], metrics.counts, 0.01)
        losses = (loss, routing.load_balance_loss, routing.router_z_loss)
        return loss, (losses, dict(metrics), bias)

    gradient = jax.grad(value, argnums=(0, 1), has_aux=True)
    gradient = jax.jit(gradient, out_shardings=shardings)
    return jax.device_get(gradient(params, inputs["x"], inputs["mask"]))


def close_experts(state):
    """A balance bias with which no token chooses two of the experts."""
    open_experts = ~np.isin(np.arange(EXPERTS), CLOSED)
    return jax.tree.map(
        lambda bias: jnp.where(jnp.broadcast_to(open_experts, bias.shape), bias, -9.0), state
    )


def check_meshes():
    expected = {capacity: layer_step(None, None, capacity) for capacity in (None, 0.75)}
    metrics = expected[0.75][1][1]
    assert metrics["dropped"] > 0.1 and np.all(metrics["load"][list(CLOSED)] == 0)
    for sizes, (exchange, capacity_factor) in MESHES.items():
        close(layer_step(sizes, exchange, capacity_factor), expected[capacity_factor])
        print("mesh", *sizes, flush=True)


def check_model():
    """A language model, its padding in rows of their own and at the end of others."""
    close(model_step((1, 2, 2, 2), "ragged"), model_step(None, None))
    print("model", flush=True)


def check_odd_tokens():
    """21 tokens, which eight devices cannot share, through the loop that CPUs run by default."""
    layer = SparseMoE(num_experts=4, num_selected=2, hidden_dim=6, implementation="loop")
    x = np.random.default_rng(0).standard_normal((3, 7, 5)).astype(np.float32)
    mask = np.arange(21).reshape(3, 7) % 4 != 1
    variables = jax.jit(layer.init)(jax.random.key(0), x)

    def run(layer):
        def loss(variables, x):
            out, routing = layer.apply(variables, x, mask)
            return jnp.sum(jnp.sin(out)) + routing.load_balance_loss, out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, x)

    close(run(layer.clone(exchange=ExpertParallel(mesh_of((1, 2, 2, 2)), "fixed"))), run(layer))
    print("odd tokens", flush=True)


def check_elastic(folder):
    """A state saved on one mesh comes back on others and on one device, equal leaf by leaf."""
    config = LanguageModelConfig(**CONFIG)
    optimizer = make_optimizer(OptimizerConfig(), 9)

    def init():
        variables = LanguageModel(config).init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        params, model_state = split_variables(variables)
        return init_state(jax.random.key(1), params, optimizer, model_state)

    def raw(leaf):
        return (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )

    shapes = jax.eval_shape(init)
    rng = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(7)
        return jnp.asarray(rng.normal(size=leaf.shape) * 9, leaf.dtype)

    numbers = jax.tree.map(fill, shapes)
    saved = jax.device_put(numbers, state_shardings(shapes, mesh_of((2, 2, 2, 1))))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, saved, {})
    for sizes in ((8, 1, 1, 1), (1, 1, 4, 2), None):
        shardings = None if sizes is None else state_shardings(shapes, mesh_of(sizes))
        restored = restore_or_init(Checkpoints(folder), init, OneBatch(), shardings)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(raw(a), raw(b)), restored, numbers)
        experts = restored.opt_state[1][0].mu["blocks_0"]["layer_0"]["moe"]["experts"]["up"]
        pieces = {(8, 1, 1, 1): 1, (1, 1, 4, 2): 8, None: 1}[sizes]
        assert experts.addressable_shards[0].data.size * pieces == experts.size
    print("elastic", flush=True)


if __name__ == "__main__":
    assert jax.device_count() == 8
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    check_elastic(sys.argv[1])
    check_odd_tokens()
    # Compiles in a fraction of the time that the loop takes.
    sys.modules[grouped_matmul.__module__].default_implementation = lambda: "dense"
    check_meshes()
    check_model()
