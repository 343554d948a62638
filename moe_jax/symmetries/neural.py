"""Baselines with neural vector fields, solved by diffrax: anchored neural ODE, Latent ODE, ODE-RNN.

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

diffrax comes with the extra `bench`; nothing else of the package needs it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

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
from moe_jax.symmetries.data import IrregularBatch
from moe_jax.symmetries.decoders import decode, init_decoder
from moe_jax.symmetries.encoders import encode, init_encoder
from moe_jax.symmetries.examples import ExampleBatches, Examples
from moe_jax.symmetries.fit import OPTIMIZER, check_channels, make_optimizer, prepare
from moe_jax.symmetries.losses import LossConfig, consistency
from moe_jax.symmetries.model import ready
from moe_jax.symmetries.nets import Params, init_mlp, mlp
from moe_jax.training import Interrupts

NEURAL = {"anchored neural ODE": "local", "Latent ODE": "initial", "ODE-RNN": "last"}
"""Names of the models, and their anchors."""

FIELD_HIDDEN = 50
DROP = (0.0, 0.5)
KNOTS = 4
LONG_STEPS = 64
LOOKS = 10


class NeuralFit(NamedTuple):
    """A fitted baseline.

    Attributes:
        config: its encoder and decoder.
        params: of the best look at the validation examples, over all starts.
        scales: units of the training data.
        validation_error: mean squared standardised error there.
    """

    config: LatentMoSConfig
    params: Params
    scales: Scales
    validation_error: float


def neural_config(name: str, obs_dim: int, width: int) -> LatentMoSConfig:
    """Encoder and decoder of a baseline with `width` latent coordinates.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in NEURAL:
        raise ValueError(f"name={name!r} is not one of {tuple(NEURAL)}")
    is_recurrent = name == "ODE-RNN"
    return LatentMoSConfig(
        obs_dim=obs_dim,
        planes=width // 2,
        translations=width % 2,
        experts=1,
        gate="fixed",
        encoder="odernn" if is_recurrent else "bigru",
        anchors=NEURAL[name],
        causal=is_recurrent,
    )


def init_neural(key: Array, config: LatentMoSConfig) -> Params:
    """Encoder, decoder and vector field."""
    keys = jax.random.split(key, 3)
    width = config.latent_dim
    return {
        "encoder": init_encoder(keys[0], config),
        "decoder": init_decoder(keys[1], config),
        "field": init_mlp(keys[2], (width, FIELD_HIDDEN, width)),
    }


