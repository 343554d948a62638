"""Moving tokens to their experts and back: a sort by expert, a gather, and its transpose.

Rows are the T K assignments sorted by expert, those not kept last. Both moves are gathers in both
directions of differentiation; neither needs a scatter, which is slow on CPU and TPU.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.core.routing import Routing, expert_counts


@chex.dataclass(frozen=True)
class RowOrder:
    """Where each assignment stands once sorted by expert.

    Attributes:
        token_of_row: int32[rows], the token whose copy a row holds.
        row_of_assignment: int32[tokens, k], the inverse of the sort.
        group_sizes: int32[experts], kept assignments of each expert; the rows of expert e follow
            those of e - 1, and rows past the sum belong to none.
    """

    token_of_row: Array
    row_of_assignment: Array
    group_sizes: Array


def sort_by_expert(routing: Routing) -> RowOrder:
    """Orders the assignments by expert, and by token within an expert (the sort is stable)."""
    num_tokens, num_selected = routing.expert_index.shape
    num_experts = routing.gate_logits.shape[-1]
    expert = jnp.where(routing.keep, routing.expert_index, num_experts).reshape(-1)
    assignment_of_row = jnp.argsort(expert, stable=True).astype(jnp.int32)
    num_rows = num_tokens * num_selected
    row_of_assignment = (
        jnp.zeros(num_rows, dtype=jnp.int32)
        .at[assignment_of_row]
        .set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
    )
    return RowOrder(
        token_of_row=assignment_of_row // jnp.int32(num_selected),
        row_of_assignment=row_of_assignment.reshape(num_tokens, num_selected),
        group_sizes=expert_counts(routing.expert_index, routing.keep, num_experts),
    )


def dispatch(tokens: Float[Array, "tokens model"], order: RowOrder) -> Float[Array, "rows model"]:
    """Copies each token to the rows of its experts: rows[m] = tokens[token_of_row[m]]."""
    return _dispatch(tokens, order.token_of_row, order.row_of_assignment)


def combine(
    rows: Float[Array, "rows model"],
    combine_weight: Float[Array, "tokens k"],
    order: RowOrder,
) -> Float[Array, "tokens model"]:
    """Weighted sum of each token's expert answers, out[t] = sum_k w[t, k] rows[row(t, k)].

    Summed in float32; returned in the type of `rows`. An assignment of weight 0 contributes exactly
    0 even if its row is not finite.
    """
    return _combine(rows, combine_weight, order.token_of_row, order.row_of_assignment)


@jax.custom_vjp
def _dispatch(tokens: Array, token_of_row: Array, row_of_assignment: Array) -> Array:
    return tokens[token_of_row]


def _dispatch_forward(
    tokens: Array, token_of_row: Array, row_of_assignment: Array
) -> tuple[Array, Array]:
    return _dispatch(tokens, token_of_row, row_of_assignment), row_of_assignment


def _dispatch_backward(row_of_assignment: Array, gradient: Array) -> tuple[Array, None, None]:
    per_assignment = gradient[row_of_assignment]
    summed = jnp.sum(per_assignment, axis=1, dtype=jnp.float32)
    return summed.astype(gradient.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _combine(
    rows: Array, combine_weight: Array, token_of_row: Array, row_of_assignment: Array
) -> Array:
    answers = rows[row_of_assignment].astype(jnp.float32)
    answers = jnp.where(combine_weight[:, :, None] == 0.0, 0.0, answers)
    return jnp.sum(answers * combine_weight[:, :, None], axis=1).astype(rows.dtype)


def _combine_forward(
    rows: Array, combine_weight: Array, token_of_row: Array, row_of_assignment: Array
) -> tuple[Array, tuple[Array, ...]]:
    out = _combine(rows, combine_weight, token_of_row, row_of_assignment)
    return out, (rows, combine_weight, token_of_row, row_of_assignment)


def _combine_backward(
    residuals: tuple[Array, ...], gradient: Array
) -> tuple[Array, Array, None, None]:
    rows, combine_weight, token_of_row, row_of_assignment = residuals
    answers = rows[row_of_assignment]
    weight_gradient = jnp.einsum(
        "tkd,td->tk", answers, gradient, preferred_element_type=jnp.float32
    )
    weight_of_row = (
        jnp.zeros(token_of_row.shape, dtype=jnp.float32)
        .at[row_of_assignment.reshape(-1)]
        .set(combine_weight.reshape(-1), unique_indices=True)
    )
    row_gradient = gradient[token_of_row].astype(jnp.float32) * weight_of_row[:, None]
    return row_gradient.astype(rows.dtype), weight_gradient, None, None


_combine.defvjp(_combine_forward, _combine_backward)
