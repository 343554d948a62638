"""Decoders, and readings that are means over an interval.

Meters report the mean over [tau, tau + Delta] rather than the value at tau. With a linear decoder
and plane rates the mean of the flow is exact: C phi_1(Delta A) z(tau). Otherwise three Gauss points
integrate it, exact for polynomials in time of degree 5.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.nets import Params, init_linear, init_mlp, linear, mlp

GAUSS_POINTS = (0.5 - 0.15**0.5, 0.5, 0.5 + 0.15**0.5)
GAUSS_WEIGHTS = (5.0 / 18.0, 8.0 / 18.0, 5.0 / 18.0)


def init_decoder(key: Array, config: LatentMoSConfig) -> Params:
    """Parameters of the decoder of all levels' latents."""
    width = config.levels * config.latent_dim
    if config.decoder == "linear":
        return init_linear(key, width, config.obs_dim)
    return init_mlp(key, (width, config.decoder_hidden, config.obs_dim))


def decode(
    params: Params, config: LatentMoSConfig, z: Float[Array, "*batch latent"]
) -> Float[Array, "*batch channels"]:
    """Standardised channels of a latent."""
    return linear(params, z) if config.decoder == "linear" else mlp(params, z)


def gauss_queries(
    query: Float[Array, "rows queries"], lengths: Float[Array, " periods"]
) -> Float[Array, "rows points"]:
    """Three Gauss points of the interval behind each query, for each length of interval.

    The points of a row are ordered by query, then by length, then by point.
    """
    points = jnp.asarray(np.array(GAUSS_POINTS), query.dtype)
    offsets = (lengths[:, None] * points[None, :]).reshape(1, 1, -1)
    return (query[:, :, None] + offsets).reshape(query.shape[0], -1)


def gauss_means(
    values: Float[Array, "rows points channels"], num_periods: int
) -> Float[Array, "rows queries channels"]:
    """Interval means from the values at `gauss_queries`; a channel takes its own interval."""
    rows, _, channels = values.shape
    weights = jnp.asarray(np.array(GAUSS_WEIGHTS), values.dtype)
    values = values.reshape(rows, -1, num_periods, len(GAUSS_POINTS), channels)
    means = jnp.einsum("rqpgc,g->rqpc", values, weights)
    if num_periods == 1:
        return means[:, :, 0]
    return jnp.einsum("rqcc->rqc", means)
