"""Moving tokens to their experts and back: a sort by expert, a gather, and its transpose.

Rows are the T K assignments sorted by expert, those not kept last. Both moves are gathers in both
directions of differentiation; neither needs a scatter, which is slow on CPU and TPU.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.precision import wide_type
from moe_jax.core.routing import Routing, expert_counts
from moe_jax.core.varying import vary_alike

UNROLLED_CHOICES = 16
"""Up to so many choices a token XLA fuses the gathers of all into one sum over them; it would write
[tokens, k, model] first if they were gathered at once, at five times the cost (2 choices, CPU)."""


@chex.dataclass(frozen=True)
class RowOrder:
    """Where each assignment stands once sorted by expert.

    Attributes:
        token_of_row: int32[rows], the token whose copy a row holds; T where it holds none, a row
            of zeros.
        row_of_assignment: int32[tokens, k], the row of each assignment; `rows` where it has none
            and contributes 0. Inverse to `token_of_row`: the moves rely on it backward.
        group_sizes: int32[experts], rows of each expert; those of expert e follow those of e - 1,
            and rows past the sum belong to none.
    """

    token_of_row: Array
    row_of_assignment: Array
    group_sizes: Array


def sort_by_expert(routing: Routing) -> RowOrder:
    """Orders the assignments by expert, and by token within an expert (the sort is stable)."""
    num_experts = routing.gate_logits.shape[-1]
    return sort_assignments(routing.expert_index, routing.keep, num_experts)


def sort_assignments(
    expert_index: Int[Array, "tokens k"], keep: Bool[Array, "tokens k"], num_experts: int
) -> RowOrder:
    """`sort_by_expert` of the kept assignments to `num_experts` experts."""
    num_tokens, num_selected = expert_index.shape
    expert = jnp.where(keep, expert_index, num_experts).reshape(-1)
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
        group_sizes=expert_counts(expert_index, keep, num_experts),
    )


def dispatch(tokens: Float[Array, "tokens model"], order: RowOrder) -> Float[Array, "rows model"]:
    """Copies each token to the rows of its experts: rows[m] = tokens[token_of_row[m]]."""
    return _dispatch(*vary_alike(jnp.asarray(tokens), order.token_of_row, order.row_of_assignment))


def combine(
    rows: Float[Array, "rows model"],
    combine_weight: Float[Array, "tokens k"],
    order: RowOrder,
) -> Float[Array, "tokens model"]:
    """Weighted sum of each token's expert answers, out[t] = sum_k w[t, k] rows[row(t, k)].

    Summed in float32, or in float64 if the rows are; returned in the type of `rows`. An assignment
    of weight 0 contributes exactly 0 even if its row is not finite.
    """
    rows, combine_weight = jnp.asarray(rows), jnp.asarray(combine_weight)
    return _combine(*vary_alike(rows, combine_weight, order.token_of_row, order.row_of_assignment))


@jax.custom_vjp
def _dispatch(tokens: Array, token_of_row: Array, row_of_assignment: Array) -> Array:
    return _take(tokens, token_of_row)


def _dispatch_forward(
    tokens: Array, token_of_row: Array, row_of_assignment: Array
) -> tuple[Array, Array]:
    return _dispatch(tokens, token_of_row, row_of_assignment), row_of_assignment


def _dispatch_backward(row_of_assignment: Array, gradient: Array) -> tuple[Array, None, None]:
    def term(row: Array) -> Array:
        return _take(gradient, row).astype(wide_type(gradient.dtype))

    return _sum_over_choices(term, row_of_assignment).astype(gradient.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _combine(
    rows: Array, combine_weight: Array, token_of_row: Array, row_of_assignment: Array
) -> Array:
    wide = wide_type(rows.dtype)

    def term(row: Array, weight: Array) -> Array:
        weight = weight[:, None].astype(wide)
        return jnp.where(weight == 0.0, 0.0, weight * _take(rows, row).astype(wide))

    return _sum_over_choices(term, row_of_assignment, combine_weight).astype(rows.dtype)


def _combine_forward(
    rows: Array, combine_weight: Array, token_of_row: Array, row_of_assignment: Array
) -> tuple[Array, tuple[Array, ...]]:
    out = _combine(rows, combine_weight, token_of_row, row_of_assignment)
    return out, (rows, combine_weight, token_of_row, row_of_assignment)


def _combine_backward(
    residuals: tuple[Array, ...], gradient: Array
) -> tuple[Array, Array, None, None]:
    rows, combine_weight, token_of_row, row_of_assignment = residuals
    wide = wide_type(rows.dtype)

    def term(row: Array) -> Array:
        answer = _take(rows, row).astype(wide)
        return jnp.sum(answer * gradient.astype(wide), axis=1)

    if row_of_assignment.shape[1] <= UNROLLED_CHOICES:
        weight_gradient = jnp.stack(
            [term(row_of_assignment[:, k]) for k in range(row_of_assignment.shape[1])], axis=1
        )
    else:
        weight_gradient = jax.lax.map(term, row_of_assignment.T).T
    weight_of_row = (
        jnp.zeros(token_of_row.shape, dtype=wide)
        .at[row_of_assignment.reshape(-1)]
        .set(combine_weight.reshape(-1).astype(wide), mode="drop", wrap_negative_indices=False)
    )
    row_gradient = _take(gradient, token_of_row).astype(wide) * weight_of_row[:, None]
    weight_gradient = weight_gradient.astype(combine_weight.dtype)
    return row_gradient.astype(rows.dtype), weight_gradient, None, None


_combine.defvjp(_combine_forward, _combine_backward)


def _sum_over_choices(term: Callable[..., Array], *per_choice: Array) -> Array:
    """Sum over choices k of term(column k of each array)."""
    num_choices = per_choice[0].shape[1]
    if num_choices <= UNROLLED_CHOICES:
        terms = [term(*(array[:, k] for array in per_choice)) for k in range(num_choices)]
        return sum(terms[1:], terms[0])
    columns = [array.T for array in per_choice]
    return jax.lax.fori_loop(
        1,
        num_choices,
        lambda k, total: total + term(*(column[k] for column in columns)),
        term(*(column[0] for column in columns)),
    )


def _take(values: Array, index: Array) -> Array:
    """values[index], and 0 where an index is past the end."""
    if values.shape[0] == 0:
        return jnp.zeros((*index.shape, *values.shape[1:]), values.dtype)
    return values.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
