"""Token windows for training and for exact evaluation, as numpy batches.

A row of L inputs and L targets comes from L + 1 consecutive tokens. Every batch is a dict of arrays
[rows, L]:

| key           | dtype | value                                                                   |
| ------------- | ----- | ----------------------------------------------------------------------- |
| `inputs`      | int32 | tokens                                                                  |
| `targets`     | int32 | the token after each input                                              |
| `segment_ids` | int32 | document within the row, 1, 2, ...; 0 is padding                        |
| `positions`   | int32 | place of the input in its document, from 0 at its first token in the row |
| `loss_mask`   | bool  | whether the target counts                                               |
"""

import operator
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from moe_jax.language.corpus import TokenizedDocuments

Rows = dict[str, np.ndarray]


def make_batches(
    documents: TokenizedDocuments,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    pad_id: int,
    rows: slice | None = None,
) -> grain.DatasetIterator:
    """Endless shuffled batches of packed windows.

    Each epoch visits every window of `PackedWindows` once, in an order of its own; a batch may span
    two epochs. The iterator's `get_state()` is a dict that JSON can hold; after `set_state` of it
    the same batches follow as did then.

    Args:
        documents: training side of a corpus.
        batch_size: rows of a batch, at least 1.
        sequence_length: L, at most the number of tokens.
        seed: not negative; decides the order of documents and windows.
        pad_id: fills the rows of the last window.
        rows: those to make of every batch, where other processes make the others; all if None.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check_positive("batch_size", batch_size)
    windows = PackedWindows(documents, sequence_length=sequence_length, seed=seed, pad_id=pad_id)
    # Grain shuffles epoch e by seed + e, so that neighbouring seeds would share orders.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    numbers = grain.MapDataset.range(len(windows)).shuffle(shuffle_seed).repeat()

    def make_rows(numbers: np.ndarray) -> Rows:
        chosen = [windows[number] for number in (numbers if rows is None else numbers[rows])]
        return {name: np.stack([window[name] for window in chosen]) for name in chosen[0]}

    batches = numbers.batch(batch_size, drop_remainder=True).map(make_rows)
    # A batch takes about a millisecond; threads would only compete with the step for the cores.
    read_options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(batches.to_iter_dataset(read_options))


class PackedWindows:
    """Documents in a seeded order, end to end, cut into windows; a source for grain.

    Window i holds tokens iL to (i + 1)L of the stream, both included: the last target of a window
    is the first input of the next. So the inputs of all windows are the stream without its last
    token, and the targets are the stream without its first. A target that opens another document
    than its input's does not count.

    Args:
        documents: none without tokens.
        sequence_length: L, at most the number of tokens.
        seed: not negative; decides the order of documents.
        pad_id: fills the last window.
        shuffle_documents: whether the order is random; else it is that of `documents`.

    Raises:
        ValueError: if sequence_length or seed is out of range.
    """

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        sequence_length: int,
        seed: int,
        pad_id: int,
        shuffle_documents: bool = True,
    ) -> None:
        _check_positive("sequence_length", sequence_length)
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        self._num_tokens = int(documents.starts[-1])
        if sequence_length > self._num_tokens:
            raise ValueError(
                f"sequence_length={sequence_length} exceeds the corpus of {self._num_tokens} tokens"
            )
        self._length = sequence_length
        self._pad_id = pad_id
        # Indexing a memory map returns one, at several times the cost of an array.
        self._tokens = np.asarray(documents.tokens)
        order = np.arange(len(documents))
        if shuffle_documents:
            order = np.random.default_rng(seed).permutation(order)
        lengths = np.diff(documents.starts)[order]
        self._stream_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._offsets = documents.starts[:-1][order] - self._stream_starts[:-1]

    def __len__(self) -> int:
        return -(-(self._num_tokens - 1) // self._length)

    def __getitem__(self, index: Any) -> Rows:
        """Arrays [L] of window `index`, keyed as in the module's table."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is not in [0, {len(self)})")
        first = index * self._length
        place = np.arange(first, min(first + self._length + 1, self._num_tokens))
        document = np.searchsorted(self._stream_starts, place, side="right") - 1
        tokens = self._tokens[place + self._offsets[document]]
        positions = place - np.maximum(self._stream_starts[document], first)
        return {
            "inputs": self._row(tokens[:-1], np.int32, self._pad_id),
            "targets": self._row(tokens[1:], np.int32, self._pad_id),
            "segment_ids": self._row(document[:-1] - document[0] + 1, np.int32, 0),
            "positions": self._row(positions[:-1], np.int32, 0),
            "loss_mask": self._row(document[:-1] == document[1:], np.bool_, False),
        }

    def _row(self, values: np.ndarray, dtype: type[np.generic], fill: int) -> np.ndarray:
        row = np.full(self._length, fill, dtype)
        row[: len(values)] = values
        return row


