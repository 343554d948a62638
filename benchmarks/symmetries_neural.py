"""Peers with neural vector fields, solved by diffrax: anchored neural ODE, Latent ODE, ODE-RNN.

All have the encoder, the decoder, the standardisation, the hiding of observations and the optimiser
of the latent mixture of symmetries; what differs is the vector field, an MLP d - 50 - d, and where
states are anchored:

- anchored neural ODE: the same local anchors, blend and latent consistency, the only fair control
  of the flow;
- Latent ODE (arXiv 1907.03907, deterministic): one state at a row's first observation;
- ODE-RNN (same paper): the state moves under the field between observations and is corrected at
  each; a query is answered from the observation before it.

Heun's method with a fixed number of steps, each path solved once: 4 steps from an observation to
its neighbour, read at the queries by cubic Hermite interpolation, 2 between observations of the
ODE-RNN's encoder, and one solve of 64 steps a row for all that lies behind the last observation, or
behind the first for the Latent ODE.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax.symmetries.anchors import Neighbours, locate
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import (
    Context,
    Scales,
    as_arrays,
    drop_rows,
    gaps,
    make_context,
    measure_scales,
)
from moe_jax.symmetries.decoders import decode, init_decoder
from moe_jax.symmetries.encoders import encode, init_encoder
from moe_jax.symmetries.examples import ExampleBatches, Examples
from moe_jax.symmetries.fit import OPTIMIZER, make_loss_function, make_optimizer, prepare
from moe_jax.symmetries.losses import LossConfig, consistency
from moe_jax.symmetries.main import Data
from moe_jax.symmetries.model import init_params, ready
from moe_jax.symmetries.nets import Params, init_mlp, mlp

FIELD_HIDDEN = 50
KNOTS = 4
DROP = (0.0, 0.5)


class NeuralFit(NamedTuple):
    """Answers on the test grid [rows, times, channels], of the step that validates best."""

    answer: np.ndarray
    validation_error: float


def config_of(name: str, obs_dim: int, width: int) -> LatentMoSConfig:
    """Encoder and decoder of a peer with `width` latent coordinates."""
    is_recurrent = name == "ODE-RNN"
    return LatentMoSConfig(
        obs_dim=obs_dim,
        planes=width // 2,
        translations=width % 2,
        experts=1,
        gate="fixed",
        encoder="odernn" if is_recurrent else "bigru",
        anchors={"anchored neural ODE": "local", "Latent ODE": "initial"}.get(name, "last"),
        causal=is_recurrent,
    )


def init_neural(key: jax.Array, config: LatentMoSConfig) -> Params:
    """Encoder, decoder and vector field."""
    keys = jax.random.split(key, 3)
    width = config.latent_dim
    return {
        "encoder": init_encoder(keys[0], config),
        "decoder": init_decoder(keys[1], config),
        "field": init_mlp(keys[2], (width, FIELD_HIDDEN, width)),
    }


def move(field: Params, z: jax.Array, span: jax.Array, steps: int) -> jax.Array:
    """Solves dz/dt = f(z) from 0 to `span`, of either sign, for each state by itself."""

    def one(z: jax.Array, span: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, args: span * mlp(field, z)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=1.0 / steps,
            y0=z,
            max_steps=steps + 1,
        )
        return solution.ys[0]

    flat = jax.vmap(one)(z.reshape(-1, z.shape[-1]), span.reshape(-1))
    return flat.reshape(z.shape)


def answer(
    params: Params,
    config: LatentMoSConfig,
    scales: Scales,
    context: Context,
    query: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Standardised channels at queries [rows, queries] of rescaled time, and the penalty."""
    nothing = jnp.zeros((), query.dtype)
    state, _ = encode(
        params["encoder"],
        config,
        context,
        lambda z, _, time: move(params["field"], z, time, 2),
        lambda z, h: jnp.ones((*z.shape[:-1], 1), z.dtype),
        scales.window,
    )
    state = jnp.where(context.keep[..., None], state, 0.0)
    rows = jnp.arange(query.shape[0], dtype=jnp.int32)
    if config.anchors == "initial":
        at = jnp.argmax(context.keep, axis=1).astype(jnp.int32)
        latent = _along_rows(params, state[rows, at], context.times[rows, at], query)
        return decode(params["decoder"], config, latent), nothing
    size = jnp.int32(context.keep.shape[1] - 1)
    first = jnp.argmax(context.keep, axis=1).astype(jnp.int32)
    last = size - jnp.argmax(context.keep[:, ::-1], axis=1).astype(jnp.int32)
    end = context.times[rows, last]
    beyond = _along_rows(params, state[rows, last], end, query)
    is_beyond = (query > end[:, None])[..., None]
    place = locate(context.search_times, context.keep, query, anchors=config.anchors)
    before, after = gaps(context)
    forward = _knots(params["field"], state, after)
    among = _between(params["field"], forward, after, place, 0)
    if config.anchors == "last":
        is_early = (query < context.times[rows, first][:, None])[..., None]
        among = jnp.where(is_early, state[rows, first][:, None], among)
        return decode(params["decoder"], config, jnp.where(is_beyond, beyond, among)), nothing
    # The first observation's path backwards reaches the earliest query.
    early = jnp.maximum(context.times[rows, first] - jnp.min(query, axis=1), 1e-3)
    before = before.at[rows, first].set(early)
    backward = _knots(params["field"], state, -before)
    w = place.weight[..., None]
    among = w[..., 0, :] * among
    among = among + w[..., 1, :] * _between(params["field"], backward, -before, place, 1)
    decoded = decode(params["decoder"], config, jnp.where(is_beyond, beyond, among))
    defect = consistency(lambda *_: forward[..., -1, :], state, context.keep, context.times)
    return decoded, LossConfig().consistency * defect


