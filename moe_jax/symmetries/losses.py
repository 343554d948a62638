"""What a training step minimises.

L = mean squared error over observed targets, standardised (or the Gaussian negative log likelihood)
  + consistency * mean ||Flow(z_i; pi_i, t_{i+1} - t_i) - z_{i+1}||^2 / var(z)
  + growth * mean relu(sigma)^2
  + overlap * sum_{k<l} |cos(A_k, A_l)|
  + balance * K sum_k mean(pi_k)^2
  + divergence * KL

The division by var(z) keeps the latent from shrinking to satisfy the consistency. All but the first
term are our own.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import Scales, next_index
from moe_jax.symmetries.generators import PlaneRates, Rates, expert_rates
from moe_jax.symmetries.mixing import mixture_flow
from moe_jax.symmetries.model import MoSOutput, generators
from moe_jax.symmetries.nets import Params


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the terms beside the error, see the module; validates itself.

    Attributes:
        consistency, growth, overlap, balance, divergence: weights. The first was chosen on data of
            seed 0: a weight of 1 fell into a poor minimum on the 9-bus grid, one of 0.1 on
            Lotka-Volterra (with an earlier initialisation and smaller steps of the rates), and
            0.3 on neither.
        divergence_steps: steps over which the divergence's weight rises to its value.

    Raises:
        ValueError: if one is negative.
    """

    consistency: float = 0.3
    growth: float = 0.1
    overlap: float = 0.0
    balance: float = 0.0
    divergence: float = 0.0
    divergence_steps: int = 0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")


def squared_error(
    output: MoSOutput,
    target: Float[Array, "rows queries channels"],
    mask: Bool[Array, "rows queries channels"],
    scales: Scales,
) -> Float[Array, ""]:
    """Mean over observed targets of ((mean - target) / std)^2."""
    error = (output.mean - target) / scales.std[None, None, :]
    return _masked_mean(jnp.square(error), mask)


def negative_log_likelihood(
    output: MoSOutput,
    target: Float[Array, "rows queries channels"],
    mask: Bool[Array, "rows queries channels"],
    scales: Scales,
) -> Float[Array, ""]:
    """Mean over observed targets of -log N(target; mean, exp logvar), of standardised channels.

    Raises:
        ValueError: if the model has no noise level.
    """
    if output.logvar is None:
        raise ValueError("likelihood='squared' has no noise level; use 'gaussian'")
    logvar = output.logvar - 2.0 * jnp.log(scales.std)[None, None, :]
    error = jnp.square((output.mean - target) / scales.std[None, None, :])
    return 0.5 * _masked_mean(error * jnp.exp(-logvar) + logvar + jnp.log(2.0 * jnp.pi), mask)


def penalties(
    params: Params,
    config: LatentMoSConfig,
    output: MoSOutput,
    times: Float[Array, "rows times"],
    weights: LossConfig,
    divergence: Float[Array, ""],
) -> Float[Array, ""]:
    """Sum of all terms but the error.

    Args:
        params, config: of the model.
        output: its answer.
        times: of the observations, in rescaled units; padding repeats a row's last.
        weights: of the terms.
        divergence: present weight of the KL term.
    """
    total = jnp.zeros((), times.dtype)
    for index in range(config.levels):
        rates = expert_rates(params[f"level_{index}"]["generators"], config)
        is_anchor, gate = output.is_anchor[index], output.gates[index]
        if weights.consistency:
            defect = consistency(
                functools.partial(_moved, rates, config, gate),
                output.anchor_latent[index],
                is_anchor,
                times,
            )
            total = total + weights.consistency * defect
        if weights.growth and isinstance(rates, PlaneRates) and rates.sigma.size:
            total = total + weights.growth * jnp.mean(jnp.square(jax.nn.relu(rates.sigma)))
        if weights.balance:
            usage = _masked_mean(gate, jnp.broadcast_to(is_anchor[..., None], gate.shape), (0, 1))
            total = total + weights.balance * config.experts * jnp.sum(jnp.square(usage))
    if weights.overlap and config.experts > 1:
        total = total + weights.overlap * overlap(generators(params, config))
    if output.kl is not None:
        total = total + divergence * jnp.mean(output.kl)
    return total


def consistency(
    move: Callable[[Array, Array], Array],
    z: Float[Array, "rows times latent"],
    is_anchor: Bool[Array, "rows times"],
    times: Float[Array, "rows times"],
) -> Float[Array, ""]:
    """Mean ||move(z_i, t_{i+1} - t_i) - z_{i+1}||^2 over neighbouring anchors, over var(z).

    Args:
        move: the flow, from states [rows, times, latent] and spans [rows, times].
        z: states, of meaning where `is_anchor`.
        is_anchor: which times have a state.
        times: in the unit of `move`.
    """
    size = times.shape[1]
    after = jnp.pad(next_index(is_anchor)[:, 1:], ((0, 0), (0, 1)), constant_values=size)
    has_next = is_anchor & (after < size)
    after = jnp.minimum(after, size - 1)
    next_z = jnp.take_along_axis(z, jnp.broadcast_to(after[..., None], z.shape), axis=1)
    span = jnp.where(has_next, jnp.take_along_axis(times, after, axis=1) - times, 0.0)
    defect = jnp.sum(jnp.square(move(z, span) - next_z), axis=-1)
    wide = jnp.broadcast_to(is_anchor[..., None], z.shape)
    mean = _masked_mean(z, wide, (0, 1))[None, None, :]
    variance = jnp.sum(_masked_mean(jnp.square(z - mean), wide, (0, 1)))
    return _masked_mean(defect, has_next) / (variance + 1e-6)


def overlap(matrices: Float[Array, "levels experts d d"]) -> Float[Array, ""]:
    """sum_{k<l} |cos(A_k, A_l)| in the Frobenius product, over levels."""
    flat = matrices.reshape(*matrices.shape[:2], -1)
    norm = jnp.sqrt(jnp.sum(jnp.square(flat), axis=-1, keepdims=True) + 1e-12)
    cosine = jnp.einsum("lif,ljf->lij", flat / norm, flat / norm)
    upper = jnp.triu(jnp.ones(cosine.shape[1:], cosine.dtype), 1)[None]
    return jnp.sum(jnp.abs(cosine) * upper)


def _moved(rates: Rates, config: LatentMoSConfig, gate: Array, z: Array, span: Array) -> Array:
    return mixture_flow(rates, z, gate, span, mixing=config.mixing, skew=config.generator == "so")


def _masked_mean(values: Array, mask: Array, axis: tuple[int, ...] | None = None) -> Array:
    count = jnp.maximum(jnp.sum(mask, axis=axis, dtype=values.dtype), 1.0)
    return jnp.sum(jnp.where(mask, values, 0.0), axis=axis) / count
