"""Sampling text from a language model, many rows at once, each token read once."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from moe_jax.language.cache import dropless, read_prompts, read_tokens
from moe_jax.language.model import LanguageModel
from moe_jax.language.sampling import Sampling, check_sampling, draw
from moe_jax.sharding import constrain

LEAST_LENGTH = 16
"""Rows are padded to this or a power of 2, so that few lengths are compiled."""

Prompts = (
    Sequence[Sequence[int] | Int[Array | np.ndarray, " length"]]
    | Int[Array | np.ndarray, "batch length"]
)


class Texts(NamedTuple):
    """Rows being continued.

    Attributes:
        tokens: prompt and new tokens, from slot 0 on.
        lengths: number of tokens of each row.
        logits: of the next token.
        cache: keys and values of all tokens.
        is_active: False once a row met a stop token.
    """

    tokens: Int[Array, "batch slots"]
    lengths: Int[Array, " batch"]
    logits: Float[Array, "batch vocab"]
    cache: PyTree
    is_active: Bool[Array, " batch"]


def generate(
    key: Key[Array, ""],
    model: LanguageModel,
    variables: PyTree,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Continues each prompt, token by token.

    A row's text depends on its own prompt and number alone: experts have no capacity here, whatever
    the model was trained with. Rows longer than the model was trained with are read all the same,
    usually with worse answers.

    Args:
        key: random key.
        model: the model.
        variables: what `model.init` gives: its parameters and, where routers keep any, state.
        prompts: one list of token ids a row, each with at least one, usually starting with BOS.
        max_new_tokens: number of tokens drawn at most.
        temperature: tokens are drawn from softmax(logits / temperature); 0 takes the most likely.
        top_k: draw among the k most likely tokens only.
        top_p: draw among the fewest most likely tokens of this probability together.
        stop: token id, or several, that end a row's text; not returned.

    Returns:
        The new tokens of each row.

    Raises:
        ValueError: if a prompt is no list of token ids of the vocabulary, or a number is out of
            range.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for new in stream(
        key,
        model,
        variables,
        prompts,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        tokens_at_once=max(max_new_tokens, 1),
    ):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return rows


def stream(
    key: Key[Array, ""],
    model: LanguageModel,
    variables: PyTree,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: int | Sequence[int] | None = None,
    tokens_at_once: int = 1,
) -> Iterator[list[list[int]]]:
    """As `generate`, but yields the new tokens of each row as they come, some at once."""
    config = model.config
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    if tokens_at_once < 1:
        raise ValueError(f"tokens_at_once={tokens_at_once} must be at least 1")
    sampling = check_sampling(temperature, top_k, top_p, config.vocab_size)
    stops = stop_tokens(stop, config.vocab_size)
    tokens, lengths = padded_prompts(prompts, config.vocab_size)
    if not len(lengths) or not max_new_tokens:
        return
    num_slots = bucket(int(lengths.max()) + max_new_tokens)
    model = dropless(model)
    texts = begin(model, variables, tokens, lengths, num_slots)
    for start in range(0, max_new_tokens, tokens_at_once):
        count = min(tokens_at_once, max_new_tokens - start)
        before = np.asarray(texts.lengths)
        texts = _continue(model, variables, texts, key, lengths, sampling, stops, np.int32(count))
        after, rows = np.asarray(texts.lengths), np.asarray(texts.tokens)
        yield [row[i:j].tolist() for row, i, j in zip(rows, before, after, strict=True)]
        if not np.any(np.asarray(texts.is_active)):
            return


def padded_prompts(prompts: Prompts, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as one array int32[batch, bucket], filled up with 0, and their lengths."""
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = list(np.atleast_1d(np.asarray(prompts)))
    rows = []
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim == 1 and ids.size == 0:
            raise ValueError(f"prompt {number} is empty; give at least one token, such as BOS")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"prompt {number} of type {ids.dtype} and shape {ids.shape}: expected a list of "
                "token ids, such as a tokenizer's encode gives; [ids] is a batch of one prompt"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            outside = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(
                f"prompt {number} holds token {outside}, not in [0, vocab_size={vocab_size})"
            )
        rows.append(ids)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), bucket(int(lengths.max(initial=1)))), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return tokens, lengths


def stop_tokens(stop: int | Sequence[int] | None, vocab_size: int) -> np.ndarray:
    """The ids that end a text, int32[any]; -1, which is no token, if there are none."""
    ids = np.atleast_1d(np.asarray([] if stop is None else stop))
    if ids.size and not (np.issubdtype(ids.dtype, np.integer) and ids.ndim == 1):
        raise ValueError(f"stop={stop!r} is no token id or list of them")
    if np.any((ids < 0) | (ids >= vocab_size)):
        raise ValueError(f"stop={stop!r} is not in [0, vocab_size={vocab_size})")
    return ids.astype(np.int32) if ids.size else np.array([-1], np.int32)


def bucket(length: int) -> int:
    """The least power of 2 that holds `length`, and at least `LEAST_LENGTH`."""
    return max(LEAST_LENGTH, 1 << (length - 1).bit_length())


@partial(jax.jit, static_argnums=(0, 4))
def begin(
    model: LanguageModel,
    variables: PyTree,
    tokens: Int[Array | np.ndarray, "batch length"],
    lengths: Int[Array | np.ndarray, " batch"],
    num_slots: int,
) -> Texts:
    """Reads prompts laid out by `padded_prompts`, to have at most `num_slots` tokens each."""
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
    logits, cache = read_prompts(model, variables, tokens, lengths, max(num_slots, tokens.shape[1]))
    room = max(num_slots - tokens.shape[1], 0)
    tokens = jnp.pad(tokens, ((0, 0), (0, room)))
    logits = constrain(logits, (None, None), model.mesh)
    return Texts(tokens, lengths, logits, cache, jnp.ones(lengths.shape, bool))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _continue(
    model: LanguageModel,
    variables: PyTree,
    texts: Texts,
    key: Array,
    prompt_lengths: Array,
    sampling: Sampling,
    stops: Array,
    count: Array,
) -> Texts:
    """Draws `count` tokens of every active row, or until none is active."""
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(prompt_lengths)))

    def draws_on(state: tuple[Array, Texts]) -> Array:
        return (state[0] < count) & jnp.any(state[1].is_active)

    def step(state: tuple[Array, Texts]) -> tuple[Array, Texts]:
        index, texts = state
        keys = jax.vmap(jax.random.fold_in)(row_keys, texts.lengths - prompt_lengths)
        drawn = draw(keys, texts.logits, sampling)
        is_active = texts.is_active & ~jnp.any(drawn[:, None] == stops[None], axis=1)
        rows = jnp.arange(len(drawn), dtype=jnp.int32)
        # The place after an ended row's last token is free, and stays unread.
        tokens = texts.tokens.at[rows, texts.lengths].set(drawn, mode="drop")
        logits, cache = read_tokens(
            model, variables, texts.cache, drawn[:, None], texts.lengths, is_active
        )
        logits = constrain(logits[:, 0], (None, None), model.mesh)
        lengths = texts.lengths + is_active.astype(jnp.int32)
        return index + 1, Texts(tokens, lengths, logits, cache, is_active)

    texts = jax.lax.while_loop(draws_on, step, (jnp.int32(0), texts))[1]
    # Every process reads all of these.
    return texts._replace(
        tokens=constrain(texts.tokens, (None, None), model.mesh),
        lengths=constrain(texts.lengths, (None,), model.mesh),
        is_active=constrain(texts.is_active, (None,), model.mesh),
    )
