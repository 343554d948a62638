"""Generators of the experts: their parameters, their matrices, and the flow of one generator.

The default family `rst` (rotation, scale, translation) holds m planes, read as complex numbers, and
q further coordinates: zeta_j(t) = exp((sigma_j + i omega_j) t) zeta_j and y_c(t) = y_c + v_c t. The
coordinates of a latent are x_1, y_1, ..., x_m, y_m of the planes and then the q others. All such
flows commute. With a drift u inside the planes, zeta(t) = e^{lambda t} zeta + t phi_1(lambda t) u.

The other families give matrices: A free (`gl`), S - S^T (`so`), S - S^T - P P^T (`stable`) and
sum_c a_c L_c for given L (`basis`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.symmetries.bases import basis_matrices
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.exponential import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    expm,
    expm_action,
    phi_1,
)
from moe_jax.symmetries.nets import Params, float_type


class PlaneRates(NamedTuple):
    """Rates of `rst` per rescaled time unit; leading axes may be experts, or rows and times.

    Attributes:
        sigma: [..., planes], growth.
        omega: [..., planes], angular velocity.
        velocity: [..., translations].
        drift: [..., planes, 2], or None.
    """

    sigma: Array
    omega: Array
    velocity: Array
    drift: Array | None


Rates = PlaneRates | Array
"""Plane rates, or matrices [..., d, d]."""


def init_generators(
    key: Array, config: LatentMoSConfig, level: int, window: Any, gap: Any
) -> Params:
    """Parameters of a level's experts.

    Frequencies are spread log-uniformly over [2 pi / window, pi / (3 gap)], over stride^level: each
    plane has a part of that range, in random order, and its experts spread over the part, so that
    planes differ when their experts are averaged. Growth begins at -0.02, velocities at 0.

    Args:
        key: random key.
        config: of the model.
        level: 0 for the finest.
        window: span of the observations in rescaled time.
        gap: their median gap in rescaled time.
    """
    dtype, experts = float_type(), config.experts
    low = 2.0 * math.pi / jnp.asarray(window, dtype)
    high = jnp.maximum(math.pi / (3.0 * jnp.asarray(gap, dtype)), 1.5 * low)
    num = max(config.slice_dim // 2, 1)
    order_key, jitter_key, key = jax.random.split(key, 3)
    order = jax.random.permutation(order_key, jnp.arange(num)).astype(dtype)
    place = jnp.arange(experts, dtype=dtype)[:, None]
    place = (place + jax.random.uniform(jitter_key, (experts, num), dtype)) / experts
    place = (order[None, :] + place) / num
    omega = low * (high / low) ** place / float(config.stride**level)
    if config.generator == "rst":
        params = {
            "sigma": jnp.full((experts, config.planes), -0.02, dtype),
            "omega": omega[:, : config.planes],
            "velocity": jnp.zeros((experts, config.translations), dtype),
        }
        if config.drift:
            params["drift"] = jnp.zeros((experts, config.planes, 2), dtype)
        return params
    size = config.slice_dim
    if config.generator == "basis":
        noise = jax.random.normal(key, (experts, len(basis_matrices(config.basis, size))), dtype)
        return {"coefficients": 0.3 * low * noise}
    # Rotations in a random frame, so that no coordinate is special.
    frame_key, extra_key = jax.random.split(key)
    frame = jnp.linalg.qr(jax.random.normal(frame_key, (experts, size, size), dtype))[0]
    half = jnp.zeros((experts, size, size), dtype)
    for plane in range(size // 2):
        half = half.at[:, 2 * plane + 1, 2 * plane].set(omega[:, plane])
    half = frame @ half @ jnp.swapaxes(frame, -1, -2)
    if config.generator == "gl":
        return {
            "matrix": half - jnp.swapaxes(half, -1, -2) - 0.02 * jnp.eye(size, dtype=dtype)[None]
        }
    params = {"skew": half}
    if config.generator == "stable":
        params["root"] = 0.1 * jax.random.normal(extra_key, (experts, size, size), dtype)
    return params


def expert_rates(params: Params, config: LatentMoSConfig) -> Rates:
    """Rates of every expert of a level: plane rates [experts, ...] or matrices [experts, d, d].

    Where a spectral norm exceeds `config.max_rate`, the whole generator is scaled down to it.
    """
    if config.generator == "rst":
        rates = PlaneRates(
            sigma=params["sigma"],
            omega=params["omega"],
            velocity=params["velocity"],
            drift=params.get("drift"),
        )
        if math.isinf(config.max_rate):
            return rates
        norm = jnp.sqrt(jnp.square(rates.sigma) + jnp.square(rates.omega))
        cap = _cap(norm, config.max_rate)
        return rates._replace(sigma=rates.sigma * cap, omega=rates.omega * cap)
    if config.generator == "gl":
        matrix = params["matrix"]
    elif config.generator == "basis":
        basis = jnp.asarray(
            basis_matrices(config.basis, config.slice_dim), params["coefficients"].dtype
        )
        matrix = jnp.einsum("kc,cij->kij", params["coefficients"], basis)
    else:
        matrix = params["skew"] - jnp.swapaxes(params["skew"], -1, -2)
        if config.generator == "stable":
            matrix = matrix - params["root"] @ jnp.swapaxes(params["root"], -1, -2)
    if math.isinf(config.max_rate):
        return matrix
    norm = jnp.linalg.norm(jax.lax.stop_gradient(matrix), ord=2, axis=(-2, -1))
    return matrix * _cap(norm, config.max_rate)[:, None, None]


def flow(
    rates: Rates,
    z: Float[Array, "*batch d"],
    time: Float[Array, "*batch"],
    *,
    skew: bool = False,
) -> Float[Array, "*batch d"]:
    """exp(t A) z, of one generator at each z; the identity exactly where t = 0.

    Args:
        rates: with the leading axes of z.
        z: latent.
        time: of either sign, in rescaled units.
        skew: whether matrices are skew-symmetric.
    """
    if not isinstance(rates, PlaneRates):
        return jnp.einsum("...ij,...j->...i", expm(rates, time, skew=skew), z)
    num = rates.sigma.shape[-1]
    span = time[..., None]
    x, y = z[..., 0 : 2 * num : 2], z[..., 1 : 2 * num : 2]
    growth = jnp.exp(jnp.clip(rates.sigma * span, MIN_EXPONENT, MAX_EXPONENT))
    cos, sin = jnp.cos(rates.omega * span) * growth, jnp.sin(rates.omega * span) * growth
    planes = jnp.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)
    if rates.drift is not None:
        phi = phi_1(jnp.stack([rates.sigma * span, rates.omega * span], axis=-1))
        u = rates.drift
        moved = jnp.stack(
            [
                phi[..., 0] * u[..., 0] - phi[..., 1] * u[..., 1],
                phi[..., 1] * u[..., 0] + phi[..., 0] * u[..., 1],
            ],
            axis=-1,
        )
        planes = planes + span[..., None] * moved
    others = z[..., 2 * num :] + rates.velocity * span
    return jnp.concatenate([planes.reshape(*z.shape[:-1], 2 * num), others], axis=-1)


def flow_of_one(
    rates: Rates,
    z: Float[Array, "*batch d"],
    time: Float[Array, "*batch"],
    *,
    skew: bool = False,
) -> Float[Array, "*batch d"]:
    """exp(t A) z of one generator for all z, whose exponentials are shared between times.

    Args:
        rates: without leading axes.
        z, time, skew: see `flow`.
    """
    has_closed_form = z.shape[-1] < 3 or (skew and z.shape[-1] == 3)
    if isinstance(rates, PlaneRates) or has_closed_form:
        lead = (1,) * time.ndim
        rates = jax.tree.map(lambda leaf: leaf.reshape(lead + leaf.shape), rates)
        if not isinstance(rates, PlaneRates):
            rates = jnp.broadcast_to(rates, (*time.shape, *rates.shape[-2:]))
        return flow(rates, z, time, skew=skew)
    return expm_action(rates, time, z)


def mean_flow(
    rates: PlaneRates, z: Float[Array, "*batch d"], length: Float[Array, "*batch"]
) -> Float[Array, "*batch d"]:
    """Mean of the flow over [0, length]: phi_1(lambda length) zeta, and y + v length / 2.

    Raises:
        ValueError: for rates with a drift, whose mean is not of this form.
    """
    if rates.drift is not None:
        raise ValueError("drift=True has no mean in closed form here; use the quadrature")
    num = rates.sigma.shape[-1]
    span = length[..., None]
    phi = phi_1(jnp.stack([rates.sigma * span, rates.omega * span], axis=-1))
    x, y = z[..., 0 : 2 * num : 2], z[..., 1 : 2 * num : 2]
    planes = jnp.stack(
        [phi[..., 0] * x - phi[..., 1] * y, phi[..., 1] * x + phi[..., 0] * y], axis=-1
    )
    others = z[..., 2 * num :] + rates.velocity * (span / 2.0)
    return jnp.concatenate([planes.reshape(*z.shape[:-1], 2 * num), others], axis=-1)


def rate_matrices(rates: Rates) -> Float[Array, "*batch d d"]:
    """The linear part of each generator as a matrix: blocks [[sigma, -omega], [omega, sigma]].

    Translations and drift, which are no linear maps, have zero rows.
    """
    if not isinstance(rates, PlaneRates):
        return rates
    num, others = rates.sigma.shape[-1], rates.velocity.shape[-1]
    size = 2 * num + others
    matrix = jnp.zeros((*rates.sigma.shape[:-1], size, size), rates.sigma.dtype)
    even, odd = 2 * np.arange(num), 2 * np.arange(num) + 1
    matrix = matrix.at[..., even, even].set(rates.sigma).at[..., odd, odd].set(rates.sigma)
    return matrix.at[..., odd, even].set(rates.omega).at[..., even, odd].set(-rates.omega)


def _cap(norm: Float[Array, "*batch"], limit: float) -> Float[Array, "*batch"]:
    return jax.lax.stop_gradient(jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)))
