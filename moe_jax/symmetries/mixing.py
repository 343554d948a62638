"""Mixtures of flows: three rules that combine the experts' answers.

With weights pi from the gate and generators A_k:

- `output`: sum_k pi_k exp(t A_k) z. The paper's form as publicly described (its Eq. 8). It is no
  one-parameter group: it equals [pi_1 I ... pi_K I] exp(t diag(A_1 ... A_K)) (z, ..., z), a linear
  read-out of a representation on K copies, and contracts where frequencies differ.
- `algebra`: exp(t sum_k pi_k A_k) z. Derived here; a one-parameter group for every pi. With plane
  rates, sigma = 0 and a gate that sees radii only, pi is conserved, and the whole cell is a flow.
- `product`: every expert has a slice of the latent of its own; pi scales slices at the read-out.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.symmetries.generators import PlaneRates, Rates, flow, flow_of_one

Gate = Float[Array, "*batch experts"]


def mixture_flow(
    rates: Rates,
    z: Float[Array, "*batch d"],
    gate: Gate,
    time: Float[Array, "*batch"],
    *,
    mixing: str = "algebra",
    skew: bool = False,
) -> Float[Array, "*batch d"]:
    """Moves each latent by `time` under the mixture of a level's experts.

    Args:
        rates: of the experts, [experts, ...].
        z: latents; K slices of d in a row for `product`.
        gate: weights, which sum to 1.
        time: of either sign, in rescaled units.
        mixing: `algebra`, `output` or `product`.
        skew: whether the generators are skew-symmetric.
    """
    experts = gate.shape[-1]
    if mixing == "algebra":
        if experts == 1:
            return flow_of_one(jax.tree.map(lambda leaf: leaf[0], rates), z, time, skew=skew)
        return flow(mix_rates(rates, gate), z, time, skew=skew)
    if mixing == "product":
        slices = z.reshape(*z.shape[:-1], experts, -1)
        return _each(rates, slices, time, skew=skew).reshape(z.shape)
    copies = jnp.broadcast_to(z[..., None, :], (*gate.shape, z.shape[-1]))
    return jnp.einsum("...k,...kd->...d", gate, _each(rates, copies, time, skew=skew))


def mix_rates(rates: Rates, gate: Gate) -> Rates:
    """sum_k pi_k A_k at every gate, with the gate's leading axes."""
    return jax.tree.map(lambda leaf: jnp.tensordot(gate, leaf, axes=1), rates)


def read_out(z: Float[Array, "*batch d"], gate: Gate, *, mixing: str) -> Float[Array, "*batch d"]:
    """What the decoder sees of a latent: itself, or its slices scaled by pi for `product`."""
    if mixing != "product":
        return z
    slices = z.reshape(*z.shape[:-1], gate.shape[-1], -1)
    return (slices * gate[..., None]).reshape(z.shape)


def _each(
    rates: Rates, z: Float[Array, "*batch experts d"], time: Float[Array, "*batch"], *, skew: bool
) -> Float[Array, "*batch experts d"]:
    """Moves every expert's latent by that expert."""
    if not isinstance(rates, PlaneRates):
        one = functools.partial(flow_of_one, skew=skew)
        return jax.vmap(one, in_axes=(0, -2, None), out_axes=-2)(rates, z, time)
    rates = jax.tree.map(lambda leaf: leaf.reshape((1,) * (z.ndim - 2) + leaf.shape), rates)
    return flow(rates, z, jnp.broadcast_to(time[..., None], z.shape[:-1]))
