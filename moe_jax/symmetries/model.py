"""The latent mixture of symmetries: observations to states, flow, and back to channels.

After Li, Xiao, Guo and Weng, "Latent Mixture of Symmetries for Sample-Efficient Dynamic Learning"
(arXiv 2510.03578), whose equations could not be read. As publicly described there: experts are
latent flows of Lie groups, their outputs are averaged (`mixing="output"`), the backbone is like an
ODE-RNN (`encoder="odernn"`), weights are recomputed at every step (`gate="hidden"` is nearest), and
blocks are stacked over time scales (`levels`). Everything else, the defaults included, is our own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.symmetries.anchors import (
    MAX_SPAN,
    Level,
    Neighbours,
    evaluate,
    level_anchors,
    locate,
    segment_means,
)
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import (
    GAPS_PER_UNIT,
    Context,
    Scales,
    as_arrays,
    check_shapes,
    drop_rows,
    make_context,
    measure_scales,
    relative_times,
)
from moe_jax.symmetries.data import IrregularBatch, as_times, fill, validate
from moe_jax.symmetries.decoders import decode, gauss_means, gauss_queries, init_decoder
from moe_jax.symmetries.encoders import encode, init_encoder
from moe_jax.symmetries.gates import gate, init_gate
from moe_jax.symmetries.generators import expert_rates, init_generators, rate_matrices
from moe_jax.symmetries.mixing import mixture_flow
from moe_jax.symmetries.nets import Params, float_type, init_linear, init_mlp, linear, mlp


@chex.dataclass(frozen=True)
class MoSOutput:
    """What the model says at the queries, and the states it says it from.

    Attributes:
        mean: [rows, queries, channels], in the units of the values.
        logvar: the same shape, log variance of a channel, of a `gaussian` likelihood; else None.
        latent: [rows, queries, latents of all levels], as the decoder sees it.
        anchor_latent: [levels, rows, times, latent], of meaning where `is_anchor`.
        gates: [levels, rows, times, experts].
        is_anchor: bool[levels, rows, times].
        valid: bool[rows, queries], False in a row without observations, for a query that is not
            finite, and beyond the model's horizon. The mean is finite all the same.
        kl: [rows], divergence of the states' distribution from the standard normal; None unless
            variational.
    """

    mean: Array
    logvar: Array | None
    latent: Array
    anchor_latent: Array
    gates: Array
    is_anchor: Array
    valid: Array
    kl: Array | None


class LatentMoS(nn.Module):
    """Holds the parameters of a latent mixture of symmetries.

    `init(key, batch, query)` also measures the units of that batch, which are kept in the
    collection `scales`; initialise with the training data.

    Example:
        >>> import numpy as np
        >>> model = LatentMoS(LatentMoSConfig(obs_dim=1))
        >>> batch = IrregularBatch(times=np.zeros((2, 3)), values=np.zeros((2, 3, 1)))
        >>> variables = model.init(jax.random.key(0), batch, np.zeros((2, 5)))
        >>> model.apply(variables, batch, np.ones((2, 5))).mean.shape
        (2, 5, 1)
    """

    config: LatentMoSConfig

    @nn.compact
    def __call__(
        self,
        batch: IrregularBatch,
        query: Any,
        *,
        key: Array | None = None,
        drop: tuple[float, float] = (0.0, 0.0),
    ) -> MoSOutput:
        """Values at the queried times.

        Times in NumPy arrays keep their precision whatever their origin; inside jit they have the
        session's, so that `predict` or `relative_times` comes before.

        Args:
            batch: rows sorted in time, see `moe_jax.symmetries.data.validate`.
            query: [rows, queries], in any order and on any side of the observations.
            key: draws what is hidden by `drop`, and the states of a variational model; None for
                evaluation.
            drop: lowest and highest share of a row's observations that is hidden.

        Raises:
            ValueError: if shapes do not fit the model.
        """
        config = self.config
        check_shapes(batch, query, config.obs_dim, config.input_dim)
        batch, query = relative_times(batch, query)
        batch, query = as_arrays(batch), jnp.asarray(query).astype(float_type())
        scales = self.variable("scales", "scales", lambda: measure_scales(batch)).value
        initializers = _initializers(config, scales)
        params = {name: self.param(name, init) for name, init in initializers.items()}
        if key is not None:
            drop_key, key = jax.random.split(key)
            batch = drop_rows(drop_key, batch, drop)
        return latent_mos(params, config, scales, batch, query, key)


def init_params(key: Array, config: LatentMoSConfig, scales: Scales) -> Params:
    """Parameters of the model for data of these scales."""
    return {
        name: init(jax.random.fold_in(key, index))
        for index, (name, init) in enumerate(_initializers(config, scales).items())
    }


def _initializers(
    config: LatentMoSConfig, scales: Scales
) -> dict[str, Callable[[Array], Params | Array]]:
    found: dict[str, Callable[[Array], Params | Array]] = {
        "encoder": lambda key: init_encoder(key, config),
        "decoder": lambda key: init_decoder(key, config),
    }
    for index in range(config.levels):
        found[f"level_{index}"] = functools.partial(
            _init_level, config=config, level=index, window=scales.window
        )
    if config.likelihood == "gaussian":
        found["log_noise"] = lambda key: jnp.full(config.obs_dim, -1.0, float_type())
    return found


def latent_mos(
    params: Params,
    config: LatentMoSConfig,
    scales: Scales,
    batch: IrregularBatch,
    query: Float[Array, "rows queries"],
    key: Array | None = None,
) -> MoSOutput:
    """The model as a pure function of its parameters.

    Args:
        params: of `LatentMoS`.
        config: of the model.
        scales: units of the training data.
        batch: of `as_arrays`, with times relative to each row's first.
        query: on the same clock.
        key: draws the states of a variational model, whose means are taken without.
    """
    context = make_context(batch, scales)
    levels, kl = _states(params, config, context, scales.window, key)
    is_finite = jnp.isfinite(query)
    query = jnp.where(is_finite, query, 0.0) / scales.time_unit
    query = jnp.clip(query, -2.0 * MAX_SPAN, 2.0 * MAX_SPAN)
    mean, latent, outside = _read(params, config, scales, context, levels, query)
    limit = jnp.minimum(config.max_horizon / scales.time_unit, MAX_SPAN)
    has_anchor = jnp.any(context.keep, axis=1, keepdims=True)
    logvar = None
    if config.likelihood == "gaussian":
        logvar = 2.0 * (params["log_noise"] + jnp.log(scales.std))
        logvar = jnp.broadcast_to(logvar[None, None, :], mean.shape)
    return MoSOutput(
        mean=mean * scales.std[None, None, :] + scales.mean[None, None, :],
        logvar=logvar,
        latent=latent,
        anchor_latent=jnp.stack([level.z for level in levels]),
        gates=jnp.stack([level.gate for level in levels]),
        is_anchor=jnp.stack([level.is_anchor for level in levels]),
        valid=is_finite & has_anchor & (outside <= limit),
        kl=kl,
    )


def generators(params: Params, config: LatentMoSConfig) -> Float[Array, "levels experts d d"]:
    """Every expert's generator as a matrix, per rescaled time unit; linear parts only."""
    return jnp.stack(
        [
            rate_matrices(expert_rates(params[f"level_{index}"]["generators"], config))
            for index in range(config.levels)
        ]
    )


