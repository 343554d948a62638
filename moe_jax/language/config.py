"""Shape of a decoder language model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from moe_jax.core.capacity import PRIORITIES, expert_capacity
from moe_jax.core.experts import ACTIVATIONS
from moe_jax.core.routers import ROUTERS, check_options
from moe_jax.core.routing import check_num_selected

LAYER_KINDS = ("dense", "sparse")
REMAT_POLICIES = ("none", "dots", "full")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """Shape of a decoder; validates itself.

    Attributes:
        vocab_size: number of token ids.
        model_dim: width of the residual stream.
        num_layers: attention and feed-forward pairs.
        num_heads: query heads; `num_kv_heads` of keys and values are shared among them.
        num_kv_heads: divides num_heads.
        head_dim: width of a head, even; model_dim / num_heads if 0.
        layer_pattern: kind of each layer, `dense` or `sparse`, repeated to num_layers.
        hidden_dim: inner width of a dense layer's feed-forward network; 4 model_dim if 0.
        num_experts, num_selected, expert_hidden_dim, num_shared_experts, router, router_options,
            capacity_factor, capacity_priority, expert_dropout: see `moe_jax.core.SparseMoE`; used
            by sparse layers. expert_hidden_dim is 2 model_dim if 0. A router or priority that looks
            at later tokens is refused. A hash router hashes the token ids.
        activation: `silu`, `gelu` or `relu`, of the feed-forward networks.
        gated: gate them, activation(gate x) * (up x), or not, activation(up x).
        qk_norm: normalise queries and keys (arXiv 2302.05442), which tolerates larger steps.
        rope_base: base of the rotary frequencies (arXiv 2104.09864).
        tie_embeddings: use the input embedding as output projection.
        remat: what the backward pass recomputes: `none`, all but matrix products (`dots`), or all
            within a layer (`full`). On CPU it saves memory with scan_layers only.
        scan_layers: compile equal layers once and loop over them; else unroll.
        dtype: operands of the matrix products, float32 or bfloat16, a name or a type. Parameters,
            residual stream, gates and losses are float32.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """

    vocab_size: int
    model_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    layer_pattern: tuple[str, ...] = ("sparse",)
    hidden_dim: int = 0
    num_experts: int = 8
    num_selected: int = 2
    expert_hidden_dim: int = 0
    num_shared_experts: int = 0
    router: str = "top_k"
    router_options: Mapping[str, Any] = FrozenDict()
    capacity_factor: float | None = None
    capacity_priority: str = "position"
    expert_dropout: float = 0.0
    gated: bool = True
    activation: str = "silu"
    qk_norm: bool = True
    rope_base: float = 10_000.0
    tie_embeddings: bool = False
    remat: str = "none"
    scan_layers: bool = True
    dtype: jax.typing.DTypeLike = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.layer_pattern, str):
            raise ValueError(f"layer_pattern={self.layer_pattern!r} must be a sequence of kinds")
        object.__setattr__(self, "layer_pattern", tuple(self.layer_pattern))
        for name in ("vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads"):
            _check_integer(self, name)
        if self.head_dim == 0:
            _check_divides(self, "num_heads", "model_dim")
            object.__setattr__(self, "head_dim", self.model_dim // self.num_heads)
        _check_integer(self, "head_dim")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        _check_divides(self, "num_kv_heads", "num_heads")
        for name, factor in (("hidden_dim", 4), ("expert_hidden_dim", 2)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, factor * self.model_dim)
        if not self.layer_pattern:
            raise ValueError("layer_pattern=() must name at least one layer")
        for kind in self.layer_pattern:
            _check_one_of("layer_pattern", kind, LAYER_KINDS)
        if "dense" in self.layer_kinds:
            _check_integer(self, "hidden_dim")
        if "sparse" in self.layer_kinds:
            for name in ("num_experts", "num_selected", "expert_hidden_dim"):
                _check_integer(self, name)
            check_num_selected(self.num_selected, self.num_experts)
            _check_integer(self, "num_shared_experts", at_least=0)
            self._check_router()
        if not self.rope_base > 1:
            raise ValueError(f"rope_base={self.rope_base} must exceed 1")
        _check_one_of("activation", self.activation, tuple(ACTIVATIONS))
        _check_one_of("remat", self.remat, REMAT_POLICIES)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))

    def _check_router(self) -> None:
        _check_one_of("router", self.router, tuple(ROUTERS))
        router = ROUTERS[self.router]
        object.__setattr__(self, "router_options", FrozenDict(self.router_options))
        check_options("router_options", self.router, router, self.router_options)
        _check_one_of("capacity_priority", self.capacity_priority, PRIORITIES)
        if self.capacity_factor is not None:
            expert_capacity(1, self.num_selected, self.num_experts, self.capacity_factor)
        limited_by_score = self.capacity_factor is not None and self.capacity_priority == "score"
        if router.looks_ahead or limited_by_score:
            name = "router" if router.looks_ahead else "capacity_priority"
            raise ValueError(
                f"{name}={getattr(self, name)!r} lets a token's output depend on later tokens, "
                "which a causal model cannot know; use it in moe_jax.core.SparseMoE directly"
            )
        if not 0 <= self.expert_dropout < 1:
            raise ValueError(f"expert_dropout={self.expert_dropout} is not in [0, 1)")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of every layer, the pattern repeated and cut to num_layers."""
        repeats = -(-self.num_layers // len(self.layer_pattern))
        return (self.layer_pattern * repeats)[: self.num_layers]

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers with a gate."""
        return self.layer_kinds.count("sparse")


def _check_integer(config: LanguageModelConfig, name: str, at_least: int = 1) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {at_least}")


def _check_divides(config: LanguageModelConfig, divisor: str, number: str) -> None:
    small, large = getattr(config, divisor), getattr(config, number)
    if large % small:
        raise ValueError(f"{number}={large} is not divisible by {divisor}={small}")


def _dtype_name(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    _check_one_of("dtype", name, DTYPES)
    return name


def _check_one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is not one of {accepted}")
