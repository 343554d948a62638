"""Sampling text from a language model."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from moe_jax.language.model import LanguageModel
from moe_jax.sharding import constrain


def generate(
    key: Array,
    model: LanguageModel,
    variables: PyTree,
    prompt: Sequence[int] | Int[Array | np.ndarray, " length"],
    max_new_tokens: int,
    *,
    context_length: int,
    temperature: float = 1.0,
    stop: int | None = None,
) -> list[int]:
    """Continues a prompt, drawing each token from softmax(logits / temperature).

    Every step runs the model over the last `context_length` tokens; nothing is cached.

    Args:
        key: random key.
        model: the model.
        variables: what `model.init` gives: its parameters and, where routers keep any, state.
        prompt: token ids, at least one, usually starting with BOS.
        max_new_tokens: number of tokens drawn at most.
        context_length: tokens the model sees, at most those it was trained with.
        temperature: 0 takes the most likely token.
        stop: token id that ends the text; it is not returned.

    Returns:
        The new tokens.

    Raises:
        ValueError: if the prompt is no list of token ids of the vocabulary, or a number is out of
            range.
    """
    tokens = _token_ids(prompt, model.config.vocab_size)
    if context_length < 1:
        raise ValueError(f"context_length={context_length} must be at least 1")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must not be negative")
    prompt_length = len(tokens)
    for index in range(max_new_tokens):
        window = tokens[-context_length:]
        # Padded on the host: a device slice would be compiled anew for every length.
        padded = np.zeros((1, context_length), dtype=np.int32)
        padded[0, : len(window)] = window
        drawn = _draw(
            jax.random.fold_in(key, index), model, variables, padded, len(window), temperature
        )
        if int(drawn) == stop:
            break
        tokens.append(int(drawn))
    return tokens[prompt_length:]


def _token_ids(prompt: Sequence[int] | Array | np.ndarray, vocab_size: int) -> list[int]:
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise ValueError("prompt is empty; give at least one token, such as BOS")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"prompt of type {ids.dtype} and shape {ids.shape}: expected token ids, "
            "such as a tokenizer's encode gives"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        outside = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"prompt holds token {outside}, not in [0, vocab_size={vocab_size})")
    return [int(token) for token in ids]


@partial(jax.jit, static_argnums=1)
def _draw(
    key: Array,
    model: LanguageModel,
    variables: PyTree,
    tokens: Int[Array | np.ndarray, "1 length"],
    num_tokens: int | Int[Array, ""],
    temperature: float | Array,
) -> Int[Array, ""]:
    """Draws the token after the first `num_tokens`; those that follow are padding."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    segment_ids = (index < num_tokens).astype(jnp.int32)[None, :]
    logits, _ = model.apply(variables, tokens, segment_ids)
    last = logits[0, num_tokens - 1]
    last = constrain(last, (None,), model.mesh)
    warm = jax.random.categorical(key, last / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, warm, jnp.argmax(last)).astype(jnp.int32)
