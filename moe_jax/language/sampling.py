"""Distributions that tokens are drawn from."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

REMOVED = -jnp.inf


class Sampling(NamedTuple):
    """How a token is drawn from logits; `check_sampling` says what each may be.

    Attributes:
        temperature: of softmax(logits / temperature); 0 takes the most likely token.
        top_k: draw among the k most likely tokens; the whole vocabulary for no limit.
        top_p: then among the fewest most likely tokens of this probability together; 1 for all.
    """

    temperature: float | Array
    top_k: int | Array
    top_p: float | Array


def check_sampling(
    temperature: float, top_k: int | None, top_p: float, vocab_size: int
) -> Sampling:
    """The arguments as a record, or a ValueError that names one out of range."""
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must not be negative")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k={top_k} is not in [1, vocab_size={vocab_size}]")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not in (0, 1]")
    return Sampling(float(temperature), vocab_size if top_k is None else int(top_k), float(top_p))


def log_probabilities(
    logits: Float[Array, "*batch vocab"], sampling: Sampling
) -> Float[Array, "*batch vocab"]:
    """Logarithm of the distribution that is drawn from, -inf where a token is left out.

    Of temperature 0 it is all on the first of the most likely tokens. Of several tokens as likely
    as the last one within `top_k` or `top_p`, all stay.
    """
    vocab_size = logits.shape[-1]
    best = jnp.argmax(logits, axis=-1)
    greedy = jnp.where(jax.nn.one_hot(best, vocab_size) > 0, 0.0, REMOVED)

    def cut(warm: Array) -> Array:
        ordered = jnp.flip(jnp.sort(warm, axis=-1), axis=-1)
        place = jax.lax.broadcasted_iota(jnp.int32, warm.shape, warm.ndim - 1)
        ordered = jnp.where(place < sampling.top_k, ordered, REMOVED)
        probability = jax.nn.softmax(ordered)
        before = jnp.cumsum(probability, axis=-1) - probability
        # The first token stays whatever its own probability.
        inside = (place < sampling.top_k) & ((before < sampling.top_p) | (place == 0))
        least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(warm >= least, warm, REMOVED)

    warm = logits / jnp.maximum(sampling.temperature, 1e-6)
    whole = (sampling.top_k >= vocab_size) & (sampling.top_p >= 1.0)
    # A sort of the vocabulary costs more than the rest of a small model.
    warm = jax.lax.cond(whole, lambda warm: warm, cut, warm)
    return jnp.where(sampling.temperature > 0, jax.nn.log_softmax(warm), greedy)


def draw(
    keys: Key[Array, " batch"], logits: Float[Array, "batch vocab"], sampling: Sampling
) -> Int[Array, " batch"]:
    """One token a row."""
    drawn = jax.vmap(jax.random.categorical)(keys, log_probabilities(logits, sampling))
    return drawn.astype(jnp.int32)
