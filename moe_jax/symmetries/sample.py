"""Few, irregular and noisy observations of dense truth."""

from typing import NamedTuple

import numpy as np

from moe_jax.symmetries.data import IrregularBatch, from_ragged
from moe_jax.symmetries.examples import Examples, forecast
from moe_jax.symmetries.simulate import Trajectories


class Split(NamedTuple):
    """Low-resolution observations of one set of trajectories, and the truth they hide.

    Attributes:
        examples: observations of the first half given, those of both halves asked for.
        times: float64[times], the grid.
        truth: float64[rows, times, channels], noise-free.
        is_given: bool[rows, times], grid points in the context.
        is_interpolation: bool[rows, times], unobserved grid points of the first half.
        is_extrapolation: bool[rows, times], all of the second half.
    """

    examples: Examples
    times: np.ndarray
    truth: np.ndarray
    is_given: np.ndarray
    is_interpolation: np.ndarray
    is_extrapolation: np.ndarray


def irregular(
    trajectories: Trajectories,
    *,
    seed: int,
    fraction: float = 0.25,
    noise: float = 0.02,
    std: np.ndarray | None = None,
) -> IrregularBatch:
    """Keeps the same number of random grid points of each row, with noise.

    Args:
        trajectories: the truth.
        seed: draws points and noise.
        fraction: share of the grid points kept.
        noise: standard deviation, in multiples of each channel's.
        std: the channels'; measured from the trajectories if None.

    Raises:
        ValueError: if the fraction keeps no point.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be in (0, 1]")
    rng = np.random.default_rng(seed)
    rows, size, _ = trajectories.values.shape
    count = max(round(fraction * size), 1)
    index = np.sort(np.argsort(rng.random((rows, size)), axis=1)[:, :count], axis=1)
    values = np.take_along_axis(trajectories.values, index[..., None], axis=1)
    std = trajectories.values.std((0, 1)) if std is None else std
    return IrregularBatch(
        times=trajectories.times[index],
        values=values + noise * std * rng.normal(size=values.shape),
    )


def low_resolution(
    trajectories: Trajectories,
    *,
    seed: int,
    fraction: float = 0.25,
    noise: float = 0.02,
    std: np.ndarray | None = None,
) -> Split:
    """The low-resolution protocol: the first half of the window is given, the rest to be forecast.

    Of each half of the grid the same number of points is kept, so that shapes are static.

    Args:
        trajectories, seed, fraction, noise, std: see `irregular`.
    """
    rng = np.random.default_rng(seed)
    rows, size, _ = trajectories.values.shape
    half = (size + 1) // 2
    kept = np.zeros((rows, size), bool)
    for part in (slice(0, half), slice(half, size)):
        width = part.stop - part.start
        order = np.argsort(rng.random((rows, width)), axis=1)
        kept[:, part] = order < max(round(fraction * width), 1)
    index = np.nonzero(kept)[1].reshape(rows, -1)
    values = np.take_along_axis(trajectories.values, index[..., None], axis=1)
    std = trajectories.values.std((0, 1)) if std is None else std
    batch = IrregularBatch(
        times=trajectories.times[index],
        values=values + noise * std * rng.normal(size=values.shape),
    )
    first_half = np.broadcast_to(np.arange(size) < half, (rows, size))
    return Split(
        examples=forecast(batch, trajectories.times[half - 1]),
        times=trajectories.times,
        truth=trajectories.values,
        is_given=kept & first_half,
        is_interpolation=~kept & first_half,
        is_extrapolation=~first_half,
    )


def meter(
    trajectories: Trajectories,
    *,
    seed: int,
    periods: tuple[float, ...],
    jitter: float = 0.1,
    missing: float = 0.1,
    quantum: float = 0.0,
) -> IrregularBatch:
    """Readings of meters: means over intervals, a period a channel, late or early, some missing.

    A reading of channel c stands at the beginning of its interval and is the mean of the truth over
    [t, t + period_c], by the trapezoidal rule on the grid. Channels read at different times.

    Args:
        trajectories: the truth; its grid must be finer than every period.
        seed: draws jitter and gaps.
        periods: one a channel.
        jitter: largest shift of a reading, in periods.
        missing: share of readings lost.
        quantum: readings are rounded to multiples of it; 0 for none.

    Raises:
        ValueError: if periods do not fit the channels or the grid.
    """
    rng = np.random.default_rng(seed)
    times, values = trajectories.times, trajectories.values
    rows, _, channels = values.shape
    step = times[1] - times[0]
    if len(periods) != channels:
        raise ValueError(f"periods={periods} must have one a channel, {channels}")
    if not all(2 * step <= period < times[-1] - times[0] for period in periods):
        raise ValueError(f"periods={periods} must be at least two grid steps of {step}")
    integral = np.concatenate(
        [np.zeros((rows, 1, channels)), np.cumsum((values[:, 1:] + values[:, :-1]) / 2, 1) * step],
        axis=1,
    )
    row_times, row_values = [], []
    for row in range(rows):
        readings: dict[float, np.ndarray] = {}
        for channel, period in enumerate(periods):
            count = int((times[-1] - times[0]) / period) - 1
            begin = times[0] + period * np.arange(count)
            begin = begin + period * rng.uniform(0.0, jitter, count)
            begin = begin[rng.random(count) >= missing]
            total = integral[row, :, channel]
            means = np.interp(begin + period, times, total) - np.interp(begin, times, total)
            means = means / period
            for at, mean in zip(begin, means, strict=True):
                value = np.round(mean / quantum) * quantum if quantum else mean
                readings.setdefault(float(at), np.full(channels, np.nan))[channel] = value
        order = sorted(readings) or [float(times[0])]
        row_times.append(np.array(order))
        empty = np.full(channels, np.nan)
        row_values.append(np.stack([readings.get(at, empty) for at in order]))
    return from_ragged(row_times, row_values)[0]
