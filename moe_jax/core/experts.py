"""Gated feed-forward networks: many experts over rows sorted by expert, or one over every token."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.core.grouped_matmul import grouped_matmul

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": nn.silu, "gelu": nn.gelu}


class ExpertFFN(nn.Module):
    """Gated feed-forward experts, down(activation(gate x) * (up x)), without biases.

    Parameters, float32: `gate` and `up` [experts, model, hidden], `down` [experts, hidden, model].

    Attributes:
        num_experts: E.
        hidden_dim: F, the inner width of one expert.
        activation: `silu` (SwiGLU, arXiv 2002.05202) or `gelu` (GEGLU, tanh approximation).
        dtype: type of the matrix products' operands; they accumulate in float32.
        down_scale: factor on the standard deviation of `down` at the start.
        implementation: see `grouped_matmul`.
    """

    num_experts: int
    hidden_dim: int
    activation: str = "silu"
    dtype: jax.typing.DTypeLike = jnp.float32
    down_scale: float = 1.0
    implementation: str | None = None

    @nn.compact
    def __call__(
        self, rows: Float[Array, "rows model"], group_sizes: Int[Array, " experts"]
    ) -> Float[Array, "rows model"]:
        """Applies expert e to its group of rows.

        Args:
            rows: tokens sorted by expert; rows past the sum of `group_sizes` are ignored.
            group_sizes: number of rows of each expert.

        Returns:
            The experts' answers in `dtype`; 0 in the rows past the sum.
        """
        activation = _activation(self.activation)
        shape = (rows.shape[-1], self.hidden_dim)
        gate = _weight(self, "gate", shape, self.dtype, num_experts=self.num_experts)
        up = _weight(self, "up", shape, self.dtype, num_experts=self.num_experts)
        down = _weight(
            self, "down", shape[::-1], self.dtype, self.down_scale, num_experts=self.num_experts
        )
        rows = rows.astype(self.dtype)

        def multiply(lhs: Array, rhs: Array) -> Array:
            return grouped_matmul(lhs, rhs, group_sizes, self.implementation)

        return multiply(_gated(activation, multiply(rows, gate), multiply(rows, up)), down)


class FeedForward(nn.Module):
    """The gated feed-forward network of one expert, applied to every token.

    Parameters, float32: `gate` and `up` [model, hidden], `down` [hidden, model].

    Attributes:
        hidden_dim, activation, dtype, down_scale: see `ExpertFFN`.
    """

    hidden_dim: int
    activation: str = "silu"
    dtype: jax.typing.DTypeLike = jnp.float32
    down_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch model"]:
        """Returns down(activation(gate x) * (up x)) in `dtype`."""
        activation = _activation(self.activation)
        shape = (x.shape[-1], self.hidden_dim)
        gate = _weight(self, "gate", shape, self.dtype)
        up = _weight(self, "up", shape, self.dtype)
        down = _weight(self, "down", shape[::-1], self.dtype, self.down_scale)
        x = x.astype(self.dtype)
        return matmul(_gated(activation, matmul(x, gate), matmul(x, up)), down)


def matmul(
    x: Float[Array, "*batch inner"], kernel: Float[Array, "inner outer"]
) -> Float[Array, "*batch outer"]:
    """Returns x kernel, accumulated in float32, in the type of `x`."""
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)


@partial(jax.checkpoint, static_argnums=0)
def _gated(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """activation(gate) * up in float32, recomputed backward: cheaper than storing its parts."""
    product = activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return product.astype(gate.dtype)


def _activation(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not one of {tuple(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    scale: float = 1.0,
    *,
    num_experts: int | None = None,
) -> Array:
    """A float32 matrix of standard deviation scale / sqrt(fan-in), or one an expert, cast."""
    leading = () if num_experts is None else (num_experts,)
    initializer = nn.initializers.variance_scaling(
        scale**2,
        "fan_in",
        "truncated_normal",
        in_axis=-2,
        out_axis=-1,
        batch_axis=tuple(range(len(leading))),
    )
    return module.param(name, initializer, leading + shape, jnp.float32).astype(dtype)
