"""Run by test_expert_parallel.py in a process of its own, which sees the CPU as eight devices."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core import SparseMoE
from moe_jax.sharding import ExpertParallel, MeshConfig, make_mesh

mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))
layer = SparseMoE(num_experts=4, num_selected=2, hidden_dim=6, implementation="dense")
x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 7, 5)), jnp.float32)
mask = jnp.asarray(np.arange(21).reshape(3, 7) % 4 != 1)
variables = layer.init(jax.random.key(0), x)

def f(layer):
    def loss(variables, x):
        y, routing = layer.apply(variables, x, mask)
        return jnp.sum(jnp.sin(y)) + routing.load_balance_loss, y
    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, x)

ref = f(layer)
for exchange in ("gather", "fixed", "ragged"):
    out = f(layer.clone(exchange=ExpertParallel(mesh, exchange)))
    print(exchange, jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), out, ref))
