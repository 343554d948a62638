"""Gates: Flax modules from tokens to one score an output (an expert, or a slot of one).

All of them compute in float32 at the highest precision, or in float64 if the tokens are float64:
rounding scores to bfloat16 changes which experts are chosen.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.core.precision import wide_type

STATE = "router_state"
"""Flax collection of what a router keeps but no optimiser trains."""


class LinearGate(nn.Module):
    """l = x W. Parameter: `kernel` [model, features]."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch features"]:
        """Returns the scores."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        return _dot(x, kernel)


class CosineGate(nn.Module):
    """l_e = cos(W x, v_e) / temperature, which bounds the scores and keeps them from collapsing.

    Parameters: `projection` [model, projection_dim], `embedding` [projection_dim, features], and
    `log_temperature` [], kept above log(min_temperature) where it is used.

    Attributes:
        features: scores a token.
        projection_dim: width in which the angle is taken, at most model; None takes it in the
            tokens' own space, without `projection`.
        temperature: at the start.
        min_temperature: lower bound.

    Reference: Chi et al. 2022 (arXiv 2204.09179), equations 5-6.
    """

    features: int
    projection_dim: int | None = 256
    temperature: float = 0.07
    min_temperature: float = 0.01

    @nn.compact
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch features"]:
        """Returns the scores; those of a zero vector are 0."""
        if not 0 < self.min_temperature <= self.temperature:
            raise ValueError(
                f"temperature={self.temperature} must be at least "
                f"min_temperature={self.min_temperature} > 0"
            )
        if self.projection_dim is not None and self.projection_dim < 1:
            raise ValueError(f"projection_dim={self.projection_dim} must be at least 1")
        x = x.astype(wide_type(x.dtype))
        initializer = nn.initializers.lecun_normal()
        if self.projection_dim is not None:
            shape = (x.shape[-1], min(self.projection_dim, x.shape[-1]))
            x = _dot(x, self.param("projection", initializer, shape, jnp.float32))
        shape = (x.shape[-1], self.features)
        embedding = self.param("embedding", initializer, shape, jnp.float32)
        log_temperature = self.param(
            "log_temperature", nn.initializers.constant(jnp.log(self.temperature)), (), jnp.float32
        )
        cosine = _dot(_unit(x, axis=-1), _unit(embedding, axis=0))
        temperature = jnp.maximum(jnp.exp(log_temperature), self.min_temperature)
        return cosine / temperature.astype(cosine.dtype)


class HiddenLayerGate(nn.Module):
    """l = W2 gelu(W1 x + b1) + b2, whose partition of the input space is not linear.

    Parameters: `hidden` and `out`, each with `kernel` and `bias`.

    Attributes:
        features: scores a token.
        hidden_dim: width of the hidden layer.
    """

    features: int
    hidden_dim: int = 64

    @nn.compact
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch features"]:
        """Returns the scores."""
        if self.hidden_dim < 1:
            raise ValueError(f"hidden_dim={self.hidden_dim} must be at least 1")
        x = x.astype(wide_type(x.dtype))
        hidden = nn.gelu(
            nn.Dense(self.hidden_dim, dtype=x.dtype, precision="highest", name="hidden")(x)
        )
        return nn.Dense(self.features, dtype=x.dtype, precision="highest", name="out")(hidden)


class RandomGate(nn.Module):
    """l = x R with R drawn once and never trained; in collection `router_state`, as `kernel`.

    The baseline that tells what learning the gate adds.
    """

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch features"]:
        """Returns the scores."""
        shape = (x.shape[-1], self.features)
        initializer = nn.initializers.lecun_normal()
        kernel = self.variable(
            STATE, "kernel", lambda: initializer(self.make_rng("params"), shape, jnp.float32)
        )
        return _dot(x, jax.lax.stop_gradient(kernel.value))


GATES: dict[str, type[nn.Module]] = {
    "linear": LinearGate,
    "cosine": CosineGate,
    "hidden_layer": HiddenLayerGate,
    "random": RandomGate,
}


def _dot(x: Array, kernel: Array) -> Array:
    dtype = wide_type(x.dtype)
    return jnp.dot(x.astype(dtype), kernel.astype(dtype), precision="highest")


def _unit(x: Array, axis: int) -> Array:
    """Unit vectors x / |x|, and 0 with derivative 0 at 0."""
    square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    # Asked this way round, a NaN stays one.
    is_zero = square == 0
    return jnp.where(is_zero, 0.0, x * jax.lax.rsqrt(jnp.where(is_zero, 1.0, square)))
