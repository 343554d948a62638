"""Training examples: what is given, and what is asked for."""

from typing import Any

import chex
import numpy as np

from moe_jax.symmetries.data import IrregularBatch, as_times, fill, take_rows, validate


@chex.dataclass(frozen=True)
class Examples:
    """Rows of observations to read, and of observations to predict from them.

    Attributes:
        context: what the encoder sees.
        targets: what is asked for, at times of any order; as many rows.
    """

    context: IrregularBatch
    targets: IrregularBatch


def reconstruct(batch: IrregularBatch) -> Examples:
    """Every observation is given and asked for; training hides some of the given ones."""
    batch = fill(batch)
    return Examples(context=batch, targets=batch)


def forecast(batch: IrregularBatch, times: Any) -> Examples:
    """Observations up to a time are given, all are asked for.

    Args:
        batch: rows sorted in time.
        times: the last time that is given, one number or [rows].

    Raises:
        ValueError: naming the first row that has nothing observed by then; for times that are not
            finite, or as many as there are rows; for unusable data.
    """
    batch = fill(batch)
    limit = as_times("times", times)
    if limit.shape not in ((), batch.lengths.shape) or not np.isfinite(limit).all():
        raise ValueError(f"times={times} must be one finite number, or one a row")
    if validate(batch).n_unsorted:
        raise ValueError("times of the batch decrease; sort the rows with from_ragged")
    limit = np.broadcast_to(limit, batch.lengths.shape)
    is_valid = np.arange(batch.times.shape[1])[None, :] < batch.lengths[:, None]
    lengths = (is_valid & (batch.times <= limit[:, None])).sum(1)
    size = max(int(lengths.max()), 1)
    context = fill(
        IrregularBatch(
            times=batch.times[:, :size],
            values=batch.values[:, :size],
            mask=batch.mask[:, :size],
            lengths=lengths,
            inputs=None if batch.inputs is None else batch.inputs[:, :size],
        )
    )
    is_empty = ~context.mask.any((1, 2))
    if is_empty.any():
        row = int(np.flatnonzero(is_empty)[0])
        raise ValueError(f"row {row} has nothing observed by its time {limit[row]}")
    return Examples(context=context, targets=batch)


def take_examples(examples: Examples, index: Any) -> Examples:
    """The rows that `index` selects."""
    return Examples(
        context=take_rows(examples.context, index), targets=take_rows(examples.targets, index)
    )


class ExampleBatches:
    """Endless batches of a fixed number of rows, every row once an epoch, in a shuffled order.

    The last batch of an epoch is filled from the next one's order. The position is the number of
    batches drawn, so that a resumed run sees what it would have seen.

    Args:
        examples: of NumPy arrays.
        batch_size: rows of a batch; may exceed the rows there are, which then repeat.
        seed: of the orders.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._examples = examples
        self._batch_size = batch_size
        self._seed = seed
        self._drawn = 0

    def __next__(self) -> Examples:
        rows = len(self._examples.context.lengths)
        places = np.arange(self._drawn, self._drawn + 1) * self._batch_size
        places = places[:, None] + np.arange(self._batch_size)[None, :]
        epochs, offsets = np.divmod(places.ravel(), rows)
        orders = {
            epoch: np.random.default_rng((self._seed, int(epoch))).permutation(rows)
            for epoch in np.unique(epochs)
        }
        index = np.array([orders[e][o] for e, o in zip(epochs, offsets, strict=True)])
        self._drawn += 1
        return take_examples(self._examples, index)

    def get_state(self) -> dict[str, Any]:
        """The number of batches drawn."""
        return {"drawn": self._drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        """Returns to a position."""
        self._drawn = int(state["drawn"])
