"""Baselines that need no training, and those that are special cases of the model.

Those with neural vector fields, which need a differential-equation solver, stand in `neural.py`.
"""

import dataclasses
from typing import Any

import numpy as np
from scipy.interpolate import CubicSpline

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.data import IrregularBatch, as_times, fill

KINDS = ("cubic", "linear", "persistence")


def interpolate(batch: IrregularBatch, query: Any, *, kind: str = "cubic") -> np.ndarray:
    """Interpolates each channel between its observed values; beyond them, persistence.

    Args:
        batch: rows sorted in time; repeated times are averaged.
        query: [rows, queries].
        kind: `cubic` spline with natural ends, `linear`, or `persistence`, the last value before.

    Returns:
        float64[rows, queries, channels]; the channel's mean where a row never observes it.

    Raises:
        ValueError: for an unknown kind, or a query that is not finite or of other rows.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {KINDS}")
    batch, query = fill(batch), as_times("query", query)
    if query.ndim != 2 or len(query) != len(batch.times) or not np.isfinite(query).all():
        raise ValueError(f"query {query.shape} must be finite [{len(batch.times)}, queries]")
    mean = training_mean(batch)
    answer = np.broadcast_to(mean, (*query.shape, len(mean))).copy()
    for row in range(len(query)):
        for channel in range(len(mean)):
            seen = batch.mask[row, :, channel]
            if not seen.any():
                continue
            times, group = np.unique(batch.times[row, seen], return_inverse=True)
            values = np.bincount(group, batch.values[row, seen, channel]) / np.bincount(group)
            inside = np.clip(query[row], times[0], times[-1])
            if kind == "persistence":
                answer[row, :, channel] = values[np.searchsorted(times, inside, side="right") - 1]
            elif kind == "cubic" and len(times) > 2:
                answer[row, :, channel] = CubicSpline(times, values, bc_type="natural")(inside)
            else:
                answer[row, :, channel] = np.interp(inside, times, values)
    return answer


def training_mean(batch: IrregularBatch) -> np.ndarray:
    """float64[channels], mean of the observed values; 0 for a channel that never is."""
    batch = fill(batch)
    count = np.maximum(batch.mask.sum((0, 1)), 1)
    return np.asarray(batch.values, np.float64).sum((0, 1)) / count


def linear_latent(config: LatentMoSConfig, *, dim: int = 8) -> LatentMoSConfig:
    """One free matrix on one state at the beginning of a row: a Koopman model or DMD, learned."""
    return dataclasses.replace(
        single_expert(config),
        generator="gl",
        planes=dim // 2,
        translations=dim % 2,
        anchors="initial",
        levels=1,
    )


def single_expert(config: LatentMoSConfig) -> LatentMoSConfig:
    """The same model without a mixture, K = 1."""
    return dataclasses.replace(config, experts=1, gate="fixed", num_selected=0)