def _knots(field: Params, z: jax.Array, span: jax.Array) -> jax.Array:
    """States [..., KNOTS + 1, d] at equal parts of each span, of either sign."""

    def one(z: jax.Array, span: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, args: span * mlp(field, z)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=1.0 / KNOTS,
            y0=z,
            saveat=diffrax.SaveAt(t0=True, steps=True),
            max_steps=KNOTS,
        )
        return solution.ys

    return jax.vmap(jax.vmap(one))(z, span)


def _between(
    field: Params, knots: jax.Array, spans: jax.Array, place: Neighbours, side: int
) -> jax.Array:
    """States at the queries on the paths from the anchors of one side, by cubic Hermite."""
    at = place.place[..., side]
    knots, spans = jax.vmap(lambda k, s, at: (k[at], s[at]))(knots, spans, at)
    safe = jnp.where(spans == 0, 1.0, spans)
    part = KNOTS * jnp.clip(place.span[..., side] / safe, 0.0, 1.0)
    low = jnp.clip(jnp.floor(part), 0, KNOTS - 1).astype(jnp.int32)
    s = (part - low.astype(part.dtype))[..., None]
    ends = [jnp.take_along_axis(knots, (low + k)[..., None, None], axis=2)[:, :, 0] for k in (0, 1)]
    slopes = [mlp(field, z) * spans[..., None] / KNOTS for z in ends]
    value = (1 + 2 * s) * (1 - s) ** 2 * ends[0] + s**2 * (3 - 2 * s) * ends[1]
    return value + s * (1 - s) ** 2 * slopes[0] - s**2 * (1 - s) * slopes[1]


def _along_rows(params: Params, z: jax.Array, start: jax.Array, query: jax.Array) -> jax.Array:
    """Latents at the queries, from one state a row at its time, in one solve."""
    order = jnp.argsort(query, axis=1)
    # A query before that time is answered at it.
    sorted_query = jnp.maximum(jnp.take_along_axis(query, order, 1), start[:, None])

    def one(z: jax.Array, start: jax.Array, times: jax.Array) -> jax.Array:
        end = jnp.maximum(times[-1], start + 1e-3)
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, args: (end - start) * mlp(params["field"], z)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=1.0 / 64,
            y0=z,
            saveat=diffrax.SaveAt(ts=(times - start) / (end - start)),
            max_steps=65,
        )
        return solution.ys

    latent = jax.vmap(one)(z, start, sorted_query)
    return jax.vmap(lambda values, order: jnp.zeros_like(values).at[order].set(values))(
        latent, order
    )


