"""The record of what a gate decided, and what to look at afterwards."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.losses import (
    check_mask,
    clear_masked,
    gate_entropy,
    load_balance_loss,
    router_z_loss,
)
from moe_jax.core.precision import wide_type


@chex.dataclass(frozen=True)
class Routing:
    """What a gate decided for every token of a layer.

    A scan over layers, vmap or shard_map may put further axes in front of every field. Routers
    whose tokens have no fixed number of experts (expert choice, dense, soft) have k = experts and
    say in `keep` and `combine_weight` which of them answer. Of float64 tokens,
    weights and logits are float64.

    Attributes:
        expert_index: int32[tokens, k], the selected experts, best first.
        combine_weight: float32[tokens, k], weight of each expert's answer; 0 where not kept.
        gate_logits: float32[tokens, experts]; its softmax is the gate's distribution. -inf for an
            expert that is closed.
        keep: bool[tokens, k], False where the assignment was dropped or its token masked.
        mask: bool[tokens], False for padding.
        load_balance_loss: float32[], see `load_balance_loss`.
        router_z_loss: float32[], see `router_z_loss`.
        output_norm: float32[tokens, k], Euclidean norm of each expert's answer, 0 where not kept;
            None unless the layer was asked to capture it.
    """

    expert_index: Array
    combine_weight: Array
    gate_logits: Array
    keep: Array
    mask: Array
    load_balance_loss: Array
    router_z_loss: Array
    output_norm: Array | None = None


@chex.dataclass(frozen=True)
class RoutingMetrics:
    """Summary of a layer's routing; leading axes are those in front of the record's fields.

    Attributes:
        counts: int32[experts], kept assignments of each expert.
        load: float32[experts], share of the kept assignments each expert received; sums to 1, or to
            0 if none is kept.
        balance: float32[], largest load over mean load: 1 at perfect balance, experts / k at worst
            if nothing is dropped; 0 if no assignment is kept.
        entropy: float32[], mean entropy of the gate's softmax in nats, at most log(experts).
        dropped: float32[], share of the unmasked tokens' assignments that were not kept; of all
            experts a token for the routers with k = experts.
    """

    counts: Array
    load: Array
    balance: Array
    entropy: Array
    dropped: Array


def make_routing(
    gate_logits: Float[Array, "tokens experts"],
    expert_index: Int[Array, "tokens k"],
    weight: Float[Array, "tokens k"],
    mask: Bool[Array, " tokens"],
    *,
    keep: Bool[Array, "tokens k"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    z_logits: Float[Array, "tokens experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Completes a router's choice into a record: what is kept, the weights, the losses.

    Args:
        gate_logits: see `Routing`; already `open_logits`.
        expert_index: selected experts.
        weight: their weights, of any value where not kept.
        mask: False for padding.
        keep: assignments that count; all of them if None. Those of masked tokens and closed experts
            never do.
        expert_mask: False for a closed expert.
        z_logits: raw scores for the z-loss, where they differ from `gate_logits`.
        axis_names: mesh axes that split the tokens, see `moe_jax.core.losses`.
    """
    allowed = jnp.broadcast_to(mask[:, None], expert_index.shape)
    if expert_mask is not None:
        allowed = allowed & expert_mask[expert_index]
    keep = allowed if keep is None else keep & allowed
    return Routing(
        expert_index=expert_index.astype(jnp.int32),
        combine_weight=jnp.where(keep, weight, 0.0),
        gate_logits=gate_logits,
        keep=keep,
        mask=mask,
        load_balance_loss=load_balance_loss(
            gate_logits,
            expert_index,
            mask,
            # A closed expert or group may fill the index of a token that has fewer than K.
            keep=keep,
            expert_mask=expert_mask,
            axis_names=axis_names,
        ),
        router_z_loss=router_z_loss(
            gate_logits if z_logits is None else z_logits, mask, axis_names=axis_names
        ),
    )


