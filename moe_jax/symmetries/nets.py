"""The few nets that encoders, gates and decoders are made of, as pure functions of parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Params = dict[str, Any]


def float_type() -> Any:
    """float32, or float64 where the session computes in it."""
    return jnp.zeros(()).dtype


def init_linear(key: Array, width_in: int, width_out: int, *, gain: float = 1.0) -> Params:
    """Kernel of variance gain^2 / width_in, bias 0."""
    kernel = jax.random.normal(key, (width_in, width_out), float_type())
    return {
        "kernel": kernel * (gain / max(width_in, 1) ** 0.5),
        "bias": jnp.zeros(width_out, float_type()),
    }


def linear(params: Params, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
    """X W + b."""
    bias = params["bias"].reshape((1,) * (x.ndim - 1) + (-1,))
    return x @ params["kernel"] + bias


def init_mlp(key: Array, widths: Sequence[int], *, last_gain: float = 1.0) -> Params:
    """Parameters of `mlp` with the given widths, input and output included."""
    keys = jax.random.split(key, len(widths) - 1)
    gains = [1.0] * (len(widths) - 2) + [last_gain]
    return {
        f"layer_{index}": init_linear(keys[index], *widths[index : index + 2], gain=gain)
        for index, gain in enumerate(gains)
    }


def mlp(params: Params, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
    """Linear layers with tanh between them."""
    for index in range(len(params)):
        x = linear(params[f"layer_{index}"], jnp.tanh(x) if index else x)
    return x


def init_gru(key: Array, width_in: int, hidden: int) -> Params:
    """Parameters of `gru_cell`."""
    input_key, hidden_key = jax.random.split(key)
    recurrent = jax.random.normal(hidden_key, (3, hidden, hidden), float_type())
    orthogonal = jnp.linalg.qr(recurrent)[0]
    return {
        "input": init_linear(input_key, width_in, 3 * hidden),
        "recurrent": {"kernel": jnp.concatenate(list(orthogonal), axis=-1)},
        "recurrent_bias": {"bias": jnp.zeros(hidden, float_type())},
    }


def gru_cell(
    params: Params, projected: Float[Array, "rows three_hidden"], h: Float[Array, "rows hidden"]
) -> Float[Array, "rows hidden"]:
    """Gated recurrent unit (arXiv 1406.1078), the reset applied after the product (cuDNN's form).

    Args:
        params: see `init_gru`.
        projected: `linear(params["input"], x)`, which needs no recursion and is taken outside it.
        h: the memory.
    """
    reset_in, update_in, new_in = jnp.split(projected, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(h @ params["recurrent"]["kernel"], 3, axis=-1)
    reset = jax.nn.sigmoid(reset_in + reset_h)
    update = jax.nn.sigmoid(update_in + update_h)
    new = jnp.tanh(new_in + reset * (new_h + params["recurrent_bias"]["bias"][None, :]))
    return (1.0 - update) * new + update * h


def gru(
    params: Params,
    x: Float[Array, "rows times inputs"],
    keep: Bool[Array, "rows times"],
    *,
    reverse: bool = False,
) -> Float[Array, "rows times hidden"]:
    """Memory after every time; a time that is not kept leaves it as it was."""
    projected = linear(params["input"], x)
    hidden = params["recurrent"]["kernel"].shape[0]

    def step(h: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        projected_now, keep_now = inputs
        h = jnp.where(keep_now[:, None], gru_cell(params, projected_now, h), h)
        return h, h

    start = jnp.zeros((x.shape[0], hidden), x.dtype)
    scanned = jnp.moveaxis(projected, 1, 0), keep.T
    _, memory = jax.lax.scan(step, start, scanned, reverse=reverse)
    return jnp.moveaxis(memory, 0, 1)


def init_attention_layer(key: Array, width: int) -> Params:
    """Parameters of `attention_layer`."""
    keys = jax.random.split(key, 4)
    return {
        "query_key_value": init_linear(keys[0], width, 3 * width),
        "output": init_linear(keys[1], width, width, gain=0.5),
        "mlp": init_mlp(keys[2], (width, 2 * width, width), last_gain=0.5),
    }


def attention_layer(
    params: Params,
    x: Float[Array, "rows times width"],
    visible: Bool[Array, "rows times times"],
    *,
    heads: int = 2,
) -> Float[Array, "rows times width"]:
    """Pre-norm attention and MLP with residuals; a time that sees nothing attends to nothing."""
    rows, times, width = x.shape
    projected = linear(params["query_key_value"], _normalise(x))
    query, key, value = jnp.moveaxis(projected.reshape(rows, times, 3, heads, -1), 2, 0)
    score = jnp.einsum("rqhc,rkhc->rhqk", query, key) / (width // heads) ** 0.5
    seen = visible[:, None]
    score = jnp.where(seen, score, -1e30)
    weight = jnp.where(seen, jax.nn.softmax(score, axis=-1), 0.0)
    mixed = jnp.einsum("rhqk,rkhc->rqhc", weight, value).reshape(rows, times, -1)
    x = x + linear(params["output"], mixed)
    return x + mlp(params["mlp"], _normalise(x))


def _normalise(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-6)
