"""Gates: which symmetry acts at an anchor, and how far."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from moe_jax.core import Routing, dense_routing, top_k_routing
from moe_jax.symmetries.bases import basis_matrices, quadratic_invariants
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.nets import Params, float_type, init_mlp, mlp


def num_features(config: LatentMoSConfig) -> int:
    """Width of what the gate sees."""
    slices = config.latent_dim // config.slice_dim
    return {
        "invariant": slices * _num_invariants(config),
        "state": config.latent_dim,
        "hidden": config.hidden,
        "fixed": 0,
    }[config.gate]


def init_gate(key: Array, config: LatentMoSConfig) -> Params:
    """Parameters of a level's gate."""
    if config.gate == "fixed":
        return {"logits": jnp.zeros(config.experts, float_type())}
    return init_mlp(key, (num_features(config), config.hidden, config.experts))


def invariants(
    z: Float[Array, "*batch d"], config: LatentMoSConfig
) -> Float[Array, "*batch features"]:
    """What the group leaves alone: |zeta_j|^2 of planes, |z|^2 of `so`, z^T Q z of a `basis`.

    Of `rst`, exactly so without growth and drift. With `log_invariants`, sign(r) log(1 + |r|).
    """
    slices = z.reshape(*z.shape[:-1], -1, config.slice_dim)
    if config.generator == "basis":
        forms = jnp.asarray(_forms(config), z.dtype)
        found = jnp.einsum("...i,fij,...j->...f", slices, forms, slices)
        found = found.reshape(*z.shape[:-1], -1)
        return jnp.sign(found) * jnp.log1p(jnp.abs(found)) if config.log_invariants else found
    if config.generator == "rst":
        slices = slices[..., : 2 * config.planes]
        slices = slices.reshape(*slices.shape[:-1], config.planes, 2)
    radii = jnp.sum(jnp.square(slices), axis=-1).reshape(*z.shape[:-1], -1)
    return jnp.log1p(radii) if config.log_invariants else radii


def gate(
    params: Params,
    config: LatentMoSConfig,
    z: Float[Array, "*batch d"],
    h: Float[Array, "*batch hidden"],
) -> Float[Array, "*batch experts"]:
    """Weights pi of the experts, which sum to 1.

    Args:
        params: see `init_gate`.
        config: of the model; `config.gate` says which of z and h counts.
        z: latent at the anchors.
        h: the encoder's memory there.
    """
    logits = gate_logits(params, config, z, h)
    if config.num_selected in (0, config.experts):
        return jax.nn.softmax(logits, axis=-1)
    flat = logits.reshape(-1, config.experts)
    routing = _route(flat, jnp.ones(flat.shape[0], jnp.bool_), config)
    expert = jnp.arange(config.experts, dtype=jnp.int32)[None, None, :]
    is_own = routing.expert_index[..., None] == expert
    weight = jnp.sum(jnp.where(is_own, routing.combine_weight[..., None], 0.0), axis=1)
    return weight.astype(z.dtype).reshape(logits.shape)


def gate_logits(
    params: Params,
    config: LatentMoSConfig,
    z: Float[Array, "*batch d"],
    h: Float[Array, "*batch hidden"],
) -> Float[Array, "*batch experts"]:
    """Scores whose softmax is the gate."""
    if config.gate == "fixed":
        return jnp.broadcast_to(params["logits"], (*z.shape[:-1], config.experts))
    features = {"state": z, "hidden": h}.get(config.gate)
    return mlp(params, invariants(z, config) if features is None else features)


def route(
    logits: Float[Array, "*batch experts"],
    is_anchor: Bool[Array, "*batch"],
    config: LatentMoSConfig,
) -> Routing:
    """The gate's decisions as the record that `moe_jax.core.routing_metrics` reads."""
    return _route(logits.reshape(-1, config.experts), is_anchor.reshape(-1), config)


def _num_invariants(config: LatentMoSConfig) -> int:
    return {"rst": config.planes, "basis": len(_forms(config))}.get(config.generator, 1)


def _forms(config: LatentMoSConfig) -> np.ndarray:
    if config.generator != "basis":
        return np.zeros((0, config.slice_dim, config.slice_dim))
    return quadratic_invariants(basis_matrices(config.basis, config.slice_dim))


def _route(
    logits: Float[Array, "tokens experts"], mask: Bool[Array, " tokens"], config: LatentMoSConfig
) -> Routing:
    if config.num_selected in (0, config.experts):
        return dense_routing(logits, mask=mask)
    return top_k_routing(logits, config.num_selected, mask=mask)