def open_logits(
    gate_logits: Float[Array, "tokens experts"],
    mask: Bool[Array, " tokens"] | None,
    expert_mask: Bool[Array, " experts"] | None,
) -> tuple[Float[Array, "tokens experts"], Bool[Array, " tokens"]]:
    """Logits in `wide_type` with masked rows 0 and closed experts -inf, and the mask as an array.

    Raises:
        ValueError: if a mask is not boolean or does not fit.
    """
    if gate_logits.shape[-1] < 1:
        raise ValueError(f"gate_logits {gate_logits.shape} must score at least one expert")
    if mask is None:
        mask = jnp.ones(gate_logits.shape[0], dtype=jnp.bool_)
    gate_logits = clear_masked(gate_logits, mask, wide_type(gate_logits.dtype))
    if expert_mask is not None:
        check_mask("expert_mask", expert_mask, gate_logits.shape[-1])
        # With every expert closed the logits stay finite; nothing is kept all the same.
        closed = ~expert_mask & jnp.any(expert_mask)
        gate_logits = jnp.where(closed[None, :], -jnp.inf, gate_logits)
    return gate_logits, mask


def selection_weight(
    log_score: Float[Array, "tokens k"], *, renormalize: bool
) -> Float[Array, "tokens k"]:
    """Weights of the selected experts: their scores, made to sum to 1 if K > 1 and so asked.

    For K = 1 that sum would make the weight a constant and cut the gate off from the gradient.
    """
    if renormalize and log_score.shape[-1] > 1:
        return jax.nn.softmax(log_score, axis=-1)
    return jnp.exp(log_score)


def every_expert(num_tokens: int, num_experts: int) -> Int[Array, "tokens experts"]:
    """The `expert_index` of a router for which K = E: all experts, in the order of their index."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.broadcast_to(expert[None, :], (num_tokens, num_experts))


def usable_tokens(
    gate_logits: Float[Array, "tokens experts"], mask: Bool[Array, " tokens"]
) -> Bool[Array, " tokens"]:
    """Tokens that may have a say in what others get: unmasked, and no score NaN or +inf."""
    return mask & ~jnp.any(jnp.isnan(gate_logits) | jnp.isposinf(gate_logits), axis=-1)


def routing_metrics(routing: Routing, *, axis_names: tuple[str, ...] = ()) -> RoutingMetrics:
    """Load, balance, entropy and dropped share, of each layer where layers are stacked.

    Args:
        routing: a layer's record, or several stacked along leading axes.
        axis_names: mesh axes that split the tokens, inside `shard_map`.
    """

    def one_layer(routing: Routing) -> RoutingMetrics:
        num_experts = routing.gate_logits.shape[-1]
        counts = expert_counts(routing.expert_index, routing.keep, num_experts)
        num_wanted = jnp.sum(routing.mask, dtype=jnp.int32) * jnp.int32(routing.keep.shape[-1])
        if axis_names:
            counts, num_wanted = jax.lax.psum((counts, num_wanted), axis_names)
        kept = counts.astype(jnp.float32)
        load = kept / jnp.maximum(jnp.sum(kept), 1.0)
        wanted = num_wanted.astype(jnp.float32)
        return RoutingMetrics(
            counts=counts,
            load=load,
            balance=jnp.max(load) * jnp.float32(num_experts),
            entropy=gate_entropy(routing.gate_logits, routing.mask, axis_names=axis_names),
            # Of integers, so that nothing dropped is 0 and not a rounding error.
            dropped=(num_wanted - jnp.sum(counts)).astype(jnp.float32) / jnp.maximum(wanted, 1.0),
        )

    for _ in range(routing.gate_logits.ndim - 2):
        one_layer = jax.vmap(one_layer)
    return one_layer(routing)


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
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    if num_selected < 1:
        raise ValueError(f"num_selected={num_selected} must be at least 1")
    if num_selected > num_experts:
        raise ValueError(f"num_selected={num_selected} exceeds num_experts={num_experts}")
