"""Measured series from packages: electricity demand (pmdarima) and carbon dioxide (statsmodels).

- Demand of England and Wales in MW, half-hourly, June to August 2000 (Taylor): a row is two days.
- Carbon dioxide at Mauna Loa in parts per million, weekly, 1958 to 2001, whose 59 gaps stay gaps: a
  row is three years, less the mean of its given observations, since the level rises beyond all
  that training sees.

A quarter of the points is given in the first half of a row and asked for in both, without added
noise; errors are on the points that are not given. The series is cut in time: training rows (which
overlap), then validation, then test.
"""

import dataclasses

import numpy as np

from moe_jax.symmetries.baselines import interpolate
from moe_jax.symmetries.main import Data
from moe_jax.symmetries.sample import Split, low_resolution
from moe_jax.symmetries.simulate import Trajectories

LENGTHS = {"demand": 96, "carbon_dioxide": 156}
SEASONS = {"demand": 48, "carbon_dioxide": 52}
PARTS = (0.6, 0.2, 0.2)


def real_data(name: str, seed: int) -> Data:
    """A series cut into training, validation and test rows; the seed draws what is observed.

    Raises:
        ImportError: without pmdarima or statsmodels.
    """
    series = {"demand": demand, "carbon_dioxide": carbon_dioxide}[name]()
    return cut(
        series,
        seed=seed,
        length=LENGTHS[name],
        season=SEASONS[name],
        centre=name == "carbon_dioxide",
    )


def demand() -> np.ndarray:
    """MW, half-hourly."""
    from pmdarima.datasets import load_taylor

    return np.asarray(load_taylor(), np.float64)


def carbon_dioxide() -> np.ndarray:
    """Parts per million, weekly; NaN where it was not measured."""
    from statsmodels.datasets import co2

    return np.asarray(co2.load_pandas().data["co2"], np.float64)


def cut(series: np.ndarray, *, seed: int, length: int, season: int, centre: bool) -> Data:
    """Rows of a series in order: training rows a quarter season apart, others half a season.

    Args:
        series: [times], NaN where missing.
        seed: draws which points are observed.
        length: points of a row.
        season: points of a season, which is the unit of time.
        centre: whether a row's given observations have mean 0.
    """
    bounds = np.concatenate([[0], np.cumsum(np.array(PARTS) * len(series))]).astype(int)
    times = np.arange(length) / season
    std = np.nanstd(_rows(series[: bounds[1]], length, season // 4), keepdims=False)
    std = np.array([std])
    splits = []
    for part in range(3):
        gap = season // 4 if part == 0 else season // 2
        rows = _rows(series[bounds[part] : bounds[part + 1]], length, gap)[..., None]
        split = low_resolution(
            Trajectories(times, rows, rows), seed=3 * seed + part, noise=0.0, std=std
        )
        splits.append(_centred(split) if centre else split)
    if centre:
        std = np.array([np.nanstd(splits[0].truth)])
    return Data(train=splits[0], val=splits[1], test=splits[2], std=std)


def seasonal_naive(name: str, data: Data) -> dict[str, np.ndarray]:
    """The given observations, interpolated linearly, repeated from one season before."""
    test, season = data.test, SEASONS[name]
    query = np.broadcast_to(test.times, test.truth.shape[:2])
    answer = interpolate(test.examples.context, query, kind="linear")
    half = (query.shape[1] + 1) // 2
    for index in range(half, query.shape[1]):
        answer[:, index] = answer[:, index - season]
    return {"linear interpolation, then the season before": answer}


def _rows(series: np.ndarray, length: int, gap: int) -> np.ndarray:
    starts = np.arange(0, len(series) - length + 1, gap)
    return series[starts[:, None] + np.arange(length)[None, :]]


def _centred(split: Split) -> Split:
    """Less the mean of each row's given observations; what was not measured is not scored."""
    context, targets = split.examples.context, split.examples.targets
    count = np.maximum(context.mask.sum(1, keepdims=True), 1)
    mean = np.where(context.mask, context.values, 0.0).sum(1, keepdims=True) / count
    is_measured = ~np.isnan(split.truth[..., 0])
    examples = dataclasses.replace(
        split.examples,
        context=dataclasses.replace(
            context, values=np.where(context.mask, context.values - mean, 0)
        ),
        targets=dataclasses.replace(
            targets, values=np.where(targets.mask, targets.values - mean, 0)
        ),
    )
    return split._replace(
        examples=examples,
        truth=split.truth - mean,
        is_interpolation=split.is_interpolation & is_measured,
        is_extrapolation=split.is_extrapolation & is_measured,
    )
