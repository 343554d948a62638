"""Routers as Flax modules: a gate's parameters around the pure functions that decide."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core.balanced import (
    check_num_iterations,
    expert_choice_routing,
    sinkhorn_routing,
)
from moe_jax.core.capacity import capacity_of_mask, expert_capacity
from moe_jax.core.gates import GATES, STATE
from moe_jax.core.precision import wide_type
from moe_jax.core.routing import Routing, check_num_selected
from moe_jax.core.soft import SoftWeights, soft_routing
from moe_jax.core.token_choice import (
    dense_routing,
    hash_routing,
    noisy_top_k_routing,
    sigmoid_routing,
    top_k_routing,
)


class Router(nn.Module):
    """What all routers share: tokens in, `Routing` out.

    Attributes:
        num_experts: E.
        num_selected: K, experts of a token (on average, for expert choice).
        gate: a key of `GATES`.
        gate_options: attributes of the gate.
        jitter: half-width e of the factor, uniform in [1 - e, 1 + e], on the gate's input while
            training (Fedus et al. 2021, arXiv 2101.03961); drawn from the `router` random stream.
        axis_names: mesh axes that split the tokens inside `shard_map`, for the losses.
    """

    num_experts: int
    num_selected: int
    gate: str = "linear"
    gate_options: Mapping[str, Any] = FrozenDict()
    jitter: float = 0.0
    axis_names: tuple[str, ...] = ()

    looks_ahead: ClassVar[bool] = False
    """Whether a token's routing depends on later tokens when not training."""

    def __post_init__(self) -> None:
        # A dict would leave the module without a hash, and so without a place in jit's statics.
        self.gate_options = FrozenDict(self.gate_options)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, "tokens model"],
        mask: Bool[Array, " tokens"] | None = None,
        *,
        token_ids: Int[Array, " tokens"] | None = None,
        expert_mask: Bool[Array, " experts"] | None = None,
        deterministic: bool = True,
    ) -> Routing:
        """Routes the tokens.

        Args:
            tokens: what the gate sees.
            mask: False for padding.
            token_ids: what a hash router hashes; the others ignore it.
            expert_mask: False for a closed expert.
            deterministic: False while training, where some routers draw or balance.
        """
        check_num_selected(self.num_selected, self.num_experts)
        masks = {"mask": mask, "expert_mask": expert_mask, "axis_names": self.axis_names}
        return self.route(tokens, token_ids, deterministic, masks)

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """What a router is: its pure function on its own scores."""
        raise NotImplementedError

    def score(self, tokens: Array, deterministic: bool, features: int | None = None) -> Array:
        """Scores of the gate, one an expert unless `features` says otherwise."""
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter} is not in [0, 1)")
        if self.jitter and not deterministic:
            low, high = 1.0 - self.jitter, 1.0 + self.jitter
            key = self.make_rng("router")
            wide = wide_type(tokens.dtype)
            tokens = tokens.astype(wide) * jax.random.uniform(key, tokens.shape, wide, low, high)
        gate = named_module("gate", self.gate, GATES)
        options = check_options("gate_options", self.gate, gate, self.gate_options)
        num_features = self.num_experts if features is None else features
        return gate(features=num_features, **options, name="gate")(tokens)


class TopKRouter(Router):
    """`top_k_routing` of a gate's scores.

    Attributes:
        softmax, renormalize: see `top_k_routing`.
    """

    softmax: str = "before"
    renormalize: bool = True

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`."""
        return top_k_routing(
            self.score(tokens, deterministic),
            self.num_selected,
            softmax=self.softmax,
            renormalize=self.renormalize,
            **masks,
        )


class NoisyTopKRouter(Router):
    """`noisy_top_k_routing` while training, with learned scale softplus(x W); else `top_k_routing`.

    Parameter: `noise` [model, experts], besides the gate's. The noise comes from the `router`
    random stream.

    Attributes:
        renormalize: see `top_k_routing`.
    """

    renormalize: bool = True

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`."""
        gate_logits = self.score(tokens, deterministic)
        shape = (tokens.shape[-1], self.num_experts)
        noise = self.param("noise", nn.initializers.zeros, shape, jnp.float32)
        options = {"renormalize": self.renormalize, **masks}
        if deterministic:
            return top_k_routing(gate_logits, self.num_selected, **options)
        wide = gate_logits.dtype
        scale = jnp.dot(tokens.astype(wide), noise.astype(wide), precision="highest")
        key = self.make_rng("router")
        return noisy_top_k_routing(
            key, gate_logits, nn.softplus(scale), self.num_selected, **options
        )


class SigmoidRouter(Router):
    """`sigmoid_routing` with a balance bias in collection `router_state`, as `balance_bias`.

    The bias is no parameter: no gradient, optimiser state or weight decay. The training step moves
    it with `update_balance_bias`.

    Attributes:
        num_groups, num_selected_groups, renormalize, scale: see `sigmoid_routing`.
    """

    num_groups: int = 1
    num_selected_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`."""
        bias = self.variable(STATE, "balance_bias", jnp.zeros, (self.num_experts,), jnp.float32)
        return sigmoid_routing(
            self.score(tokens, deterministic),
            self.num_selected,
            balance_bias=bias.value,
            num_groups=self.num_groups,
            num_selected_groups=self.num_selected_groups,
            renormalize=self.renormalize,
            scale=self.scale,
            **masks,
        )


