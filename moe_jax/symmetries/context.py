"""What the encoder sees of a batch: rescaled, relative times, standardised values, gaps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.symmetries.data import IrregularBatch
from moe_jax.symmetries.nets import float_type

GAPS_PER_UNIT = 10.0
MIN_STD = 1e-6


class Scales(NamedTuple):
    """Units of the training data, kept with the model.

    Attributes:
        mean, std: [channels] of the observed values; std 1 for a missing channel and for one that
            varies by less than 1e-6 of its largest value.
        time_unit: [] original time that counts as 1 inside: 10 median positive gaps.
        window: [] longest span of a row, in the rescaled unit.
    """

    mean: Array
    std: Array
    time_unit: Array
    window: Array


class Context(NamedTuple):
    """A batch ready for the encoder; all masked entries are 0.

    Attributes:
        times: [rows, times] since the row's first observation, rescaled; padding repeats the last.
        search_times: the same with +inf in padding.
        values: [rows, times, channels], standardised.
        mask: bool[rows, times, channels].
        keep: bool[rows, times], whether anything is observed.
        inputs: [rows, times, input channels], or None.
    """

    times: Array
    search_times: Array
    values: Array
    mask: Array
    keep: Array
    inputs: Array | None


def relative_times(batch: IrregularBatch, query: Any) -> tuple[IrregularBatch, Any]:
    """Times and queries since each row's first time.

    NumPy arrays are subtracted in their own precision, so that a large origin costs none of it.
    """
    origin = batch.times[:, :1]
    return dataclasses.replace(batch, times=batch.times - origin), query - origin


def as_arrays(batch: IrregularBatch) -> IrregularBatch:
    """The batch with mask and lengths given, as arrays of the session's float type."""
    dtype = float_type()
    values = jnp.asarray(batch.values).astype(dtype)
    rows, times = values.shape[:2]
    lengths = jnp.full(rows, times) if batch.lengths is None else jnp.asarray(batch.lengths)
    is_valid = jnp.arange(times, dtype=jnp.int32)[None, :] < lengths.astype(jnp.int32)[:, None]
    mask = ~jnp.isnan(values) if batch.mask is None else jnp.asarray(batch.mask)
    mask = mask & is_valid[..., None] & ~jnp.isnan(values)
    return IrregularBatch(
        times=jnp.asarray(batch.times).astype(dtype),
        values=values,
        mask=mask,
        lengths=lengths.astype(jnp.int32),
        inputs=None if batch.inputs is None else jnp.asarray(batch.inputs).astype(dtype),
    )


def measure_scales(batch: IrregularBatch) -> Scales:
    """Units of a batch of `as_arrays` whose times are relative."""
    is_valid, times = _valid_times(batch)
    gaps = jnp.diff(times, axis=1)
    is_gap = is_valid[:, 1:] & (gaps > 0)
    # The median of nothing is an error rather than NaN.
    gap = (
        jnp.nanmedian(jnp.where(is_gap, gaps, jnp.nan)) if gaps.size else jnp.zeros((), gaps.dtype)
    )
    time_unit = jnp.where(jnp.any(is_gap), gap * GAPS_PER_UNIT, 1.0)
    values = jnp.where(batch.mask, batch.values, 0.0)
    count = jnp.maximum(jnp.sum(batch.mask, axis=(0, 1), dtype=values.dtype), 1.0)
    # In parts of the largest value, since sums and squares of large values overflow.
    largest = jnp.max(jnp.abs(values), axis=(0, 1))
    values = values / jnp.where(largest > 0, largest, 1.0)[None, None, :]
    mean = jnp.sum(values, axis=(0, 1)) / count
    centred = jnp.where(batch.mask, values - mean[None, None, :], 0.0)
    std = jnp.sqrt(jnp.sum(jnp.square(centred), axis=(0, 1)) / count)
    span = jnp.max(jnp.max(jnp.where(is_valid, times, 0.0), axis=1) - times[:, 0]) / time_unit
    is_constant = std <= MIN_STD
    return Scales(
        mean=mean * largest,
        std=jnp.where(is_constant, 1.0, std * largest),
        time_unit=time_unit.astype(values.dtype),
        window=jnp.where(span > 0, span, 1.0),
    )


