"""Auxiliary losses of a router, in float32, averaged over the tokens that count."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def load_balance_loss(
    gate_logits: Float[Array, "tokens experts"],
    expert_index: Int[Array, "tokens k"],
    mask: Bool[Array, " tokens"] | None = None,
) -> Float[Array, ""]:
    """Penalises the product of an expert's load and its mean gate probability.

    With f_e the share of the T K assignments that expert e receives and P_e its mean softmax
    probability, the loss is E sum_e f_e P_e: 1 when the gate is uniform or the load is perfectly
    balanced, E / K when every token goes to the same K experts with certainty. The gradient flows
    through P only. Scales elsewhere differ: at perfect balance MaxText, flaxformer and Hugging Face
    Mixtral give K, levanter 1/K, Megablocks and DeepSpeed 1.

    Args:
        gate_logits: scores before the softmax.
        expert_index: selected experts, in [0, experts).
        mask: tokens that count; all of them if None.

    Returns:
        The loss; 0 if no token counts.

    Reference: Fedus et al. 2021 (arXiv 2101.03961), equations 4-6, with K selections.
    """
    num_experts = gate_logits.shape[-1]
    weight = _token_weight(gate_logits, mask)
    probability = jax.nn.softmax(clear_masked(gate_logits, mask), axis=-1)
    mean_probability = jnp.sum(probability * weight[:, None], axis=0)
    chosen = jax.nn.one_hot(expert_index, num_experts, dtype=jnp.float32)
    load = jnp.sum(jnp.mean(chosen, axis=1) * weight[:, None], axis=0)
    return jnp.float32(num_experts) * jnp.sum(jax.lax.stop_gradient(load) * mean_probability)


def router_z_loss(
    gate_logits: Float[Array, "tokens experts"],
    mask: Bool[Array, " tokens"] | None = None,
) -> Float[Array, ""]:
    """Mean over tokens of the squared log-partition function of the gate, (log sum_e exp l_e)^2.

    Keeps the logits small, where float32 softmax is accurate. 0 if no token counts.

    Args:
        gate_logits: scores before the softmax.
        mask: tokens that count; all of them if None.

    Reference: Zoph et al. 2022 (arXiv 2202.08906), equation 5.
    """
    log_partition = jax.nn.logsumexp(clear_masked(gate_logits, mask), axis=-1)
    return jnp.sum(jnp.square(log_partition) * _token_weight(gate_logits, mask))


def clear_masked(
    gate_logits: Float[Array, "tokens experts"], mask: Bool[Array, " tokens"] | None
) -> Float[Array, "tokens experts"]:
    """Casts to float32 and zeroes masked rows, whose NaN would survive a product with weight 0."""
    gate_logits = gate_logits.astype(jnp.float32)
    return gate_logits if mask is None else jnp.where(mask[:, None], gate_logits, 0.0)


def _token_weight(
    gate_logits: Float[Array, "tokens experts"], mask: Bool[Array, " tokens"] | None
) -> Float[Array, " tokens"]:
    """Weights of a mean over the tokens that count; they sum to 1, or to 0 if none does."""
    if mask is None:
        mask = jnp.ones(gate_logits.shape[0], dtype=jnp.bool_)
    weight = mask.astype(jnp.float32)
    return weight / jnp.maximum(jnp.sum(weight), 1.0)
