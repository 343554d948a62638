"""Irregular batches: per-row times, missing channels, rows of different length.

| axis       | letter | meaning                                        |
| ---------- | ------ | ---------------------------------------------- |
| `rows`     | B      | trajectories                                   |
| `times`    | N      | observations of a row, padding included        |
| `channels` | D      | observed channels                              |
| `queries`  | Q      | times at which a row's values are asked for    |
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import numpy as np

DUPLICATES = ("mean", "last", "error")


@chex.dataclass(frozen=True)
class IrregularBatch:
    """Observations of several trajectories, padded to one shape.

    Attributes:
        times: [rows, times], non-decreasing within a row's valid part; the rest is padding of any
            content, NaN included.
        values: [rows, times, channels]; NaN where not observed.
        mask: bool[rows, times, channels], False where not observed; None for where `values` is NaN.
        lengths: int[rows], number of valid times of every row; None if all are.
        inputs: [rows, times, input channels], exogenous, constant until the next time; or None.
    """

    times: Any
    values: Any
    mask: Any = None
    lengths: Any = None
    inputs: Any = None


class Report(NamedTuple):
    """What `validate` saw.

    Attributes:
        n_nan: values not observed within the valid parts.
        n_duplicates: pairs of equal neighbouring times.
        n_unsorted: pairs of neighbouring times that decrease.
        n_silent: valid times at which no channel is observed.
        min_gap, median_gap, max_gap: of the positive gaps; nan without any.
        span: longest time from a row's first to its last observation.
        constant_channels: channels whose observed values are all equal.
        missing_channels: channels that are never observed.
    """

    n_nan: int
    n_duplicates: int
    n_unsorted: int
    n_silent: int
    min_gap: float
    median_gap: float
    max_gap: float
    span: float
    constant_channels: tuple[int, ...]
    missing_channels: tuple[int, ...]


def fill(batch: IrregularBatch) -> IrregularBatch:
    """On the host, the batch as NumPy arrays with mask and lengths given and all else cleared.

    Values are 0 where not observed and in padding; padding repeats a row's last time.

    Raises:
        ValueError: if shapes do not fit, or a length is out of range.
    """
    times, values = as_times("times", batch.times), _as_real("values", batch.values)
    values = values.astype(np.float64) if values.dtype.kind in "iub" else values
    if times.ndim != 2 or values.ndim != 3 or values.shape[:2] != times.shape:
        raise ValueError(
            f"times {times.shape} and values {values.shape} must be [rows, times] and "
            "[rows, times, channels]"
        )
    rows, length = times.shape
    if 0 in values.shape:
        raise ValueError(f"values {values.shape} must have at least one row, time and channel")
    lengths = np.full(rows, length) if batch.lengths is None else np.asarray(batch.lengths)
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths {lengths.dtype}{lengths.shape} must be integers [{rows}]")
    if lengths.min() < 0 or lengths.max() > length:
        raise ValueError(f"lengths={lengths.tolist()} must lie in [0, {length}]")
    is_valid = np.arange(length)[None, :] < lengths[:, None]
    mask = ~np.isnan(values) if batch.mask is None else np.asarray(batch.mask)
    if mask.shape != values.shape or mask.dtype != np.bool_:
        raise ValueError(f"mask {mask.dtype}{mask.shape} must be bool{values.shape}")
    mask = mask & is_valid[..., None] & ~np.isnan(values)
    last = times[np.arange(rows), np.maximum(lengths - 1, 0)]
    inputs = batch.inputs
    if inputs is not None:
        inputs = _as_real("inputs", inputs).astype(np.float64)
        if inputs.ndim != 3 or inputs.shape[:2] != times.shape:
            raise ValueError(f"inputs {inputs.shape} must be [{rows}, {length}, input channels]")
        inputs = np.where(is_valid[..., None], inputs, 0.0)
    return IrregularBatch(
        times=np.where(is_valid, times, last[:, None]),
        values=np.where(mask, values, 0.0),
        mask=mask,
        lengths=lengths.astype(np.int32),
        inputs=inputs,
    )


def validate(batch: IrregularBatch) -> Report:
    """Reports on a batch on the host, and refuses what no model can use.

    Raises:
        ValueError: naming the first row that has nothing observed, a time that is not finite or an
            infinite value or input; or if shapes do not fit.
    """
    batch = fill(batch)
    rows, length = batch.times.shape
    is_valid = np.arange(length)[None, :] < batch.lengths[:, None]
    _refuse("times", ~np.isfinite(batch.times) & is_valid, "has a time that is not finite")
    _refuse("values", np.isinf(batch.values).any(-1), "has an infinite value")
    if batch.inputs is not None:
        _refuse("inputs", ~np.isfinite(batch.inputs).all(-1), "has an input that is not finite")
    _refuse("mask", ~batch.mask.any((1, 2))[:, None], "has nothing observed")
    gaps = np.diff(batch.times, axis=1)[is_valid[:, 1:]]
    positive = gaps[gaps > 0] if (gaps > 0).any() else np.array([np.nan])
    observed = [batch.values[..., c][batch.mask[..., c]] for c in range(batch.values.shape[-1])]
    return Report(
        n_nan=int((~batch.mask & is_valid[..., None]).sum()),
        n_duplicates=int((gaps == 0).sum()),
        n_unsorted=int((gaps < 0).sum()),
        n_silent=int((~batch.mask.any(-1) & is_valid).sum()),
        min_gap=float(positive.min()),
        median_gap=float(np.median(positive)),
        max_gap=float(positive.max()),
        span=float(np.ptp(batch.times, axis=1).max()),
        constant_channels=tuple(c for c, v in enumerate(observed) if v.size and np.ptp(v) == 0),
        missing_channels=tuple(c for c, v in enumerate(observed) if not v.size),
    )


def from_ragged(
    times: Sequence[Any],
    values: Sequence[Any],
    *,
    inputs: Sequence[Any] | None = None,
    sort: bool = True,
    duplicates: str = "mean",
    pad_to: int | None = None,
) -> tuple[IrregularBatch, tuple[str, ...]]:
    """Pads trajectories of different length into a batch, sorted and without repeated times.

    Args:
        times: one array [times] a row, of any real type.
        values: one array [times, channels] a row; NaN where not observed.
        inputs: one array [times, input channels] a row.
        sort: whether to sort rows whose times decrease; they are refused otherwise.
        duplicates: what becomes of observations at one time: their `mean` channel by channel, the
            `last` observed one, or an `error`.
        pad_to: length of the padded rows; the next power of two if None, so that few shapes are
            compiled.

    Returns:
        The batch, and a note for every kind of change that was made.

    Raises:
        ValueError: naming the row, if it cannot be used.
    """
    if pad_to is not None:
        check_integer("pad_to", pad_to, 1)
    if duplicates not in DUPLICATES:
        raise ValueError(f"duplicates={duplicates!r} is not one of {DUPLICATES}")
    inputs = [None] * len(times) if inputs is None else inputs
    if not len(times) or len(times) != len(values) or len(times) != len(inputs):
        raise ValueError(f"{len(times)} times, {len(values)} values and {len(inputs)} inputs")
    rows, num_sorted, num_merged = [], 0, 0
    for index, (t, x, u) in enumerate(zip(times, values, inputs, strict=True)):
        row = _as_row(index, t, x, u)
        if (np.diff(row[0]) < 0).any():
            if not sort:
                raise ValueError(f"times of row {index} decrease, and sort=False")
            order = np.argsort(row[0], kind="stable")
            row = [None if part is None else part[order] for part in row]
            num_sorted += 1
        if (np.diff(row[0]) == 0).any():
            if duplicates == "error":
                raise ValueError(f"times of row {index} repeat, and duplicates='error'")
            row = _merge(row, duplicates)
            num_merged += 1
        rows.append(row)
    for place, name in ((1, "channels"), (2, "input channels")):
        counts = {0 if row[place] is None else row[place].shape[1] for row in rows}
        # A row of one channel would be broadcast, and inputs beside rows without any dropped.
        if len(counts) > 1:
            raise ValueError(f"rows have {sorted(counts)} {name}")
    longest = max(len(row[0]) for row in rows)
    length = 1 << (longest - 1).bit_length() if pad_to is None else pad_to
    if length < longest:
        raise ValueError(f"pad_to={pad_to} is shorter than a row of {longest} times")
    batch = IrregularBatch(
        times=_pad([row[0] for row in rows], length),
        values=_pad([row[1] for row in rows], length),
        lengths=np.array([len(row[0]) for row in rows], np.int32),
        inputs=None if rows[0][2] is None else _pad([row[2] for row in rows], length),
    )
    validate(batch)
    notes = {"sorted {} rows": num_sorted, "merged repeated times in {} rows": num_merged}
    return fill(batch), tuple(text.format(count) for text, count in notes.items() if count)


def as_times(name: str, times: Any) -> np.ndarray:
    """Times as float64.

    Raises:
        ValueError: for dates, whose unit would be that of their type, and for what is no number.
    """
    array = _as_array(name, times)
    if array.dtype.kind in "mM":
        raise ValueError(
            f"{name} are {array.dtype}; give numbers, such as (t - t[0]) / np.timedelta64(1, 'h')"
        )
    return _as_real(name, array).astype(np.float64)


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless an option is an integer of at least `least`, below 2^31."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not least <= value < 2**31:
        raise ValueError(f"{name}={value!r} must be an integer in [{least}, 2^31)")


def take_rows(batch: IrregularBatch, index: Any) -> IrregularBatch:
    """The rows of a batch that `index` selects."""
    fields = {
        field.name: getattr(batch, field.name) for field in dataclasses.fields(IrregularBatch)
    }
    return IrregularBatch(**{k: None if v is None else v[index] for k, v in fields.items()})


def _as_array(name: str, array: Any) -> np.ndarray:
    try:
        return np.asarray(array)
    except ValueError as error:
        raise ValueError(
            f"{name} must be one array; rows of different length are padded by from_ragged"
        ) from error


def _as_real(name: str, array: Any) -> np.ndarray:
    array = _as_array(name, array)
    # bfloat16 and its like have kind V, and are numbers all the same.
    if array.dtype.kind not in "biufV":
        raise ValueError(f"{name} are {array.dtype}, not real numbers")
    return array


def _as_row(index: int, times: Any, values: Any, inputs: Any) -> list[Any]:
    t = as_times(f"times of row {index}", times)
    x = _as_real(f"values of row {index}", values).astype(np.float64)
    if t.ndim != 1 or not t.size:
        raise ValueError(f"times of row {index} {t.shape} must be [times] with at least one time")
    if x.ndim != 2 or len(x) != len(t):
        raise ValueError(f"values of row {index} {x.shape} must be [{len(t)}, channels]")
    if not np.isfinite(t).all():
        raise ValueError(f"times: row {index} has a time that is not finite")
    u = inputs
    if u is not None:
        u = _as_real(f"inputs of row {index}", u).astype(np.float64)
    if u is not None and (u.ndim != 2 or len(u) != len(t)):
        raise ValueError(f"inputs of row {index} {u.shape} must be [{len(t)}, input channels]")
    return [t, x, u]


def _merge(row: list[Any], duplicates: str) -> list[Any]:
    times, values, inputs = row
    unique, group = np.unique(times, return_inverse=True)
    merged = np.full((len(unique), values.shape[1]), np.nan)
    for index in range(len(unique)):
        for channel, column in enumerate(values[group == index].T):
            seen = column[~np.isnan(column)]
            if seen.size:
                merged[index, channel] = seen.mean() if duplicates == "mean" else seen[-1]
    # Inputs hold from a time on, so that of several the last one holds.
    last = np.searchsorted(times, unique, side="right") - 1
    return [unique, merged, None if inputs is None else inputs[last]]


def _pad(arrays: Sequence[np.ndarray], length: int) -> np.ndarray:
    padded = np.full((len(arrays), length, *arrays[0].shape[1:]), np.nan)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


def _refuse(name: str, is_bad: np.ndarray, reason: str) -> None:
    rows = np.flatnonzero(is_bad.any(1))
    if rows.size:
        raise ValueError(f"{name}: row {rows[0]} {reason} ({rows.size} such rows)")
