"""Soft mixtures: experts answer weighted means of the tokens, so nothing is selected or dropped."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.core.precision import wide_type
from moe_jax.core.routing import Routing, every_expert, make_routing, open_logits, usable_tokens


@chex.dataclass(frozen=True)
class SoftWeights:
    """How slots are filled and tokens answered; S slots, those of an expert consecutive.

    Attributes:
        dispatch: float32[tokens, slots], sums to 1 over the tokens that count.
        combine: float32[tokens, slots], sums to 1 over the slots; 0 for masked tokens.
    """

    dispatch: Array
    combine: Array


def soft_routing(
    slot_logits: Float[Array, "tokens slots"],
    num_experts: int,
    *,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
) -> tuple[Routing, SoftWeights]:
    """Soft MoE: slot s receives sum_t D_ts x_t, token t receives sum_s C_ts FFN(slot s).

    D = softmax over tokens and C = softmax over slots of the same logits. A token in a sequence
    sees all others, so this is not for causal models. A token whose logits are not finite is left
    out of the slots.

    Args:
        slot_logits: scores of every token and slot; the slots of expert e are e P .. (e + 1) P - 1.
        num_experts: E, divides the slots.
        mask: False for padding.
        expert_mask: False for a closed expert, whose slots stay empty and unused.

    Returns:
        The record with k = E, where the logit of an expert is the log-sum-exp of its slots and its
        weight the sum of theirs; and the weights.

    Raises:
        ValueError: if num_experts does not divide the slots, or a mask does not fit.

    Reference: Puigcerver et al. 2023 (arXiv 2308.00951), equations 1-3.
    """
    num_tokens, num_slots = slot_logits.shape
    if num_experts < 1 or num_slots % num_experts:
        raise ValueError(f"num_experts={num_experts} does not divide slots={num_slots}")
    slots_each = num_slots // num_experts
    slot_mask = None if expert_mask is None else jnp.repeat(expert_mask, slots_each)
    slot_logits, mask = open_logits(slot_logits, mask, slot_mask)
    usable = usable_tokens(slot_logits, mask)
    # Over tokens a closed slot is all -inf: its weights must be 0, not 0/0.
    is_open = ~jnp.isneginf(slot_logits)
    if slot_mask is not None:
        is_open = is_open & slot_mask[None, :]
    offered = usable[:, None] & is_open
    finite = jnp.where(offered, slot_logits, 0.0)
    dispatch = jax.nn.softmax(finite, axis=0, where=offered)
    dispatch = jnp.where(offered, dispatch, 0.0)
    combine = jnp.where(mask[:, None], jax.nn.softmax(slot_logits, axis=1), 0.0)
    if slot_mask is not None:
        # With every expert closed the logits are open all the same.
        combine = jnp.where(slot_mask[None, :], combine, 0.0)
    by_expert = slot_logits.reshape(num_tokens, num_experts, slots_each)
    gate_logits = jax.nn.logsumexp(by_expert, axis=-1)
    routing = make_routing(
        gate_logits,
        every_expert(num_tokens, num_experts),
        jnp.sum(combine.reshape(by_expert.shape), axis=-1),
        mask,
        expert_mask=expert_mask,
    )
    return routing, SoftWeights(dispatch=dispatch, combine=combine)


def fill_slots(
    tokens: Float[Array, "tokens model"], weights: SoftWeights
) -> Float[Array, "slots model"]:
    """The weighted means that the experts answer, in the type of `tokens`."""
    # A token that is left out has weight 0 everywhere, but 0 NaN would still reach every slot.
    left_out = jnp.all(weights.dispatch == 0.0, axis=1)
    tokens = jnp.where(left_out[:, None], jnp.zeros_like(tokens), tokens)
    dispatch = weights.dispatch.astype(tokens.dtype)
    wide = wide_type(tokens.dtype)
    filled = jnp.einsum("ts,td->sd", dispatch, tokens, preferred_element_type=wide)
    return filled.astype(tokens.dtype)


def answer_tokens(
    answers: Float[Array, "slots model"], weights: SoftWeights
) -> Float[Array, "tokens model"]:
    """Each token's weighted mean of the slots' answers, in the type of `answers`."""
    combine = weights.combine.astype(answers.dtype)
    out = jnp.einsum("ts,sd->td", combine, answers, preferred_element_type=wide_type(answers.dtype))
    return out.astype(answers.dtype)