def move(
    params: Params,
    config: LatentMoSConfig,
    z: Float[Array, "*batch d"],
    weights: Float[Array, "*batch experts"],
    time: Float[Array, "*batch"],
    *,
    level: int = 0,
) -> Float[Array, "*batch d"]:
    """The flow of one level for given gate weights; time in rescaled units, of either sign."""
    rates = expert_rates(params[f"level_{level}"]["generators"], config)
    return mixture_flow(
        rates, z, weights, time, mixing=config.mixing, skew=config.generator == "so"
    )


def level_gate(
    params: Params,
    config: LatentMoSConfig,
    z: Float[Array, "*batch d"],
    h: Float[Array, "*batch hidden"] | None = None,
    *,
    level: int = 0,
) -> Float[Array, "*batch experts"]:
    """The gate of one level at given latents.

    Raises:
        ValueError: if it sees the encoder's memory, and none is given.
    """
    if h is None:
        if config.gate == "hidden":
            raise ValueError("gate='hidden' sees the encoder's memory, which ends with the data")
        h = jnp.zeros((*z.shape[:-1], config.hidden), z.dtype)
    return gate(params[f"level_{level}"]["gate"], config, z, h)


def _init_level(key: Array, config: LatentMoSConfig, level: int, window: Array) -> Params:
    generator_key, gate_key, memory_key, state_key = jax.random.split(key, 4)
    params = {
        "generators": init_generators(generator_key, config, level, window, 1.0 / GAPS_PER_UNIT),
        "gate": init_gate(gate_key, config),
    }
    if level:
        latent = config.latent_dim * (2 if config.variational else 1)
        params["memory"] = init_linear(memory_key, 2 * config.hidden, config.hidden)
        params["state"] = init_mlp(state_key, (config.hidden, config.hidden, latent))
    return params


