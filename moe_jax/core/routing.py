"""The record of what a gate decided, the top-k router, and what to look at afterwards."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.losses import clear_masked, load_balance_loss, router_z_loss


@chex.dataclass(frozen=True)
class Routing:
    """What a gate decided for every token of a layer.

    A scan over layers, vmap or shard_map may put further axes in front of every field.

    Attributes:
        expert_index: int32[tokens, k], the selected experts, best first.
        combine_weight: float32[tokens, k], weight of each expert's answer; 0 where not kept.
        gate_logits: float32[tokens, experts], scores before the softmax.
        keep: bool[tokens, k], False where the assignment was dropped or its token masked.
        mask: bool[tokens], False for padding.
        load_balance_loss: float32[], see `load_balance_loss`.
        router_z_loss: float32[], see `router_z_loss`.
    """

    expert_index: Array
    combine_weight: Array
    gate_logits: Array
    keep: Array
    mask: Array
    load_balance_loss: Array
    router_z_loss: Array


@chex.dataclass(frozen=True)
class RoutingMetrics:
    """Summary of one layer's routing.

    Attributes:
        load: float32[experts], share of the kept assignments each expert received; sums to 1, or to
            0 if none is kept.
        balance: float32[], largest load over mean load: 1 at perfect balance, experts / k at worst
            if nothing is dropped; 0 if no assignment is kept.
        entropy: float32[], mean entropy of the gate's softmax in nats, at most log(experts).
        dropped: float32[], share of the unmasked tokens' assignments that were not kept.
    """

    load: Array
    balance: Array
    entropy: Array
    dropped: Array


def top_k_routing(
    gate_logits: Float[Array, "tokens experts"],
    num_selected: int,
    *,
    renormalize: bool = True,
    mask: Bool[Array, " tokens"] | None = None,
) -> Routing:
    """Sends each token to the experts with the largest softmax probabilities.

    With p = softmax(l) and S the K largest entries, the weights are p_e / sum_{j in S} p_j, or p_e
    itself without renormalisation. For K = 1 renormalisation would make the weight a constant and
    cut the gate off from the gradient, so p_e is used there. Equal logits go to the lower index.

    Args:
        gate_logits: scores, computed in float32 whatever their type.
        num_selected: K, in [1, experts].
        renormalize: make the weights of a token sum to 1 (for K > 1).
        mask: False for padding, which is given no expert, no weight and no share in the losses.

    Raises:
        ValueError: if num_selected is not in [1, experts].

    Reference: Shazeer et al. 2017 (arXiv 1701.06538); renormalised as in Mixtral (2401.04088).
    """
    num_tokens, num_experts = gate_logits.shape
    check_num_selected(num_selected, num_experts)
    if mask is None:
        mask = jnp.ones(num_tokens, dtype=jnp.bool_)
    gate_logits = clear_masked(gate_logits, mask)
    probability = jax.nn.softmax(gate_logits, axis=-1)
    # Not by probability, which is 0 far below the largest, nor by logit: top_k puts 0 above -0.
    log_probability = jax.nn.log_softmax(gate_logits, axis=-1)
    _, expert_index = jax.lax.top_k(log_probability, num_selected)
    weight = jnp.take_along_axis(probability, expert_index, axis=-1)
    if renormalize and num_selected > 1:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    keep = jnp.broadcast_to(mask[:, None], expert_index.shape)
    return Routing(
        expert_index=expert_index,
        combine_weight=jnp.where(keep, weight, 0.0),
        gate_logits=gate_logits,
        keep=keep,
        mask=mask,
        load_balance_loss=load_balance_loss(gate_logits, expert_index, mask),
        router_z_loss=router_z_loss(gate_logits, mask),
    )


def routing_metrics(routing: Routing) -> RoutingMetrics:
    """Load, balance, entropy and dropped share of one layer; vmap it over stacked layers."""
    num_experts = routing.gate_logits.shape[-1]
    kept = expert_counts(routing.expert_index, routing.keep, num_experts).astype(jnp.float32)
    load = kept / jnp.maximum(jnp.sum(kept), 1.0)
    weight = routing.mask.astype(jnp.float32)
    num_tokens = jnp.maximum(jnp.sum(weight), 1.0)
    probability = jax.nn.softmax(routing.gate_logits, axis=-1)
    # entr(0) is 0, where 0 log 0 is NaN: a logit may be -inf to close an expert.
    entropy = jnp.sum(jax.scipy.special.entr(probability), axis=-1)
    num_wanted = num_tokens * jnp.float32(routing.keep.shape[-1])
    return RoutingMetrics(
        load=load,
        balance=jnp.max(load) * jnp.float32(num_experts),
        entropy=jnp.sum(jnp.where(routing.mask, entropy, 0.0)) / num_tokens,
        dropped=jnp.where(jnp.sum(weight) > 0, 1.0 - jnp.sum(kept) / num_wanted, 0.0),
    )


def expert_counts(
    expert_index: Int[Array, "tokens k"], keep: Bool[Array, "tokens k"], num_experts: int
) -> Int[Array, " experts"]:
    """Number of kept assignments of each expert, counted in int32 so that no count saturates."""
    # One extra bucket takes what is not kept: a scatter to a negative or absent index would wrap.
    bucket = jnp.where(keep, expert_index, num_experts)
    return jnp.sum(
        bucket.reshape(-1, 1) == jnp.arange(num_experts, dtype=jnp.int32)[None, :],
        axis=0,
        dtype=jnp.int32,
    )


def check_num_selected(num_selected: int, num_experts: int) -> None:
    """Raises ValueError unless 1 <= num_selected <= num_experts."""
    if num_selected < 1:
        raise ValueError(f"num_selected={num_selected} must be at least 1")
    if num_selected > num_experts:
        raise ValueError(f"num_selected={num_selected} exceeds num_experts={num_experts}")
