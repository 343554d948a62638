"""Fixed capacity: each expert answers at most C assignments, and the others are dropped.

A dropped assignment adds nothing to its token's output, which then rests on the residual
connection around the layer; the weights of what is kept are not raised in exchange.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from moe_jax.core.permutation import RowOrder
from moe_jax.core.routing import Routing

PRIORITIES = ("position", "score")


def expert_capacity(
    num_tokens: int, num_selected: int, num_experts: int, capacity_factor: float
) -> int:
    """C = ceil(capacity_factor T K / E), at least 1: a factor of 1 just holds a balanced load.

    Raises:
        ValueError: if capacity_factor is not in (0, E / K]; at E / K an expert can hold every
            token, and no larger factor can mean anything but a capacity in its place.
    """
    largest = num_experts / num_selected
    if not 0 < capacity_factor <= largest:
        raise ValueError(
            f"capacity_factor={capacity_factor} is not in (0, {largest:.17g}]: at "
            f"num_experts/num_selected={largest:.17g} nothing is dropped"
        )
    # Rounding must not raise the capacity: 1.1 * 10 is 11.000000000000002.
    exact = capacity_factor * num_tokens * num_selected / num_experts
    return max(1, math.ceil(exact * (1.0 - 1e-12)))


def capacity_of_mask(
    mask: Bool[Array, " tokens"], num_selected: int, num_experts: int, capacity_factor: float
) -> Int[Array, ""]:
    """`expert_capacity` of the tokens that count, as data."""
    num_tokens = mask.shape[0]
    largest = expert_capacity(num_tokens, num_selected, num_experts, capacity_factor)
    count = jnp.sum(mask, dtype=jnp.int32)
    share = capacity_factor * num_selected / num_experts
    # Float32 rounding must neither raise it nor move that of a full batch.
    rounded = jnp.ceil(count.astype(jnp.float32) * jnp.float32(share * (1.0 - 1e-6)))
    capacity = jnp.clip(rounded.astype(jnp.int32), 1, largest)
    return jnp.where(count == num_tokens, jnp.int32(largest), capacity)


def limit_capacity(routing: Routing, capacity: int, *, priority: str = "position") -> Routing:
    """Drops what exceeds `capacity` assignments of an expert: `keep` False and weight 0.

    Args:
        routing: a router's record. Masked tokens use no capacity.
        capacity: C, assignments an expert answers; more than the tokens drops nothing.
        priority: `position` keeps the earliest tokens, so that a token's output never depends on
            later ones; `score` keeps the largest combine weights (batch priority routing, Riquelme
            et al. 2021, arXiv 2106.05974, by assignment), which looks ahead. Ties go to the earlier
            token, then to its better choice. NaN comes last.

    Raises:
        ValueError: if capacity is less than 1 or priority is unknown.
    """
    check_capacity(capacity)
    if priority not in PRIORITIES:
        raise ValueError(f"priority={priority!r} is not one of {PRIORITIES}")
    rank = _rank_by_score(routing) if priority == "score" else _rank_by_position(routing)
    keep = routing.keep & (rank < capacity)
    return dataclasses.replace(
        routing, keep=keep, combine_weight=jnp.where(keep, routing.combine_weight, 0.0)
    )


def order_by_capacity(routing: Routing, capacity: int) -> RowOrder:
    """Lays the kept assignments out as E equal groups of `capacity` rows, in order of token.

    Rows that no assignment fills have `token_of_row` = T, and assignments not kept
    `row_of_assignment` = E C. No expert may keep more than `capacity`; see `limit_capacity`.
    """
    check_capacity(capacity)
    num_tokens, num_selected = routing.expert_index.shape
    num_experts = routing.gate_logits.shape[-1]
    num_rows = num_experts * capacity
    row = routing.expert_index * capacity + _rank_by_position(routing)
    row = jnp.where(routing.keep, row, num_rows)
    token = jnp.broadcast_to(
        jnp.arange(num_tokens, dtype=jnp.int32)[:, None], (num_tokens, num_selected)
    )
    token_of_row = (
        jnp.full(num_rows, num_tokens, dtype=jnp.int32)
        .at[row.reshape(-1)]
        .set(token.reshape(-1), mode="drop")
    )
    return RowOrder(
        token_of_row=token_of_row,
        row_of_assignment=row,
        group_sizes=jnp.full(num_experts, capacity, dtype=jnp.int32),
    )


def check_capacity(capacity: int) -> None:
    """Raises ValueError unless capacity is an integer, which a factor is not, and at least 1."""
    if not isinstance(capacity, int | np.integer):
        raise ValueError(f"capacity={capacity!r} is not an integer, see expert_capacity")
    if capacity < 1:
        raise ValueError(f"capacity={capacity} must be at least 1")


def _rank_by_position(routing: Routing) -> Int[Array, "tokens k"]:
    """Number of earlier tokens that keep the same expert."""
    expert = jnp.arange(routing.gate_logits.shape[-1], dtype=jnp.int32)
    chosen = routing.expert_index[:, :, None] == expert[None, None, :]
    takes = jnp.any(chosen & routing.keep[:, :, None], axis=1)
    earlier = jnp.cumsum(takes, axis=0, dtype=jnp.int32) - takes.astype(jnp.int32)
    return jnp.take_along_axis(earlier, routing.expert_index, axis=1)


def _rank_by_score(routing: Routing) -> Int[Array, "tokens k"]:
    """Number of the expert's kept assignments of larger weight, or of equal weight and earlier."""
    score = jax.lax.stop_gradient(routing.combine_weight).reshape(-1)
    score = jnp.where(jnp.isnan(score), -jnp.inf, score)
    num_experts = routing.gate_logits.shape[-1]
    expert = jnp.where(routing.keep, routing.expert_index, num_experts).reshape(-1)
    position = jnp.arange(expert.shape[0], dtype=jnp.int32)
    keys = (expert, -score, position)
    sorted_expert, _, order = jax.lax.sort(keys, num_keys=2, is_stable=True)
    is_first = jnp.diff(sorted_expert, prepend=jnp.int32(-1)) != 0
    start = jax.lax.cummax(jnp.where(is_first, position, 0))
    rank = jnp.zeros_like(position).at[order].set(position - start, unique_indices=True)
    return rank.reshape(routing.expert_index.shape)
