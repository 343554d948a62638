"""Feed-forward networks: many experts over rows sorted by expert, or one over every token."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from moe_jax.core.grouped_matmul import grouped_matmul

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "relu": nn.relu,
}


class ExpertFFN(nn.Module):
    """Feed-forward experts without biases: down(activation(gate x) * (up x)) or down(activation(up x)).

    Parameters, float32: `gate` (if gated) and `up` [experts, model, hidden], `down`
    [experts, hidden, model].

    Attributes:
        num_experts: E.
        hidden_dim: F, the inner width of one expert.
        activation: `silu` (gated: SwiGLU, arXiv 2002.05202), `gelu` (GEGLU; tanh approximation) or
            `relu`.
        gated: False for the plain network of two matrices, without `gate`.
        dropout_rate: probability that a hidden unit of a row is 0 while training; the others are
            divided by 1 - dropout_rate. Expert dropout of Switch Transformer, arXiv 2101.03961.
        dtype: type of the matrix products' operands; they accumulate in float32.
        down_scale: factor on the standard deviation of `down` at the start.
        implementation: see `grouped_matmul`.
    """

    num_experts: int
    hidden_dim: int
    activation: str = "silu"
    gated: bool = True
    dropout_rate: float = 0.0
    dtype: jax.typing.DTypeLike = jnp.float32
    down_scale: float = 1.0
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        rows: Float[Array, "rows model"],
        group_sizes: Int[Array, " experts"] | None = None,
        *,
        deterministic: bool = True,
        row_ids: Int[Array, " rows"] | None = None,
    ) -> Float[Array, "rows model"]:
        """Applies expert e to its group of rows.

        Args:
            rows: tokens sorted by expert; rows past the sum of `group_sizes` are ignored.
            group_sizes: number of rows of each expert; None for rows / E each.
            deterministic: False draws dropout from the random stream `dropout`.
            row_ids: what a row's dropout depends on besides the key, for example the number of its
                assignment; None for its place among the rows.

        Returns:
            The experts' answers in `dtype`; 0 in the rows past the sum.

        Raises:
            ValueError: if an attribute is out of range or the rows do not divide into E groups.
        """
        activation = _activation(self.activation)
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={self.dropout_rate} is not in [0, 1)")
        num_rows, model_dim = rows.shape
        if group_sizes is None and num_rows % self.num_experts:
            raise ValueError(
                f"rows={num_rows} do not divide into num_experts={self.num_experts} equal groups"
            )
        weight = partial(_weight, self, dtype=self.dtype, num_experts=self.num_experts)
        shape = (model_dim, self.hidden_dim)
        gate = weight("gate", shape) if self.gated else None
        up = weight("up", shape)
        down = weight("down", shape[::-1], scale=self.down_scale)
        rows = rows.astype(self.dtype)

        def multiply(lhs: Array, rhs: Array) -> Array:
            if group_sizes is None:
                return _multiply_equal_groups(lhs, rhs)
            return grouped_matmul(lhs, rhs, group_sizes, self.implementation)

        hidden = multiply(rows, up)
        hidden = _activate(activation, None if gate is None else multiply(rows, gate), hidden)
        if self.dropout_rate and not deterministic:
            if row_ids is None:
                row_ids = jnp.arange(num_rows, dtype=jnp.int32)
            hidden = _drop(self.make_rng("dropout"), hidden, row_ids, self.dropout_rate)
        return multiply(hidden, down)


class FeedForward(nn.Module):
    """The feed-forward network of one expert, applied to every token.

    Parameters, float32: `gate` (if gated) and `up` [model, hidden], `down` [hidden, model].

    Attributes:
        hidden_dim, activation, gated, dtype, down_scale: see `ExpertFFN`.
    """

    hidden_dim: int
    activation: str = "silu"
    gated: bool = True
    dtype: jax.typing.DTypeLike = jnp.float32
    down_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch model"]:
        """Returns down(activation(gate x) * (up x)), or down(activation(up x)), in `dtype`."""
        activation = _activation(self.activation)
        weight = partial(_weight, self, dtype=self.dtype)
        shape = (x.shape[-1], self.hidden_dim)
        gate = weight("gate", shape) if self.gated else None
        up = weight("up", shape)
        down = weight("down", shape[::-1], scale=self.down_scale)
        x = x.astype(self.dtype)
        hidden = matmul(x, up)
        hidden = _activate(activation, None if gate is None else matmul(x, gate), hidden)
        return matmul(hidden, down)


def matmul(
    x: Float[Array, "*batch inner"], kernel: Float[Array, "inner outer"]
) -> Float[Array, "*batch outer"]:
    """Returns x kernel, accumulated in float32, in the type of `x`."""
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)


def _multiply_equal_groups(lhs: Array, rhs: Array) -> Array:
    groups = lhs.reshape(rhs.shape[0], -1, lhs.shape[1])
    out = jnp.einsum("gmk,gkn->gmn", groups, rhs, preferred_element_type=jnp.float32)
    return out.reshape(lhs.shape[0], rhs.shape[2]).astype(lhs.dtype)


@partial(jax.checkpoint, static_argnums=0)
def _activate(activation: Callable[[Array], Array], gate: Array | None, up: Array) -> Array:
    """activation(gate) * up in float32, recomputed backward: cheaper than storing its parts."""
    wide = up.astype(jnp.float32)
    hidden = activation(wide) if gate is None else activation(gate.astype(jnp.float32)) * wide
    return hidden.astype(up.dtype)


def _drop(
    key: Key[Array, ""], hidden: Array, row_ids: Int[Array, " rows"], rate: float
) -> Array:
    def keep(row_id: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, row_id), 1.0 - rate, hidden.shape[1:])

    scaled = hidden.astype(jnp.float32) / (1.0 - rate)
    return jnp.where(jax.vmap(keep)(row_ids), scaled, 0.0).astype(hidden.dtype)


def _activation(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not one of {tuple(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, int],
    *,
    dtype: jax.typing.DTypeLike,
    scale: float = 1.0,
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
