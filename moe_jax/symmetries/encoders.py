"""Encoders: from the observations of a row to a state and a memory at each of them.

- `bigru` reads forwards and backwards and smooths; only forwards where causal.
- `odernn` (structure of the paper as publicly described, after Rubanova et al., arXiv 1907.03907)
  moves the state by the mixture's own flow between observations and corrects it at each:
  z_i^- = Flow(z_{i-1}; pi_{i-1}, t_i - t_{i-1}), h_i = GRU([x_i, m_i, gap_i, z_i^-], h_{i-1}),
  z_i = z_i^- + W_o tanh(W_z [h_i, z_i^-]), and pi_i is recomputed from z_i, h_i.
- `transformer` attends to every observation, or to the earlier ones where causal.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import Context, gaps
from moe_jax.symmetries.nets import (
    Params,
    attention_layer,
    float_type,
    gru,
    gru_cell,
    init_attention_layer,
    init_gru,
    init_linear,
    init_mlp,
    linear,
    mlp,
)

LAYERS = 2
FREQUENCIES = 4

Flow = Callable[[Array, Array, Array], Array]
"""(z [rows, latent], gate [rows, experts], time [rows]) -> z."""

GateFunction = Callable[[Array, Array], Array]
"""(z, h) -> gate."""


def init_encoder(key: Array, config: LatentMoSConfig) -> Params:
    """Parameters of the encoder that `config.encoder` names."""
    keys = jax.random.split(key, 4)
    observed = 2 * config.obs_dim + config.input_dim
    width, hidden = observed + 1, config.hidden
    latent = config.latent_dim * (2 if config.variational else 1)
    if config.encoder == "odernn":
        return {
            "gru": init_gru(keys[0], width + latent, hidden),
            "correction": init_mlp(keys[1], (hidden + latent, hidden, latent)),
            "start": jnp.zeros(latent, float_type()),
        }
    if config.encoder == "transformer":
        layers = jax.random.split(keys[0], LAYERS)
        params = {
            f"layer_{index}": init_attention_layer(layers[index], hidden) for index in range(LAYERS)
        }
        params["embedding"] = init_linear(keys[1], width + 2 * FREQUENCIES, hidden)
        memory = hidden
    else:
        params = {"forward": init_gru(keys[0], width, hidden)}
        if not config.causal:
            params["backward"] = init_gru(keys[1], width, hidden)
        memory = hidden if config.causal else 2 * hidden
        params["memory"] = init_linear(keys[3], memory, hidden)
    params["state"] = init_mlp(keys[2], (memory + observed, hidden, latent))
    return params


def encode(
    params: Params,
    config: LatentMoSConfig,
    context: Context,
    flow: Flow,
    gate: GateFunction,
    window: Array,
) -> tuple[Float[Array, "rows times state"], Float[Array, "rows times hidden"]]:
    """State and memory at every observation.

    Args:
        params: see `init_encoder`.
        config: of the model.
        context: the observations.
        flow, gate: of the finest level, which `odernn` moves its state by.
        window: span of the training data, the longest period of the transformer's time features.

    Returns:
        The state, of `latent_dim` entries, or twice as many (mean, log variance) for a variational
        model; and the memory. Both mean nothing where nothing is observed.
    """
    seen = [context.values, context.mask.astype(context.values.dtype)]
    if context.inputs is not None:
        seen.append(context.inputs)
    observed = jnp.concatenate(seen, axis=-1)
    before, after = (_squash(gap) for gap in gaps(context))
    if config.encoder == "odernn":
        return _ode_rnn(params, context, observed, before, flow, gate)
    if config.encoder == "transformer":
        memory = _transformer(params, config, context, observed, before, window)
        hidden = memory
    else:
        parts = [gru(params["forward"], jnp.concatenate([observed, before], -1), context.keep)]
        if not config.causal:
            x = jnp.concatenate([observed, after], -1)
            parts.append(gru(params["backward"], x, context.keep, reverse=True))
        memory = jnp.concatenate(parts, axis=-1)
        hidden = jnp.tanh(linear(params["memory"], memory))
    return mlp(params["state"], jnp.concatenate([memory, observed], axis=-1)), hidden


def _squash(gap: Float[Array, "rows times"]) -> Float[Array, "rows times 1"]:
    # About 0.7 at the median gap, which is 0.1 of the unit, and still of order 1 at a thousand.
    return jnp.log1p(10.0 * gap)[..., None]


def _ode_rnn(
    params: Params, context: Context, observed: Array, gap: Array, flow: Flow, gate: GateFunction
) -> tuple[Array, Array]:
    rows = observed.shape[0]
    hidden = params["gru"]["recurrent"]["kernel"].shape[0]
    start = jnp.broadcast_to(params["start"][None, :], (rows, params["start"].shape[0]))
    memory = jnp.zeros((rows, hidden), observed.dtype)
    last = context.times[:, 0]

    def step(carry: tuple[Array, ...], now: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
        z, h, weights, last = carry
        x, gap, time, keep = now
        moved = flow(z, weights, time - last)
        projected = linear(params["gru"]["input"], jnp.concatenate([x, gap, moved], axis=-1))
        new_h = gru_cell(params["gru"], projected, h)
        new_z = moved + mlp(params["correction"], jnp.concatenate([new_h, moved], axis=-1))
        new = new_z, new_h, gate(new_z, new_h), time
        old = z, h, weights, last
        carry = tuple(
            jnp.where(keep.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)
            for a, b in zip(new, old, strict=True)
        )
        return carry, carry[:2]

    carry = start, memory, gate(start, memory), last
    scanned = tuple(
        jnp.moveaxis(leaf, 1, 0) for leaf in (observed, gap, context.times, context.keep)
    )
    _, (z, h) = jax.lax.scan(step, carry, scanned)
    return jnp.moveaxis(z, 0, 1), jnp.moveaxis(h, 0, 1)


def _transformer(
    params: Params,
    config: LatentMoSConfig,
    context: Context,
    observed: Array,
    gap: Array,
    window: Array,
) -> Array:
    octaves = 2.0 ** jnp.arange(FREQUENCIES, dtype=observed.dtype) * (2.0 * jnp.pi)
    phase = context.times[..., None] / window * octaves[None, None, :]
    features = jnp.concatenate([observed, gap, jnp.sin(phase), jnp.cos(phase)], axis=-1)
    size = observed.shape[1]
    visible = jnp.broadcast_to(context.keep[:, None, :], (observed.shape[0], size, size))
    if config.causal:
        visible = visible & jnp.tri(size, dtype=jnp.bool_)[None]
    x = linear(params["embedding"], features)
    for index in range(LAYERS):
        x = attention_layer(params[f"layer_{index}"], x, visible, heads=_heads(config.hidden))
    return x


def _heads(hidden: int) -> int:
    return 2 if hidden % 2 == 0 else 1