def evaluation_windows(
    documents: TokenizedDocuments,
    *,
    batch_size: int,
    sequence_length: int,
    stride: int,
    pad_id: int,
) -> Iterator[Rows]:
    """Batches in which every token of every document but its BOS counts as a target once.

    Each document is cut by itself, one window a row, in order. Its first window counts all its
    targets. Later ones start `stride` tokens apart and count what the one before did not reach,
    given at least L - stride + 1 inputs of context. The last window is moved back to end with its
    document rather than padded.

    Args:
        documents: each of two tokens at least.
        batch_size: rows of every batch; the last batch is filled with padding.
        sequence_length: L.
        stride: from 1 (most context, most work) to L (windows side by side).
        pad_id: fills short documents.

    Returns:
        Iterator of dicts of arrays [batch_size, L], keyed as in the module's table, and
        `document_index` int32[batch_size], the row's document, -1 for padding.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check_positive("batch_size", batch_size)
    _check_positive("sequence_length", sequence_length)
    if not 1 <= stride <= sequence_length:
        raise ValueError(f"stride={stride} is not in [1, sequence_length={sequence_length}]")
    lengths = np.diff(documents.starts)
    beyond_first = np.maximum(lengths - 1 - sequence_length, 0)
    num_windows = 1 + -(-beyond_first // stride)
    document = np.repeat(np.arange(len(documents)), num_windows)
    window = np.arange(len(document)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    first = np.minimum(window * stride, beyond_first[document])
    first_counted = np.where(window == 0, 0, sequence_length + (window - 1) * stride)

    def batches() -> Iterator[Rows]:
        for start in range(0, len(document), batch_size):
            rows = slice(start, start + batch_size)
            yield _evaluation_batch(
                documents,
                _filled(document[rows], batch_size, -1),
                _filled(first[rows], batch_size, 0),
                _filled(first_counted[rows], batch_size, 0),
                sequence_length,
                pad_id,
            )

    return batches()


def _evaluation_batch(
    documents: TokenizedDocuments,
    document: Int[np.ndarray, " rows"],
    first: Int[np.ndarray, " rows"],
    first_counted: Int[np.ndarray, " rows"],
    sequence_length: int,
    pad_id: int,
) -> Rows:
    start, end = documents.starts[:-1][document], documents.starts[1:][document]
    place = first[:, None] + np.arange(sequence_length + 1)
    index = np.minimum(start[:, None] + place, end[:, None] - 1)
    tokens = np.asarray(documents.tokens)[index].astype(np.int32)
    is_real = (place[:, 1:] < (end - start)[:, None]) & (document >= 0)[:, None]
    positions = np.arange(sequence_length, dtype=np.int32)
    return {
        "inputs": np.where(is_real, tokens[:, :-1], np.int32(pad_id)),
        "targets": np.where(is_real, tokens[:, 1:], np.int32(pad_id)),
        "segment_ids": is_real.astype(np.int32),
        "positions": np.where(is_real, positions, np.int32(0)),
        "loss_mask": is_real & (place[:, :-1] >= first_counted[:, None]),
        "document_index": document.astype(np.int32),
    }


def _filled(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    return np.pad(values, (0, size - len(values)), constant_values=fill)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
