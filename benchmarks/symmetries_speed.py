"""Training steps of the latent mixture of symmetries and of the neural baselines, to be timed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from moe_jax.symmetries import LatentMoSConfig
from moe_jax.symmetries.context import Scales, as_arrays, measure_scales
from moe_jax.symmetries.examples import Examples
from moe_jax.symmetries.fit import OPTIMIZER, make_loss_function, make_optimizer, prepare
from moe_jax.symmetries.losses import LossConfig
from moe_jax.symmetries.main import Data
from moe_jax.symmetries.model import init_params
from moe_jax.symmetries.nets import Params
from moe_jax.symmetries.neural import DROP, NEURAL, init_neural, neural_config, neural_functions


def speed_steps(data: Data) -> dict[str, tuple[Callable[[], jax.Array], int]]:
    """A training step of each model on one batch, compiled and warm, and how many to time."""
    train = prepare(data.train.examples)
    scales = jax.jit(lambda batch: measure_scales(as_arrays(batch)))(train.context)
    obs_dim, key = data.test.truth.shape[-1], jax.random.key(0)
    found: dict[str, tuple[Callable[[], jax.Array], int]] = {}
    for name in NEURAL:
        for width in (2, 8):
            config = neural_config(name, obs_dim, width)
            params = init_neural(key, config)
            opt_state = make_optimizer(OPTIMIZER, 100).init(params)
            step = neural_functions(config, 100)[0]
            found[f"{name}, d = {width}"] = (
                functools.partial(_last, step, params, opt_state, scales, train, key),
                5,
            )
    for width in (2, 8):
        config = LatentMoSConfig(obs_dim=obs_dim, planes=width // 2)
        step = mos_step(config)
        params = jax.jit(init_params, static_argnums=1)(key, config, scales)
        opt_state = make_optimizer(OPTIMIZER, 100).init(params)
        found[f"latent mixture of symmetries, d = {width}"] = (
            functools.partial(_last, step, params, opt_state, scales, train, key),
            20,
        )
    for step, _ in found.values():
        jax.block_until_ready(step())
    return found


def mos_step(config: LatentMoSConfig) -> Callable[..., Any]:
    """A step of the latent mixture of symmetries without the training loop, as the peers' are."""
    loss_function = make_loss_function(config, LossConfig(), DROP)
    optimizer = make_optimizer(OPTIMIZER, 100)

    @jax.jit
    def step(
        params: Params, opt_state: Any, scales: Scales, examples: Examples, key: jax.Array
    ) -> Any:
        state = {"scales": {"scales": scales}, "progress": {"step": jnp.zeros((), jnp.int32)}}

        def loss(params: Params) -> jax.Array:
            one = jnp.ones((), jnp.float32)
            return loss_function(params, state, examples, one, key)[0]

        value, gradient = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def _last(step: Callable[..., Any], *arguments: Any) -> jax.Array:
    return step(*arguments)[2]
