"""The mixture-of-experts layer: a router, a way of laying the tokens out, and the experts."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.capacity import (
    PRIORITIES,
    expert_capacity,
    limit_capacity,
    order_by_capacity,
)
from moe_jax.core.experts import ExpertFFN, FeedForward
from moe_jax.core.losses import load_balance_loss, router_z_loss
from moe_jax.core.permutation import RowOrder, combine, dispatch, sort_by_expert
from moe_jax.core.routers import (
    ROUTERS,
    ExpertChoiceRouter,
    SoftRouter,
    check_options,
    named_module,
)
from moe_jax.core.routing import Routing, check_num_selected
from moe_jax.core.soft import SoftWeights, answer_tokens, fill_slots

Exchange = Callable[[ExpertFFN, Mapping[str, Array], Array, Routing, int | None], Array]
"""(experts, weights, tokens [tokens, model], routing, most rows an expert) -> [tokens, model]."""


class SparseMoE(nn.Module):
    """Each token goes to the experts its router chooses; by default none is dropped.

    y = sum_{e in S(x)} w_e(x) FFN_e(x) + sum_s FFN_s(x), with S(x) and w from the router, and s
    over the shared experts, which see every token.

    Parameters, float32 at the start: those of the `router`, `experts` as in `ExpertFFN`, and
    `shared_experts` as in `FeedForward` of width num_shared_experts x hidden_dim. The routers with
    state keep it in collection `router_state`.

    For example, 8 gated experts of which each token uses 2, and a layer in the manner of
    DeepSeek-V3:

        SparseMoE(num_experts=8, num_selected=2, hidden_dim=1024)
        SparseMoE(num_experts=64, num_selected=6, hidden_dim=256, num_shared_experts=2,
                  router="sigmoid", router_options={"num_groups": 8, "num_selected_groups": 3})

    Attributes:
        num_experts: E.
        num_selected: K, experts a token goes to (on average, for expert choice).
        hidden_dim: inner width of one expert.
        num_shared_experts: experts that see every token, besides the E.
        router: a key of `ROUTERS`.
        router_options: attributes of that router, its gate among them.
        capacity_factor: None drops nothing. A number lets each expert answer at most
            `expert_capacity` assignments, counted over all tokens, whose padding leaves room to the
            others, and over those of one shard inside `shard_map`.
        capacity_priority: which assignments stay, see `limit_capacity`.
        activation, gated, dropout_rate, dtype, down_scale, implementation: see `ExpertFFN`; shared
            experts have no dropout.
        exchange: applies the experts where a mesh splits them: `moe_jax.sharding.ExpertParallel`.
            None where every device has all.
    """

    num_experts: int
    num_selected: int
    hidden_dim: int
    num_shared_experts: int = 0
    router: str = "top_k"
    router_options: Mapping[str, Any] = FrozenDict()
    capacity_factor: float | None = None
    capacity_priority: str = "position"
    activation: str = "silu"
    gated: bool = True
    dropout_rate: float = 0.0
    dtype: jax.typing.DTypeLike = jnp.float32
    down_scale: float = 1.0
    implementation: str | None = None
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        # A dict would leave the module without a hash, and so without a place in jit's statics.
        self.router_options = FrozenDict(self.router_options)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch model"],
        mask: Bool[Array, "*batch"] | None = None,
        *,
        token_ids: Int[Array, "*batch"] | None = None,
        expert_mask: Bool[Array, " experts"] | None = None,
        deterministic: bool = True,
        capture: bool = False,
    ) -> tuple[Float[Array, "*batch model"], Routing]:
        """Routes, applies the experts and combines.

        Args:
            x: tokens; leading axes are flattened for routing, except by the soft router, for which
                the last of them is a sequence.
            mask: False for padding, whose output is 0 and which changes nothing else.
            token_ids: for the hash router.
            expert_mask: False for a closed (pruned) expert, which gets no token. Data, not shape:
                changing it does not recompile.
            deterministic: False while training, where noise, jitter and dropout draw from the
                random streams `router` and `dropout`, and Sinkhorn balances.
            capture: fill the record's `output_norm`.

        Returns:
            The layer's output in the type of `x`, and the `Routing` of the flattened tokens.

        Raises:
            ValueError: naming the attribute or argument, its value and what is accepted.
        """
        # numpy arrays and lists are what a notebook has at hand.
        x = jnp.asarray(x)
        mask, token_ids, expert_mask = (
            None if values is None else jnp.asarray(values)
            for values in (mask, token_ids, expert_mask)
        )
        self._check(x)
        if self.exchange is not None:
            self._check_exchange(capture)
        shape = x.shape[:-1]
        tokens = x.reshape(-1, x.shape[-1])
        # Checked before it is flattened: a transposed mask would fit and cover other tokens.
        mask = None if mask is None else _flatten("mask", mask, x)
        token_ids = None if token_ids is None else _flatten("token_ids", token_ids, x)
        if mask is not None:
            if mask.dtype != jnp.bool_:
                raise ValueError(f"mask has type {mask.dtype}; expected bool")
            # A NaN in padding would otherwise reach the weights' gradients as 0 NaN.
            tokens = jnp.where(mask[:, None], tokens, jnp.zeros_like(tokens))
        module = named_module("router", self.router, ROUTERS)
        options = check_options("router_options", self.router, module, self.router_options)
        router = module(
            num_experts=self.num_experts, num_selected=self.num_selected, **options, name="router"
        )
        experts = ExpertFFN(
            num_experts=self.num_experts,
            hidden_dim=self.hidden_dim,
            activation=self.activation,
            gated=self.gated,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            down_scale=self.down_scale,
            implementation=self.implementation,
            name="experts",
        )
        if isinstance(router, SoftRouter):
            sequences = (math.prod(shape[:-1]), shape[-1] if shape else 1)
            out, routing = self._soft(
                router, experts, tokens, mask, sequences, expert_mask, deterministic, capture
            )
        else:
            routing = router(
                tokens,
                mask,
                token_ids=token_ids,
                expert_mask=expert_mask,
                deterministic=deterministic,
            )
            routing, capacity = self._limit(router, routing)
            if self.exchange is None:
                out, routing = self._answer(
                    experts, tokens, routing, capacity, deterministic, capture
                )
            else:
                weights = experts.weights(tokens.shape[-1])
                out = self.exchange(experts, weights, tokens, routing, capacity)
        out = out.astype(x.dtype)
        if self.num_shared_experts:
            # Shared experts side by side are one feed-forward network of their joint width.
            shared = FeedForward(
                hidden_dim=self.num_shared_experts * self.hidden_dim,
                activation=self.activation,
                gated=self.gated,
                dtype=self.dtype,
                down_scale=self.down_scale,
                name="shared_experts",
            )
            out = out + shared(tokens).astype(x.dtype)
        return out.reshape(x.shape), routing

    def _check(self, x: Array) -> None:
        check_num_selected(self.num_selected, self.num_experts)
        for name, at_least in (("hidden_dim", 1), ("num_shared_experts", 0)):
            if getattr(self, name) < at_least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {at_least}")
        if x.ndim == 0 or x.shape[-1] == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x {x.shape} of type {x.dtype}: expected floats [..., model]")
        if not jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating):
            raise ValueError(f"dtype={jnp.dtype(self.dtype)} is not a floating-point type")
        if self.capacity_priority not in PRIORITIES:
            raise ValueError(
                f"capacity_priority={self.capacity_priority!r} is not one of {PRIORITIES}"
            )
        chooses_tokens = self.router in ("expert_choice", "soft")
        if self.capacity_factor is not None and chooses_tokens:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} does not apply to router={self.router!r}"
                + ("; set it in router_options" if self.router == "expert_choice" else "")
            )

    def _check_exchange(self, capture: bool) -> None:
        if self.router in ("expert_choice", "soft"):
            raise ValueError(
                f"exchange is for routers whose tokens choose experts, not router={self.router!r}"
            )
        if capture or self.dropout_rate:
            raise ValueError(
                f"exchange has neither capture={capture} nor dropout_rate={self.dropout_rate}"
            )

    def _limit(self, router: nn.Module, routing: Routing) -> tuple[Routing, int | None]:
        """The routing after drops, and the most rows of an expert where there is a limit."""
        num_tokens = routing.mask.shape[0]
        if isinstance(router, ExpertChoiceRouter):
            return routing, min(router.capacity(num_tokens), max(num_tokens, 1))
        if self.capacity_factor is None:
            return routing, None
        capacity = expert_capacity(
            num_tokens, self.num_selected, self.num_experts, self.capacity_factor
        )
        return limit_capacity(routing, capacity, priority=self.capacity_priority), capacity

    def _answer(
        self,
        experts: ExpertFFN,
        tokens: Array,
        routing: Routing,
        capacity: int | None,
        deterministic: bool,
        capture: bool,
    ) -> tuple[Array, Routing]:
        if capacity is None:
            order = sort_by_expert(routing)
        else:
            order = order_by_capacity(routing, capacity)
        rows = experts(
            dispatch(tokens.astype(self.dtype), order),
            order.group_sizes if capacity is None else None,
            deterministic=deterministic,
            row_ids=_assignment_of_row(order) if self.dropout_rate else None,
        )
        out = combine(rows, routing.combine_weight, order)
        if capture:
            norm = _norm_of_assignment(rows, order, routing)
            routing = dataclasses.replace(routing, output_norm=norm)
        return out, routing

    def _soft(
        self,
        router: nn.Module,
        experts: nn.Module,
        tokens: Array,
        mask: Array | None,
        shape: tuple[int, int],
        expert_mask: Array | None,
        deterministic: bool,
        capture: bool,
    ) -> tuple[Array, Routing]:
        if mask is None:
            mask = jnp.ones(tokens.shape[0], dtype=jnp.bool_)
        sequences = tokens.reshape(*shape, tokens.shape[-1])
        routing, weights = router(
            sequences,
            mask.reshape(shape),
            expert_mask=expert_mask,
            deterministic=deterministic,
        )
        slots = jax.vmap(fill_slots)(sequences.astype(self.dtype), weights)
        num_sequences, num_slots, model_dim = slots.shape
        # [sequences, experts x slots] -> [experts x sequences x slots], equal groups of rows.
        by_expert = (num_sequences, self.num_experts, num_slots // self.num_experts, model_dim)
        rows = jnp.swapaxes(slots.reshape(by_expert), 0, 1)
        answers = experts(
            rows.reshape(-1, model_dim),
            None,
            deterministic=deterministic,
            row_ids=jnp.arange(num_sequences * num_slots, dtype=jnp.int32),
        )
        answers = jnp.swapaxes(answers.reshape(rows.shape), 0, 1).reshape(slots.shape)
        out = jax.vmap(answer_tokens)(answers, weights)
        if capture:
            routing = dataclasses.replace(
                routing, output_norm=_norm_of_slots(answers, weights, routing)
            )
        routing = _merge_sequences(routing, expert_mask, router.axis_names)
        return out.reshape(tokens.shape), routing


def _flatten(name: str, values: Array, x: Array) -> Array:
    if values.shape != x.shape[:-1]:
        raise ValueError(f"{name} {values.shape} does not fit x {x.shape}: expected {x.shape[:-1]}")
    return values.reshape(-1)


def _merge_sequences(
    routing: Routing, expert_mask: Array | None, axis_names: tuple[str, ...]
) -> Routing:
    """[sequences, tokens, ...] -> [sequences x tokens, ...]; losses are over all tokens anew."""

    def merge(leaf: Array) -> Array:
        return leaf if leaf.ndim == 1 else leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])

    routing = jax.tree.map(merge, routing)
    logits, mask = routing.gate_logits, routing.mask
    return dataclasses.replace(
        routing,
        load_balance_loss=load_balance_loss(
            logits, routing.expert_index, mask, expert_mask=expert_mask, axis_names=axis_names
        ),
        router_z_loss=router_z_loss(logits, mask, axis_names=axis_names),
    )


def _assignment_of_row(order: RowOrder) -> Array:
    """Number t K + k of the assignment in each row; 0 in rows that hold none."""
    assignment = jnp.arange(order.row_of_assignment.size, dtype=jnp.int32)
    row = order.row_of_assignment.reshape(-1)
    return jnp.zeros_like(order.token_of_row).at[row].set(assignment, mode="drop")


def _norm_of_assignment(rows: Array, order: RowOrder, routing: Routing) -> Array:
    norm = _norm(rows.astype(jnp.float32))
    norm = norm.at[order.row_of_assignment].get(mode="fill", fill_value=0.0)
    return jnp.where(routing.keep, norm, 0.0)


def _norm_of_slots(answers: Array, weights: SoftWeights, routing: Routing) -> Array:
    """Norm of what an expert adds to a token, before its weight: a mean over the expert's slots."""
    num_sequences, num_tokens, num_experts = routing.expert_index.shape
    slots_each = answers.shape[1] // num_experts
    split = (num_sequences, num_tokens, num_experts, slots_each)
    answers = answers.astype(jnp.float32).reshape(
        num_sequences, num_experts, slots_each, answers.shape[-1]
    )
    combine_weight = weights.combine.astype(jnp.float32).reshape(split)
    added = jnp.einsum("ntep,nepd->nted", combine_weight, answers)
    total = routing.combine_weight.astype(jnp.float32)
    norm = _norm(added) / jnp.where(total > 0, total, 1.0)
    return jnp.where(routing.keep & (total > 0), norm, 0.0)


def _norm(values: Array) -> Array:
    """Euclidean norm over the last axis, with derivative 0 at 0; an empty row is one."""
    square = jnp.sum(jnp.square(values), axis=-1)
    is_zero = square == 0
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, square)))