def make_context(batch: IrregularBatch, scales: Scales) -> Context:
    """Rescales and standardises a batch of `as_arrays` whose times are relative."""
    is_valid, times = _valid_times(batch)
    times = times / scales.time_unit
    centred = (batch.values - scales.mean[None, None, :]) / scales.std[None, None, :]
    inputs = batch.inputs
    if inputs is not None:
        inputs = jnp.where(is_valid[..., None], inputs, 0.0)
    return Context(
        times=times,
        search_times=jnp.where(is_valid, times, jnp.inf),
        values=jnp.where(batch.mask, centred, 0.0),
        mask=batch.mask,
        keep=jnp.any(batch.mask, axis=-1),
        inputs=inputs,
    )


def drop_rows(key: Array, batch: IrregularBatch, fraction: tuple[float, float]) -> IrregularBatch:
    """Hides whole observations of a row at random, the same share in expectation along it.

    Without it, states at the observations learn to copy them, and the flow between them nothing.

    Args:
        key: draws, for each row, the share to hide, and which.
        batch: of `as_arrays`.
        fraction: lowest and highest share; at least one observation of a row stays.
    """
    share_key, drop_key, spare_key = jax.random.split(key, 3)
    keep = jnp.any(batch.mask, axis=-1)
    dtype = batch.values.dtype
    share = jax.random.uniform(share_key, (keep.shape[0], 1), dtype, *fraction)
    stays = jax.random.uniform(drop_key, keep.shape, dtype) >= share
    rank = jnp.where(keep, jax.random.uniform(spare_key, keep.shape, dtype), -1.0)
    spare = rank == jnp.max(rank, axis=1, keepdims=True)
    return dataclasses.replace(batch, mask=batch.mask & (stays | spare)[..., None])


def last_index(flag: Bool[Array, "rows times"]) -> Int[Array, "rows times"]:
    """Index of the last flagged entry at or before each time; -1 without one."""
    index = jnp.arange(flag.shape[1], dtype=jnp.int32)[None, :]
    return jax.lax.cummax(jnp.where(flag, index, jnp.int32(-1)), axis=1)


def next_index(flag: Bool[Array, "rows times"]) -> Int[Array, "rows times"]:
    """Index of the first flagged entry at or after each time; `times` without one."""
    size = flag.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)[None, :]
    return jax.lax.cummin(jnp.where(flag, index, jnp.int32(size)), axis=1, reverse=True)


def gaps(context: Context) -> tuple[Float[Array, "rows times"], Float[Array, "rows times"]]:
    """Time since the observation before, and until the one after; 0 where there is none."""
    size = context.times.shape[1]
    before = jnp.pad(last_index(context.keep)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    after = jnp.pad(next_index(context.keep)[:, 1:], ((0, 0), (0, 1)), constant_values=size)
    times = context.times
    earlier = jnp.take_along_axis(times, jnp.maximum(before, 0), axis=1)
    later = jnp.take_along_axis(times, jnp.minimum(after, size - 1), axis=1)
    return (
        jnp.where(before >= 0, times - earlier, 0.0),
        jnp.where(after < size, later - times, 0.0),
    )


def _valid_times(batch: IrregularBatch) -> tuple[Bool[Array, "rows times"], Any]:
    rows, size = batch.times.shape
    is_valid = jnp.arange(size, dtype=jnp.int32)[None, :] < batch.lengths[:, None]
    last = jnp.take_along_axis(batch.times, jnp.maximum(batch.lengths - 1, 0)[:, None], axis=1)
    # A row without any valid time has NaN there, if it was padded so.
    last = jnp.where((batch.lengths > 0)[:, None], last, 0.0)
    return is_valid, jnp.where(is_valid, batch.times, last)


def check_shapes(batch: IrregularBatch, query: Any, obs_dim: int, input_dim: int) -> None:
    """Raises ValueError unless batch and queries fit each other and the model."""
    times, values = np.shape(batch.times), np.shape(batch.values)
    if len(times) != 2 or values != (*times, obs_dim):
        raise ValueError(f"times {times} and values {values}: expected [rows, times], {obs_dim=}")
    if np.ndim(query) != 2 or np.shape(query)[0] != times[0]:
        raise ValueError(f"query {np.shape(query)} must be [{times[0]}, queries]")
    inputs = None if batch.inputs is None else np.shape(batch.inputs)
    expected = (*times, input_dim) if input_dim else None
    if inputs != expected:
        raise ValueError(f"inputs {inputs} must be {expected} for input_dim={input_dim}")