def _states(
    params: Params,
    config: LatentMoSConfig,
    context: Context,
    window: Array,
    key: Array | None,
) -> tuple[list[Level], Array | None]:
    """States of every level, and their divergence if variational."""
    state, h = encode(
        params["encoder"],
        config,
        context,
        lambda z, weights, time: move(params, config, z, weights, time),
        lambda z, h: gate(params["level_0"]["gate"], config, z, h),
        window,
    )
    keys = [None] * config.levels if key is None else list(jax.random.split(key, config.levels))
    levels: list[Level] = []
    divergence = jnp.zeros(h.shape[0], h.dtype)
    is_anchor = context.keep
    for index in range(config.levels):
        own = params[f"level_{index}"]
        if index:
            fine, is_anchor = (
                is_anchor,
                level_anchors(is_anchor, config.stride, causal=config.causal),
            )
            pooled = jnp.concatenate([segment_means(h, fine, is_anchor), h], axis=-1)
            h = jnp.tanh(linear(own["memory"], pooled))
            state = mlp(own["state"], h)
        z = state
        if config.variational:
            z, kl = _sample(keys[index], state, is_anchor)
            divergence = divergence + kl
        # What stands at other times is no state, and must not reach a gradient.
        z = jnp.where(is_anchor[..., None], z, 0.0)
        levels.append(Level(z=z, gate=gate(own["gate"], config, z, h), is_anchor=is_anchor))
    return levels, divergence if config.variational else None


def _sample(key: Array | None, state: Array, is_anchor: Array) -> tuple[Array, Array]:
    mean, logvar = jnp.split(state, 2, axis=-1)
    logvar = jnp.clip(logvar, -10.0, 5.0)
    kl = 0.5 * jnp.sum(jnp.square(mean) + jnp.exp(logvar) - 1.0 - logvar, axis=-1)
    kl = jnp.sum(jnp.where(is_anchor, kl, 0.0), axis=1)
    if key is None:
        return mean, kl
    return mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape, mean.dtype), kl


