"""Bits per byte on held-out documents, each byte scored once with the context of its document."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, PyTree

from moe_jax.language.batches import evaluation_windows
from moe_jax.language.corpus import TokenizedDocuments
from moe_jax.language.fit import Batch, forward, token_losses
from moe_jax.language.model import LanguageModel
from moe_jax.sharding import replicated


class Evaluation(NamedTuple):
    """Code length of documents under a model.

    Attributes:
        bits: float64[documents], -log2 probability of each document, its end included.
        bits_per_byte: sum of `bits` over the sum of the texts' bytes.
    """

    bits: Float64[np.ndarray, " documents"]
    bits_per_byte: float


def make_evaluation(
    model: LanguageModel, *, sequence_length: int, batch_size: int, pad_id: int
) -> Callable[[PyTree, TokenizedDocuments], Evaluation]:
    """Builds (variables, documents) -> Evaluation, compiled once.

    Documents are scored in windows of `sequence_length` that advance by a quarter of it, so that
    every token but a document's first ones has at least three quarters of a window of context.
    """

    def nats(variables: PyTree, batch: Batch) -> Array:
        logits, _ = forward(model, variables, batch)
        losses = token_losses(logits, batch["targets"], batch["loss_mask"])
        return jnp.sum(losses, axis=1)

    whole = None if model.mesh is None else replicated(model.mesh)
    compiled = jax.jit(nats, out_shardings=whole)

    def evaluate(variables: PyTree, documents: TokenizedDocuments) -> Evaluation:
        bits = np.zeros(len(documents))
        windows = evaluation_windows(
            documents,
            batch_size=batch_size,
            sequence_length=sequence_length,
            stride=max(sequence_length // 4, 1),
            pad_id=pad_id,
        )
        for batch in windows:
            document = batch.pop("document_index")
            is_real = document >= 0
            row_bits = np.asarray(compiled(variables, batch), np.float64) / math.log(2.0)
            np.add.at(bits, document[is_real], row_bits[is_real])
        return Evaluation(bits, float(bits.sum() / documents.num_bytes.sum()))

    return evaluate


def sample_documents(
    documents: TokenizedDocuments, max_tokens: int, seed: int
) -> TokenizedDocuments:
    """A seeded sample of whole documents of at most `max_tokens` in all, but at least one.

    For evaluations during training, which need not be exact but must not change from one to the
    next. Documents that do not fit are passed over; if none fits, the shortest is taken.
    """
    lengths = np.diff(documents.starts)
    chosen, room = [], max_tokens
    for index in np.random.default_rng(seed).permutation(len(documents)):
        if lengths[index] <= room:
            chosen.append(int(index))
            room -= int(lengths[index])
    chosen = sorted(chosen) or [int(np.argmin(lengths))]
    slices = [documents.tokens[documents.starts[i] : documents.starts[i + 1]] for i in chosen]
    return TokenizedDocuments(
        tokens=np.concatenate(slices),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[chosen])]),
        names=tuple(documents.names[i] for i in chosen),
        num_bytes=documents.num_bytes[chosen],
    )
