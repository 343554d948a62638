"""Routers that balance the load: expert choice, Sinkhorn assignment, and a steered bias.

Expert choice looks at all tokens of a batch to decide on one, so a causal model that uses it sees
the future; Sinkhorn assignment does so in training only, where its caller asks for it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.capacity import check_capacity
from moe_jax.core.routing import (
    Routing,
    check_num_selected,
    every_expert,
    make_routing,
    open_logits,
    selection_weight,
    usable_tokens,
)


def expert_choice_routing(
    gate_logits: Float[Array, "tokens experts"],
    capacity: int,
    *,
    num_taken: Int[Array, ""] | None = None,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Every expert takes the `capacity` tokens of largest p_te, p = softmax over experts of l.

    The load is equal by construction; a token may get no expert, or all. The weights are p_te. Not
    for causal models: whether a token is taken depends on the tokens after it. Equal probabilities
    go to the earlier token; a token whose logits are NaN is taken by none.

    The record has k = E with experts in the order of their index, `keep` saying who took whom.

    Args:
        gate_logits: scores l.
        capacity: C, tokens an expert takes; the unmasked tokens if they are fewer.
        num_taken: takes only so many, at most C: data, where the capacity is a shape.
        mask, expert_mask: see `moe_jax.core.token_choice`.
        axis_names: mesh axes that split the tokens, for the losses; each shard chooses by itself.

    Raises:
        ValueError: if capacity is less than 1, or a mask does not fit.

    Reference: Zhou et al. 2022 (arXiv 2202.09368), equations 1-2.
    """
    num_tokens, num_experts = gate_logits.shape
    check_capacity(capacity)
    gate_logits, mask = open_logits(gate_logits, mask, expert_mask)
    log_probability = jax.nn.log_softmax(gate_logits, axis=-1)
    eligible = mask[:, None] & ~jnp.isnan(log_probability)
    rank_by = jnp.where(eligible, jax.lax.stop_gradient(log_probability), -jnp.inf)
    _, taken = jax.lax.top_k(rank_by.T, min(capacity, num_tokens))
    is_taken = jnp.ones(taken.shape[1], dtype=jnp.bool_)
    if num_taken is not None:
        is_taken = jnp.arange(taken.shape[1], dtype=jnp.int32) < num_taken.astype(jnp.int32)
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    chosen = jnp.zeros((num_tokens, num_experts), dtype=jnp.bool_)
    chosen = chosen.at[taken, expert[:, None]].set(is_taken[None, :])
    return make_routing(
        gate_logits,
        every_expert(num_tokens, num_experts),
        jnp.exp(log_probability),
        mask,
        keep=chosen & ~jnp.isneginf(rank_by),
        expert_mask=expert_mask,
        axis_names=axis_names,
    )


