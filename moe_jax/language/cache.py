"""Keys and values of the tokens already read, so that each new token costs one step of the model.

Row i's token at position p stands in slot p, whatever the other rows hold: rows of unequal length
need no padding in front, and a row is shortened by calling its length less. Slots past a row's
length hold what is never seen and is written over.

A cache is a dict laid out as the parameters: keys and values of each attention, [layers of a run,
batch, kv_heads, slots, head].
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from moe_jax.language.attention import CACHE
from moe_jax.language.model import LanguageModel


def dropless(model: LanguageModel) -> LanguageModel:
    """The model without capacities, under which a row's tokens would depend on the other rows."""
    return LanguageModel(dataclasses.replace(model.config, capacity_factor=None), model.parallel)


def read_prompts(
    model: LanguageModel,
    variables: PyTree,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    num_slots: int,
) -> tuple[Float[Array, "batch vocab"], PyTree]:
    """Logits after the last token of each row, and a cache of `num_slots` slots, at least length.

    Args:
        model: the model, see `dropless`.
        variables: its parameters and state.
        tokens: the rows from their first token on; what follows `lengths` is ignored.
        lengths: number of tokens of each row, at least 1.
        num_slots: most tokens a row is going to have.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    segment_ids = (index < lengths[:, None]).astype(jnp.int32)
    (logits, _), changed = model.apply(variables, tokens, segment_ids, mutable=[CACHE])
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]

    def widen(rows: Array) -> Array:
        return jnp.pad(rows, [(0, 0)] * 3 + [(0, num_slots - rows.shape[3]), (0, 0)])

    return last, jax.tree.map(widen, changed[CACHE])


def read_tokens(
    model: LanguageModel,
    variables: PyTree,
    cache: PyTree,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    is_active: Bool[Array, " batch"],
) -> tuple[Float[Array, "batch length vocab"], PyTree]:
    """Logits after each of some further tokens of every row, and the cache that holds them.

    Args:
        model: the model, see `dropless`.
        variables: its parameters and state.
        cache: of what stands before.
        tokens: at positions `lengths`, `lengths` + 1, ...
        lengths: tokens of each row before these.
        is_active: False for rows whose logits nobody reads: they use no expert.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = lengths[:, None] + index
    segment_ids = jnp.broadcast_to(is_active[:, None], tokens.shape).astype(jnp.int32)
    (logits, _), changed = model.apply(
        {**variables, CACHE: cache}, tokens, segment_ids, positions, mutable=[CACHE]
    )
    return logits, changed[CACHE]
