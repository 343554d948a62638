"""Beyond the last observation: with its gate kept, or asked again on the way."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import Scales, last_index
from moe_jax.symmetries.data import IrregularBatch, as_times, check_integer, fill
from moe_jax.symmetries.decoders import decode
from moe_jax.symmetries.mixing import read_out
from moe_jax.symmetries.model import LatentMoS, MoSOutput, level_gate, move, predict
from moe_jax.symmetries.nets import Params

MODES = ("frozen", "regate")


def extrapolate(
    model: LatentMoS,
    variables: Any,
    batch: IrregularBatch,
    horizon: Any,
    *,
    mode: str = "frozen",
    substeps: int = 1,
) -> Float[Array, "rows steps channels"]:
    """Values at given times after each row's last observation.

    `frozen` moves the last state under the last gate. `regate` moves from time to time of the
    horizon and asks the gate anew each time; under `algebra` mixing with an invariant gate and no
    growth both agree.

    Args:
        model, variables: as trained, of point observations.
        batch: see `predict`.
        horizon: [steps], increasing times after the last observation, in original units.
        mode: `frozen` or `regate`.
        substeps: equal parts into which `regate` cuts each step.

    Raises:
        ValueError: for an unknown mode, times that are not positive and increasing, a gate that
            cannot be asked anew, a model of interval means, or unusable data.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {MODES}")
    horizon = as_times("horizon", horizon)
    is_increasing = horizon.ndim == 1 and (np.diff(horizon, prepend=0.0) > 0).all()
    if not (horizon.size and is_increasing and np.isfinite(horizon).all()):
        raise ValueError(f"horizon={horizon} must be positive increasing times [steps]")
    if model.config.observation != "point":
        raise ValueError("observation='mean' is asked by queries; see predict")
    check_integer("substeps", substeps, 1)
    # Padding repeats a row's last time.
    times = fill(batch).times
    last = times[:, -1]
    query = last[:, None] + horizon[None, :]
    output = predict(model, variables, batch, query)
    if mode == "frozen":
        return output.mean
    if model.config.gate == "hidden":
        raise ValueError("gate='hidden' sees the encoder's memory, which ends with the data")
    # Each level's own last anchor may lie before the row's last observation.
    relative = times - times[:, :1]
    return _regate(model, variables, output, relative, query - times[:, :1], substeps)


def _regate(
    model: LatentMoS,
    variables: Any,
    output: MoSOutput,
    times: np.ndarray,
    query: np.ndarray,
    substeps: int,
) -> Array:
    dtype = output.mean.dtype
    times, query = times.astype(dtype), query.astype(dtype)
    return _regate_jitted(model.config, substeps, variables, output, times, query)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _regate_jitted(
    config: LatentMoSConfig,
    substeps: int,
    variables: Any,
    output: MoSOutput,
    times: Array,
    query: Array,
) -> Array:
    params, scales = variables["params"], variables["scales"]["scales"]
    latents = [
        _walk(params, config, scales, output, times, query, level, substeps)
        for level in range(config.levels)
    ]
    decoded = decode(params["decoder"], config, jnp.concatenate(latents, axis=-1))
    return decoded * scales.std[None, None, :] + scales.mean[None, None, :]


def _walk(
    params: Params,
    config: LatentMoSConfig,
    scales: Scales,
    output: MoSOutput,
    times: Array,
    query: Array,
    level: int,
    substeps: int,
) -> Array:
    """What the decoder sees of one level at every query."""
    last = jnp.maximum(last_index(output.is_anchor[level])[:, -1], 0)
    rows = jnp.arange(last.shape[0], dtype=jnp.int32)
    z = output.anchor_latent[level][rows, last]
    spans = jnp.diff(query, axis=1, prepend=times[rows, last][:, None]) / scales.time_unit

    def part(z: Array, span: Array) -> Array:
        return move(
            params, config, z, level_gate(params, config, z, level=level), span, level=level
        )

    def step(z: Array, span: Array) -> tuple[Array, Array]:
        z = jax.lax.fori_loop(0, substeps, lambda _, z: part(z, span / substeps), z)
        return z, read_out(z, level_gate(params, config, z, level=level), mixing=config.mixing)

    return jnp.moveaxis(jax.lax.scan(step, z, spans.T)[1], 0, 1)