@functools.cache
def _functions(
    config: LatentMoSConfig, steps: int
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Jitted step, validation error and answer; kept, so that each compiles once."""
    optimizer = make_optimizer(OPTIMIZER, steps)

    def standardised(
        params: Params, scales: Scales, examples: Examples, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        batch = as_arrays(examples.context)
        if key is not None:
            batch = drop_rows(key, batch, DROP)
        query = jnp.asarray(examples.targets.times) / scales.time_unit
        return answer(params, config, scales, make_context(batch, scales), query)

    def error(
        params: Params, scales: Scales, examples: Examples, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        targets = examples.targets
        wanted = (targets.values - scales.mean[None, None]) / scales.std[None, None]
        answered, penalty = standardised(params, scales, examples, key)
        square = jnp.square(answered - wanted)
        count = jnp.maximum(jnp.sum(targets.mask, dtype=square.dtype), 1.0)
        return jnp.sum(jnp.where(targets.mask, square, 0.0)) / count, penalty

    @jax.jit
    def step(
        params: Params, opt_state: Any, scales: Scales, examples: Examples, key: jax.Array
    ) -> Any:
        loss, gradient = jax.value_and_grad(lambda *a: sum(error(*a)))(
            params, scales, examples, key
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return (
        step,
        jax.jit(lambda p, s, e: error(p, s, e, None)[0]),
        jax.jit(lambda p, s, e: standardised(p, s, e, None)[0]),
    )


def fit_neural(
    name: str, width: int, data: Data, *, seed: int, steps: int, starts: int
) -> NeuralFit:
    """Trains a peer from every start, and keeps what validates best of ten looks at each."""
    train, val = prepare(data.train.examples), prepare(data.val.examples)
    scales = jax.jit(lambda batch: measure_scales(as_arrays(batch)))(train.context)
    best: tuple[float, Any] = (np.inf, None)
    config = config_of(name, data.test.truth.shape[-1], width)
    step, validate, ask = _functions(config, steps)
    for start in range(starts):
        key = jax.random.fold_in(jax.random.key(seed), start)
        params = jax.jit(init_neural, static_argnums=1)(key, config)
        opt_state = make_optimizer(OPTIMIZER, steps).init(params)
        batches = ExampleBatches(train, min(64, len(train.context.lengths)), seed * 1009 + start)
        for index in range(steps):
            drop_key = jax.random.fold_in(key, index)
            params, opt_state, _ = step(params, opt_state, scales, next(batches), drop_key)
            if (index + 1) % max(steps // 10, 1) == 0:
                error = float(validate(params, scales, val))
                best = min(best, (error, params), key=lambda found: found[0])
    error, params = best
    query = np.broadcast_to(data.test.times, data.test.truth.shape[:2])
    context, query = ready(data.test.examples.context, query)
    targets = dataclasses.replace(data.test.examples.targets, times=query)
    predicted = ask(params, scales, Examples(context=context, targets=targets))
    predicted = np.asarray(predicted) * np.asarray(scales.std) + np.asarray(scales.mean)
    return NeuralFit(predicted, error)


def speed_steps(data: Data) -> dict[str, tuple[Callable[[], jax.Array], int]]:
    """A training step of each model on one batch, compiled and warm, and how many to time."""
    train = prepare(data.train.examples)
    scales = jax.jit(lambda batch: measure_scales(as_arrays(batch)))(train.context)
    obs_dim, key = data.test.truth.shape[-1], jax.random.key(0)
    found: dict[str, tuple[Callable[[], jax.Array], int]] = {}
    for name in ("anchored neural ODE", "Latent ODE", "ODE-RNN"):
        for width in (2, 8):
            config = config_of(name, obs_dim, width)
            params = init_neural(key, config)
            opt_state = make_optimizer(OPTIMIZER, 100).init(params)
            step = _functions(config, 100)[0]
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