def _read(
    params: Params,
    config: LatentMoSConfig,
    scales: Scales,
    context: Context,
    levels: list[Level],
    query: Float[Array, "rows queries"],
) -> tuple[Array, Array, Array]:
    """Standardised channels, latents, and distance outside of the data, at every query."""
    rates = [
        expert_rates(params[f"level_{index}"]["generators"], config)
        for index in range(config.levels)
    ]
    anchors = "last" if config.causal and config.anchors == "local" else config.anchors

    def find(query: Array) -> list[Neighbours]:
        return [
            locate(context.search_times, level.is_anchor, query, anchors=anchors)
            for level in levels
        ]

    def latents(places: list[Neighbours], length: Array | None = None) -> Array:
        parts = [
            evaluate(rate, level, place, config, length)
            for rate, level, place in zip(rates, levels, places, strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    places = find(query)
    latent = latents(places)
    outside = places[0].outside
    if config.observation == "point":
        return decode(params["decoder"], config, latent), latent, outside
    lengths = jnp.asarray(config.interval, latent.dtype) / scales.time_unit
    if has_exact_mean(config):
        mean = decode(params["decoder"], config, latents(places, lengths[0]))
        return mean, latent, outside
    values = decode(params["decoder"], config, latents(find(gauss_queries(query, lengths))))
    return gauss_means(values, len(config.interval)), latent, outside


def has_exact_mean(config: LatentMoSConfig) -> bool:
    """Whether interval means are taken in closed form rather than by quadrature."""
    return (
        config.decoder == "linear"
        and config.generator == "rst"
        and config.mixing == "algebra"
        and not config.drift
        and len(config.interval) == 1
    )


@functools.partial(jax.jit, static_argnums=0)
def apply_model(model: LatentMoS, variables: Any, batch: IrregularBatch, query: Any) -> MoSOutput:
    """`model.apply`, jitted once a model and shape."""
    return answer(model, variables, batch, query)


def answer(
    model: LatentMoS,
    variables: Any,
    batch: IrregularBatch,
    query: Any,
    *,
    key: Array | None = None,
    drop: tuple[float, float] = (0.0, 0.0),
) -> MoSOutput:
    """`model.apply`, whose result is of one type."""
    return cast(MoSOutput, model.apply(variables, batch, query, key=key, drop=drop))


def predict(model: LatentMoS, variables: Any, batch: IrregularBatch, query: Any) -> MoSOutput:
    """Checks a batch of any origin on the host and evaluates the model in one jitted call.

    Args:
        model, variables: as trained.
        batch: see `IrregularBatch`; rows that decrease in time are refused.
        query: [rows, queries], in the batch's time.

    Raises:
        ValueError: for unusable data, see `validate`; naming the row of a query that is NaN.
    """
    batch, query = ready(batch, query)
    return apply_model(model, variables, batch, query)


def ready(batch: IrregularBatch, query: Any) -> tuple[IrregularBatch, Any]:
    """A checked batch and queries, relative to each row's first time, for a jitted function.

    Raises:
        ValueError: see `predict`.
    """
    report = validate(batch)
    if report.n_unsorted:
        raise ValueError(f"{report.n_unsorted} times decrease; sort the rows with from_ragged")
    query = as_times("query", query)
    rows = np.shape(batch.times)[0]
    if query.ndim != 2 or len(query) != rows:
        raise ValueError(f"query {query.shape} must be [{rows}, queries]")
    is_nan = np.isnan(query).any(1)
    if is_nan.any():
        raise ValueError(f"query: row {np.flatnonzero(is_nan)[0]} has a time that is NaN")
    batch, query = relative_times(fill(batch), query)
    dtype = float_type()
    batch = dataclasses.replace(
        batch,
        times=in_range("times", batch.times, dtype),
        values=in_range("values", batch.values, dtype),
        inputs=None if batch.inputs is None else in_range("inputs", batch.inputs, dtype),
    )
    # A query beyond the range is one without bound.
    with np.errstate(over="ignore"):
        return batch, query.astype(dtype)


def in_range(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in another float type.

    Raises:
        ValueError: if an entry is too large for the type, naming its row, or all are too small.
    """
    limit, least = float(jnp.finfo(dtype).max), 1e6 * float(jnp.finfo(dtype).tiny)
    if array.size and 0 < np.abs(array).max() < least:
        raise ValueError(f"{name}: all entries are below {least:.3g}; change the unit")
    rows = np.flatnonzero((np.abs(array) > limit).reshape(len(array), -1).any(1))
    if rows.size:
        raise ValueError(f"{name}: row {rows[0]} has an entry beyond {limit:.3g}; change the unit")
    return array.astype(dtype)