def sinkhorn_routing(
    gate_logits: Float[Array, "tokens experts"],
    num_selected: int,
    *,
    num_iterations: int = 16,
    renormalize: bool = True,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Sends each token to the experts of largest entry in the balanced plan of `sinkhorn_plan`.

    The plan decides; the weights are those of `top_k_routing` for the experts it decided on, so the
    gradient does not pass through the iterations. Use it in training and `top_k_routing` after: the
    plan of one token depends on all others.

    Args:
        gate_logits: scores l.
        num_selected: K.
        num_iterations: see `sinkhorn_plan`.
        renormalize, mask, expert_mask: see `top_k_routing`.
        axis_names: mesh axes that split the tokens, for the losses; each shard has its own plan.

    Reference: Clark et al. 2022 (arXiv 2202.01169), section 3.2 and appendix B.
    """
    check_num_selected(num_selected, gate_logits.shape[-1])
    gate_logits, mask = open_logits(gate_logits, mask, expert_mask)
    # A token that is not finite decides for itself alone.
    usable = usable_tokens(gate_logits, mask)
    plan = sinkhorn_plan(jax.lax.stop_gradient(gate_logits), num_iterations, mask=usable)
    log_probability = jax.nn.log_softmax(gate_logits, axis=-1)
    rank_by = jnp.where(usable[:, None], plan, jax.lax.stop_gradient(log_probability))
    _, expert_index = jax.lax.top_k(rank_by, num_selected)
    selected = jnp.take_along_axis(log_probability, expert_index, axis=-1)
    weight = selection_weight(selected, renormalize=renormalize)
    return make_routing(
        gate_logits, expert_index, weight, mask, expert_mask=expert_mask, axis_names=axis_names
    )


def sinkhorn_plan(
    gate_logits: Float[Array, "tokens experts"],
    num_iterations: int,
    *,
    mask: Bool[Array, " tokens"] | None = None,
) -> Float[Array, "tokens experts"]:
    """Logarithm of the entropic transport plan between tokens and open experts.

    exp(plan) = diag(u) exp(l) diag(v), with rows summing to 1 over experts and columns to T / E
    over the tokens that count: the last half-step fits the rows exactly, the columns are fitted as
    well as `num_iterations` alternations allow. Rows of masked tokens are plain log-softmax plus v.

    Raises:
        ValueError: if num_iterations is less than 1.

    Reference: Cuturi 2013 (arXiv 1306.0895), algorithm 1, in logarithms.
    """
    check_num_iterations(num_iterations)
    gate_logits, mask = open_logits(gate_logits, mask, None)
    is_open = jnp.any(~jnp.isneginf(gate_logits) & mask[:, None], axis=0)
    num_open = jnp.maximum(jnp.sum(is_open, dtype=jnp.float32), 1.0)
    target = jnp.log(jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0) / num_open)
    target = target.astype(gate_logits.dtype)
    counted = jnp.where(mask[:, None], gate_logits, -jnp.inf)

    def iterate(_: Array, v: Array) -> Array:
        u = -jax.nn.logsumexp(gate_logits + v[None, :], axis=1)
        column = jax.nn.logsumexp(counted + u[:, None], axis=0)
        return jnp.where(is_open, target - column, 0.0)

    # Under shard_map a loop's carry must vary over the mesh from the start: v = 0 would not.
    v = iterate(jnp.int32(0), jnp.zeros(gate_logits.shape[1], dtype=gate_logits.dtype))
    v = jax.lax.fori_loop(1, num_iterations, iterate, v)
    return jax.nn.log_softmax(gate_logits + v[None, :], axis=1)


def check_num_iterations(num_iterations: int) -> None:
    """Raises ValueError if there is no iteration to do."""
    if num_iterations < 1:
        raise ValueError(f"num_iterations={num_iterations} must be at least 1")


def update_balance_bias(
    balance_bias: Float[Array, "*layers experts"],
    load: Float[Array, "*layers experts"] | Int[Array, "*layers experts"],
    rate: Float[Array, ""] | float = 1e-3,
    *,
    expert_mask: Bool[Array, "*layers experts"] | None = None,
) -> Float[Array, "*layers experts"]:
    """Moves each expert's bias by `rate` against its load, then restores the mean of zero.

    b_e <- b_e + rate * sign(mean load - load_e), less the mean over e. To be called once an
    optimiser step, with the load of the whole batch: the counts, summed over micro-batches and
    shards, or the share in their sum. A load of zero everywhere (no token) changes nothing.

    Args:
        balance_bias: b of `sigmoid_routing`; no trainable parameter.
        load: `counts` or `load` of `RoutingMetrics`. Under a `capacity_factor` both are of what was
            kept, which hides how far the demand on a full expert goes beyond its capacity.
        rate: step, in units of the sigmoid score.
        expert_mask: False for a closed expert, whose bias stays and which counts in no mean.

    Reference: Wang et al. 2024 (arXiv 2408.15664), algorithm 1; the mean is ours.
    """
    load = load.astype(jnp.float32)
    is_open = jnp.ones(load.shape, dtype=jnp.bool_) if expert_mask is None else expert_mask
    is_open = jnp.broadcast_to(is_open, load.shape)
    num_open = jnp.maximum(jnp.sum(is_open, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)

    def mean(values: Array) -> Array:
        return jnp.sum(jnp.where(is_open, values, 0.0), axis=-1, keepdims=True) / num_open

    moved = balance_bias + jnp.float32(rate) * jnp.sign(mean(load) - load)
    return jnp.where(is_open, moved - mean(moved), balance_bias)
