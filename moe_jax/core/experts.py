"""Feed-forward networks: many experts over rows sorted by expert, or one over every token."""

from collections.abc import Callable, Mapping
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from moe_jax.core.fused_experts import fused_experts
from moe_jax.core.grouped_matmul import check_implementation, grouped_matmul
from moe_jax.core.precision import wide_type

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "relu": nn.relu,
}
FUSED_EQUAL_ROWS = 128
"""From so many rows an expert on CPU, a loop takes bfloat16 forward and back faster than batched
products do: 1.9 times at 640 rows, 1.2 at 128, 0.9 at 64."""


class ExpertFFN(nn.Module):
    """Feed-forward experts without biases.

    f(x) = down(activation(gate x) * (up x)), or down(activation(up x)) if not gated.

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
        dtype: type of the matrix products' operands; they accumulate in float32, of float64 in
            float64.
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
    def weights(self, model_dim: int) -> dict[str, Array]:
        """The parameters, for tokens of that width."""
        weight = partial(_weight, self, num_experts=self.num_experts)
        shape = (model_dim, self.hidden_dim)
        inner = {name: weight(name, shape) for name in (("gate", "up") if self.gated else ("up",))}
        return inner | {"down": weight("down", shape[::-1], scale=self.down_scale)}

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
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={self.dropout_rate} is not in [0, 1)")
        drop = None
        if self.dropout_rate and not deterministic:
            if row_ids is None:
                row_ids = jnp.arange(rows.shape[0], dtype=jnp.int32)
            drop = partial(_drop, self.make_rng("dropout"), row_ids, self.dropout_rate)
        weights = self.weights(rows.shape[1])
        return self.answer(weights, rows, group_sizes, drop)

    def answer(
        self,
        weights: Mapping[str, Array],
        rows: Float[Array, "rows model"],
        group_sizes: Int[Array, " groups"] | None,
        drop: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "rows model"]:
        """What the experts of these weights, perhaps a part of all, answer; see `__call__`."""
        activate = _activate(self.activation, self.gated)
        num_rows, num_experts = rows.shape[0], weights["down"].shape[0]
        if group_sizes is None and num_rows % num_experts:
            raise ValueError(
                f"rows={num_rows} do not divide into num_experts={num_experts} equal groups"
            )
        if group_sizes is not None and group_sizes.shape != (num_experts,):
            raise ValueError(
                f"group_sizes {group_sizes.shape} do not fit num_experts={num_experts}"
            )
        inner = [weights[name] for name in ("gate", "up") if name in weights]
        down = weights["down"]
        rows = rows.astype(self.dtype)
        implementation = check_implementation(self.implementation)
        # Batched products suit equal groups, but their derivative in bfloat16 is slow on CPU.
        is_fused = group_sizes is not None or (
            self.dtype == jnp.bfloat16 and num_rows >= FUSED_EQUAL_ROWS * num_experts
        )
        if implementation == "loop" and is_fused and drop is None:
            return fused_experts(activate, rows, tuple(inner), down, group_sizes)

        def multiply(lhs: Array, weight: Array) -> Array:
            weight = weight.astype(self.dtype)
            if group_sizes is None:
                return _multiply_equal_groups(lhs, weight)
            return grouped_matmul(lhs, weight, group_sizes, implementation)

        hidden = _hidden(activate, *(multiply(rows, weight) for weight in inner))
        return multiply(hidden if drop is None else drop(hidden), down)


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
        activate = _activate(self.activation, self.gated)
        shape = (x.shape[-1], self.hidden_dim)
        names = ("gate", "up") if self.gated else ("up",)
        inner = [_weight(self, name, shape).astype(self.dtype) for name in names]
        down = _weight(self, "down", shape[::-1], scale=self.down_scale).astype(self.dtype)
        x = x.astype(self.dtype)
        return matmul(_hidden(activate, *(matmul(x, weight) for weight in inner)), down)


def matmul(
    x: Float[Array, "*batch inner"], kernel: Float[Array, "inner outer"]
) -> Float[Array, "*batch outer"]:
    """Returns x kernel, accumulated in `wide_type`, in the type of `x`."""
    return jnp.dot(x, kernel, preferred_element_type=wide_type(x.dtype)).astype(x.dtype)


def _multiply_equal_groups(lhs: Array, rhs: Array) -> Array:
    groups = lhs.reshape(rhs.shape[0], -1, lhs.shape[1])
    out = jnp.einsum("gmk,gkn->gmn", groups, rhs, preferred_element_type=wide_type(lhs.dtype))
    return out.reshape(lhs.shape[0], rhs.shape[2]).astype(lhs.dtype)


@partial(jax.checkpoint, static_argnums=0)
def _hidden(activate: Callable[..., Array], *products: Array) -> Array:
    """The activation in `wide_type`, recomputed backward: cheaper than storing its parts."""
    wide = activate(*(product.astype(wide_type(product.dtype)) for product in products))
    return wide.astype(products[0].dtype)


@cache
def _activate(name: str, gated: bool) -> Callable[..., Array]:
    """From the products with `gate` and `up`, or with `up` alone, to the hidden rows.

    The same function for the same arguments, so that JAX does not trace it anew.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not one of {tuple(ACTIVATIONS)}")
    activation = ACTIVATIONS[name]
    return (lambda gate, up: activation(gate) * up) if gated else activation


def _drop(key: Key[Array, ""], row_ids: Int[Array, " rows"], rate: float, hidden: Array) -> Array:
    def keep(row_id: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, row_id), 1.0 - rate, hidden.shape[1:])

    scaled = hidden.astype(wide_type(hidden.dtype)) / (1.0 - rate)
    return jnp.where(jax.vmap(keep)(row_ids), scaled, 0.0).astype(hidden.dtype)


def _weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, int],
    *,
    scale: float = 1.0,
    num_experts: int | None = None,
) -> Array:
    """A float32 matrix of standard deviation scale / sqrt(fan-in), or one an expert."""
    leading = () if num_experts is None else (num_experts,)
    initializer = nn.initializers.variance_scaling(
        scale**2,
        "fan_in",
        "truncated_normal",
        in_axis=-2,
        out_axis=-1,
        batch_axis=tuple(range(len(leading))),
    )
    return module.param(name, initializer, leading + shape, jnp.float32)