class ExpertChoiceRouter(Router):
    """`expert_choice_routing` of capacity_factor T K / E tokens an expert, T without padding.

    Attributes:
        capacity_factor: see `expert_capacity`.
    """

    capacity_factor: float = 1.0

    looks_ahead: ClassVar[bool] = True

    def capacity(self, num_tokens: int) -> int:
        """Tokens an expert takes where none is padding."""
        return expert_capacity(
            num_tokens, self.num_selected, self.num_experts, self.capacity_factor
        )

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`."""
        capacity = self.capacity(tokens.shape[0])
        mask, num_taken = masks["mask"], None
        if mask is not None:
            num_taken = capacity_of_mask(
                mask, self.num_selected, self.num_experts, self.capacity_factor
            )
        return expert_choice_routing(
            self.score(tokens, deterministic), capacity, num_taken=num_taken, **masks
        )


class SinkhornRouter(Router):
    """`sinkhorn_routing` while training, else `top_k_routing`, which needs no other tokens.

    Attributes:
        num_iterations, renormalize: see `sinkhorn_routing`.
    """

    num_iterations: int = 16
    renormalize: bool = True

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`."""
        check_num_iterations(self.num_iterations)
        gate_logits = self.score(tokens, deterministic)
        options = {"renormalize": self.renormalize, **masks}
        if deterministic:
            return top_k_routing(gate_logits, self.num_selected, **options)
        return sinkhorn_routing(
            gate_logits, self.num_selected, num_iterations=self.num_iterations, **options
        )


class HashRouter(Router):
    """`hash_routing` of `token_ids`; no gate, no parameter.

    Attributes:
        seed: see `hash_routing`; layers should differ.
    """

    seed: int = 0

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`; raises ValueError without token_ids, or if a gate was asked for."""
        if self.gate != "linear" or self.gate_options or self.jitter:
            raise ValueError(
                f"gate={self.gate!r}, gate_options={dict(self.gate_options)} and "
                f"jitter={self.jitter} do not apply to the hash router, which has no gate"
            )
        if token_ids is None or token_ids.shape != tokens.shape[:1]:
            shape = None if token_ids is None else token_ids.shape
            raise ValueError(f"token_ids {shape} does not fit: expected {tokens.shape[:1]}")
        return hash_routing(token_ids, self.num_experts, self.num_selected, seed=self.seed, **masks)


class DenseRouter(Router):
    """`dense_routing`: every expert answers every token, so num_selected must be num_experts."""

    def route(
        self, tokens: Array, token_ids: Array | None, deterministic: bool, masks: dict[str, Any]
    ) -> Routing:
        """See `Router`."""
        if self.num_selected != self.num_experts:
            raise ValueError(
                f"num_selected={self.num_selected} must equal num_experts={self.num_experts} "
                "for the dense router"
            )
        return dense_routing(self.score(tokens, deterministic), **masks)


class SoftRouter(Router):
    """`soft_routing` of one sequence; by default from cosines with a learned scale, as published.

    Attributes:
        slots_per_expert: P. An expert answers P rows a sequence whatever K is.
    """

    gate: str = "cosine"
    gate_options: Mapping[str, Any] = FrozenDict(projection_dim=None, temperature=1.0)
    slots_per_expert: int = 1

    looks_ahead: ClassVar[bool] = True

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        tokens: Float[Array, "sequences tokens model"],
        mask: Bool[Array, "sequences tokens"],
        *,
        expert_mask: Bool[Array, " experts"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Routing, SoftWeights]:
        """Routes each sequence by itself; both records have a leading axis over them."""
        check_num_selected(self.num_selected, self.num_experts)
        if self.slots_per_expert < 1:
            raise ValueError(f"slots_per_expert={self.slots_per_expert} must be at least 1")
        num_slots = self.num_experts * self.slots_per_expert
        slot_logits = self.score(tokens, deterministic, features=num_slots)

        def route(slot_logits: Array, mask: Array) -> tuple[Routing, SoftWeights]:
            return soft_routing(slot_logits, self.num_experts, mask=mask, expert_mask=expert_mask)

        return jax.vmap(route)(slot_logits, mask)


ROUTERS: dict[str, type[Router]] = {
    "top_k": TopKRouter,
    "noisy_top_k": NoisyTopKRouter,
    "sigmoid": SigmoidRouter,
    "expert_choice": ExpertChoiceRouter,
    "sinkhorn": SinkhornRouter,
    "hash": HashRouter,
    "dense": DenseRouter,
    "soft": SoftRouter,
}


def named_module(argument: str, name: str, modules: Mapping[str, type[Any]]) -> type[Any]:
    """The module of that name; ValueError if there is none."""
    if name not in modules:
        raise ValueError(f"{argument}={name!r} is not one of {tuple(modules)}")
    return modules[name]


def check_options(
    argument: str, name: str, module: type[nn.Module], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options as keyword arguments; ValueError if the module has no such attribute."""
    own = {"name", "parent", "features", "num_experts", "num_selected"}
    accepted = sorted({field.name for field in dataclasses.fields(module)} - own)
    for option in options:
        if option not in accepted:
            raise ValueError(f"{argument} of {name!r}: {option!r} is not one of {accepted}")
    return dict(options)
