"""Run by test_sparse_moe.py in a process of its own, which sees the CPU as eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.core import (
    SparseMoE,
    gate_entropy,
    importance_loss,
    load_balance_loss,
    router_z_loss,
    routing_metrics,
    sequence_load_balance_loss,
    top_k_routing,
    update_balance_bias,
)

TOKENS, MODEL, EXPERTS = 32, 6, 4
MASK = np.arange(TOKENS) % 5 != 1
DATA = ("data", "model")


def shard_map(function, in_specs, out_specs, check_vma=True):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), DATA)
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
    )


def close(actual, expected, rtol=1e-5, atol=1e-6):
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(compare, actual, expected)


def random_array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def all_losses(gate_logits, expert_index, mask, axis_names=()):
    length = gate_logits.shape[0] // 4
    axes = {"axis_names": axis_names}
    return jnp.stack(
        [
            load_balance_loss(gate_logits, expert_index, mask, **axes),
            sequence_load_balance_loss(gate_logits, expert_index, length, mask, **axes),
            router_z_loss(gate_logits, mask, **axes),
            importance_loss(gate_logits, mask, **axes),
            gate_entropy(gate_logits, mask, **axes),
        ]
    )


def check_losses():
    """Value and gradient are those of one device, differentiated outside or inside the shards."""
    # Skewed along the tokens, so that no shard is like the batch.
    logits = random_array(TOKENS, EXPERTS) + 0.1 * jnp.arange(TOKENS)[:, None] * jnp.arange(4)[None]
    logits = logits.astype(jnp.float32)
    index, mask = jax.lax.top_k(logits, 2)[1], jnp.asarray(MASK)
    weight = jnp.arange(1.0, 6.0)

    def total(logits, index, mask, **axes):
        losses = all_losses(logits, index, mask, **axes)
        return losses @ weight, losses

    sharded = functools.partial(total, axis_names=DATA)
    gradient, losses = jax.jit(jax.grad(total, has_aux=True))(logits, index, mask)
    specs = (P(DATA), P(DATA), P(DATA))
    for check_vma in (True, False):
        outside = shard_map(sharded, specs, (P(), P()), check_vma)
        close(jax.grad(lambda logits, f=outside: f(logits, index, mask)[0])(logits), gradient)
        close(outside(logits, index, mask)[1], losses)
    inside = shard_map(jax.grad(sharded, has_aux=True), specs, (P(DATA), P()))
    close(inside(logits, index, mask), (gradient, losses))
    print("losses")


def check_metrics():
    logits, mask = random_array(TOKENS, EXPERTS), jnp.asarray(MASK)

    def metrics(logits, mask, axis_names=()):
        routing = top_k_routing(logits, 2, mask=mask)
        return routing_metrics(routing, axis_names=axis_names)

    sharded = shard_map(functools.partial(metrics, axis_names=DATA), (P(DATA), P(DATA)), P())
    close(sharded(logits, mask), jax.jit(metrics)(logits, mask))
    print("metrics")


def check_layer(router, num_tokens, **options):
    """Output, losses, gradients, metrics and bias update with replicated parameters."""
    layer = SparseMoE(
        num_experts=EXPERTS,
        num_selected=2,
        hidden_dim=5,
        num_shared_experts=1,
        router=router,
        router_options=options,
    )
    local = layer.clone(router_options={**options, "axis_names": DATA})
    x = random_array(8, num_tokens // 8, MODEL, seed=1)
    mask = jnp.asarray(MASK).reshape(8, -1)
    variables = layer.init(jax.random.key(0), x)
    state = {key: value for key, value in variables.items() if key != "params"}

    def objective(layer, axis_names, params, x, mask):
        out, routing = layer.apply({**state, "params": params}, x, mask)
        losses = 0.3 * routing.load_balance_loss + 0.2 * routing.router_z_loss
        total = jnp.sum(jnp.sin(out))
        if axis_names:
            total = jax.lax.psum(total, axis_names)
        metrics = routing_metrics(routing, axis_names=axis_names)
        bias = update_balance_bias(jnp.zeros(EXPERTS), metrics.load)
        return total + losses, (out, (losses, metrics, bias))

    whole = jax.jit(jax.value_and_grad(functools.partial(objective, layer, ()), has_aux=True))
    sharded = shard_map(
        functools.partial(objective, local, DATA),
        (P(), P(DATA), P(DATA)),
        (P(), (P(DATA), P())),
    )
    actual = jax.value_and_grad(sharded, has_aux=True)(variables["params"], x, mask)
    close(actual, whole(variables["params"], x, mask), rtol=1e-4, atol=1e-5)


def check_noise():
    """Under jit on sharded tokens, noise and dropout are those of one device, token by token."""
    layer = SparseMoE(
        num_experts=EXPERTS,
        num_selected=2,
        hidden_dim=5,
        router="noisy_top_k",
        router_options={"jitter": 0.2},
        dropout_rate=0.3,
    )
    x = random_array(TOKENS, MODEL)
    variables = layer.init({"params": jax.random.key(0), "router": jax.random.key(1)}, x)
    rngs = {"router": jax.random.key(2), "dropout": jax.random.key(3)}

    @jax.jit
    def apply(x):
        return layer.apply(variables, x, deterministic=False, rngs=rngs)

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
    close(apply(split), apply(x), rtol=1e-4, atol=1e-5)
    print("noise")


if __name__ == "__main__":
    assert jax.device_count() == 8
    jax.config.update("jax_numpy_rank_promotion", "raise")
    check_losses()
    check_metrics()
    check_layer("sigmoid", TOKENS)
    print("layer")
    check_layer("soft", TOKENS, gate="linear", gate_options={})
    print("soft")
    check_noise()