def fit_neural(
    name: str,
    train_examples: Examples | IrregularBatch,
    val_examples: Examples | IrregularBatch,
    *,
    width: int = 8,
    seed: int = 0,
    steps: int = 2000,
    batch_size: int = 64,
    starts: int = 1,
    interrupts: Interrupts | None = None,
) -> NeuralFit:
    """Trains a baseline from every start, and keeps what validates best of ten looks at each.

    Args:
        name: of `NEURAL`.
        train_examples, val_examples: see `moe_jax.symmetries.fit.fit`.
        width: latent coordinates.
        seed, steps, batch_size, starts: see there; the optimiser is its default.
        interrupts: asks to stop, after which the best so far is returned.

    Raises:
        ValueError: for an unknown name, unusable data or options out of range.
        ImportError: without diffrax.
    """
    for option, value in (("width", width), ("steps", steps), ("starts", starts)):
        if value < 1:
            raise ValueError(f"{option}={value} must be at least 1")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed={seed} must be in [0, 2^31)")
    train, val = prepare(train_examples), prepare(val_examples)
    scales = jax.jit(lambda batch: measure_scales(as_arrays(batch)))(train.context)
    config = neural_config(name, train.targets.values.shape[-1], width)
    for part, examples in (("train_examples", train), ("val_examples", val)):
        check_channels(part, examples, config)
    best: tuple[float, Any] = (np.inf, None)
    step, validate, _ = neural_functions(config, steps)
    for start in range(starts):
        key = jax.random.fold_in(jax.random.key(seed), start)
        params = jax.jit(init_neural, static_argnums=1)(key, config)
        best = (np.inf, params) if best[1] is None else best
        opt_state = make_optimizer(OPTIMIZER, steps).init(params)
        size = min(batch_size, len(train.context.lengths))
        batches = ExampleBatches(train, size, seed * 1009 + start)
        for index in range(steps):
            drop_key = jax.random.fold_in(key, index)
            params, opt_state, _ = step(params, opt_state, scales, next(batches), drop_key)
            is_last = interrupts is not None and interrupts.requested is not None
            if (index + 1) % max(steps // LOOKS, 1) == 0 or is_last:
                error = float(validate(params, scales, val))
                best = min(best, (error, params), key=lambda found: found[0])
            if is_last:
                return NeuralFit(config, best[1], scales, best[0])
    return NeuralFit(config, best[1], scales, best[0])


def predict_neural(
    found: NeuralFit, batch: IrregularBatch, query: Any
) -> Float[Array, "rows queries channels"]:
    """Values at the queries; see `moe_jax.symmetries.predict`."""
    context, times = ready(batch, query)
    ask = neural_functions(found.config, 1)[2]
    standardised = ask(found.params, found.scales, context, times)
    return standardised * found.scales.std[None, None] + found.scales.mean[None, None]


@functools.cache
def neural_functions(
    config: LatentMoSConfig, steps: int
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Jitted training step, validation error and answer; kept, so that each compiles once."""
    optimizer = make_optimizer(OPTIMIZER, steps)

    def answered(
        params: Params, scales: Scales, batch: IrregularBatch, times: Any, key: Array | None
    ) -> tuple[Array, Array]:
        batch = as_arrays(batch)
        if key is not None:
            batch = drop_rows(key, batch, DROP)
        query = jnp.asarray(times) / scales.time_unit
        return neural_answer(params, config, scales, make_context(batch, scales), query)

    def error(
        params: Params, scales: Scales, examples: Examples, key: Array | None
    ) -> tuple[Array, Array]:
        targets = examples.targets
        wanted = (targets.values - scales.mean[None, None]) / scales.std[None, None]
        found, penalty = answered(params, scales, examples.context, targets.times, key)
        count = jnp.maximum(jnp.sum(targets.mask, dtype=found.dtype), 1.0)
        return jnp.sum(jnp.where(targets.mask, jnp.square(found - wanted), 0.0)) / count, penalty

    @jax.jit
    def step(
        params: Params, opt_state: Any, scales: Scales, examples: Examples, key: Array
    ) -> tuple[Params, Any, Array]:
        loss, gradient = jax.value_and_grad(lambda *given: sum(error(*given)))(
            params, scales, examples, key
        )
        # optax raises a float to the power of its int32 step count.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return (
        step,
        jax.jit(lambda p, s, examples: error(p, s, examples, None)[0]),
        jax.jit(lambda p, s, batch, times: answered(p, s, batch, times, None)[0]),
    )


def neural_answer(
    params: Params,
    config: LatentMoSConfig,
    scales: Scales,
    context: Context,
    query: Float[Array, "rows queries"],
) -> tuple[Float[Array, "rows queries channels"], Float[Array, ""]]:
    """Standardised channels at queries [rows, queries] of rescaled time, and the penalty."""
    nothing = jnp.zeros((), query.dtype)
    state, _ = encode(
        params["encoder"],
        config,
        context,
        lambda z, _, time: _solve(params["field"], z, time, 2)[..., -1, :],
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
    forward = _solve(params["field"], state, after, KNOTS)
    among = _between(params["field"], forward, after, place, 0)
    if config.anchors == "last":
        is_early = (query < context.times[rows, first][:, None])[..., None]
        among = jnp.where(is_early, state[rows, first][:, None], among)
        return decode(params["decoder"], config, jnp.where(is_beyond, beyond, among)), nothing
    # The first observation's path backwards reaches the earliest query.
    early = jnp.maximum(context.times[rows, first] - jnp.min(query, axis=1), 1e-3)
    before = before.at[rows, first].set(early)
    backward = _solve(params["field"], state, -before, KNOTS)
    w = place.weight[..., None]
    among = w[..., 0, :] * among
    among = among + w[..., 1, :] * _between(params["field"], backward, -before, place, 1)
    decoded = decode(params["decoder"], config, jnp.where(is_beyond, beyond, among))
    defect = consistency(lambda *_: forward[..., -1, :], state, context.keep, context.times)
    return decoded, LossConfig().consistency * defect


def _along_rows(params: Params, z: Array, start: Array, query: Array) -> Array:
    """Latents at the queries, from one state a row at its time, in one solve.

    A query before that time is answered at it.
    """
    late = jnp.maximum(query, start[:, None])
    span = jnp.maximum(jnp.max(late, axis=1) - start, 1e-3)
    knots = _solve(params["field"], z, span, LONG_STEPS)
    part = (late - start[:, None]) / span[:, None]
    at = jnp.broadcast_to(jnp.arange(z.shape[0], dtype=jnp.int32)[:, None], part.shape)
    return _hermite(params["field"], knots[at], span[at], part)


def _between(field: Params, knots: Array, spans: Array, place: Neighbours, side: int) -> Array:
    """States at the queries on the paths from the anchors of one side."""
    at = place.place[..., side]
    knots, spans = jax.vmap(lambda k, s, at: (k[at], s[at]))(knots, spans, at)
    part = place.span[..., side] / jnp.where(spans == 0, 1.0, spans)
    return _hermite(field, knots, spans, jnp.clip(part, 0.0, 1.0))


def _hermite(
    field: Params,
    knots: Float[Array, "rows queries knots d"],
    span: Float[Array, "rows queries"],
    part: Float[Array, "rows queries"],
) -> Float[Array, "rows queries d"]:
    """States at a part of each path, by cubic Hermite interpolation between its knots."""
    steps = knots.shape[2] - 1
    place = steps * part
    low = jnp.clip(jnp.floor(place), 0, steps - 1).astype(jnp.int32)
    s = (place - low.astype(place.dtype))[..., None]
    ends = [jnp.take_along_axis(knots, (low + k)[..., None, None], axis=2)[:, :, 0] for k in (0, 1)]
    slopes = [mlp(field, z) * span[..., None] / steps for z in ends]
    value = (1 + 2 * s) * (1 - s) ** 2 * ends[0] + s**2 * (3 - 2 * s) * ends[1]
    return value + s * (1 - s) ** 2 * slopes[0] - s**2 * (1 - s) * slopes[1]


def _solve(
    field: Params, z: Float[Array, "*batch d"], span: Float[Array, "*batch"], steps: int
) -> Float[Array, "*batch knots d"]:
    """States of dz/dt = f(z) at 0, between equal steps, and at each span, of either sign."""
    import diffrax

    def one(z: Array, span: Array) -> Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, args: span * mlp(field, z)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=1.0 / steps,
            y0=z,
            saveat=diffrax.SaveAt(t0=True, steps=True),
            max_steps=steps,
        )
        assert solution.ys is not None
        return solution.ys

    knots = jax.vmap(one)(z.reshape(-1, z.shape[-1]), span.reshape(-1))
    return knots.reshape(*z.shape[:-1], *knots.shape[1:])
