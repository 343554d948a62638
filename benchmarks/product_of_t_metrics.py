"""How far draws are from reference draws, in units of the reference's standard deviations."""

from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import cdist, pdist

NUM_DIRECTIONS = 100
NUM_KERNEL_DRAWS = 1500


class Reference(NamedTuple):
    """Reference draws [draws, dim], and mean and standard deviation [dim] from more of them."""

    draws: np.ndarray
    mean: np.ndarray
    sd: np.ndarray


def compare(draws: np.ndarray, reference: Reference) -> dict[str, float]:
    """Errors of `draws` [n, dim]; infinite if any is not finite.

    Returns:
        `mean`: largest error of a mean, in standard deviations; `sd`: largest relative error of a
        standard deviation; `sliced_wasserstein` and `mmd` of standardised coordinates.
    """
    names = ("mean", "sd", "sliced_wasserstein", "mmd")
    if not np.isfinite(draws).all():
        return dict.fromkeys(names, float("inf"))
    standard = (draws - reference.mean) / reference.sd
    exact = (reference.draws - reference.mean) / reference.sd
    return {
        "mean": float(np.abs(standard.mean(axis=0)).max()),
        "sd": float(np.abs(standard.std(axis=0) - 1.0).max()),
        "sliced_wasserstein": sliced_wasserstein(standard, exact),
        "mmd": maximum_mean_discrepancy(standard, exact),
    }


def sliced_wasserstein(first: np.ndarray, second: np.ndarray) -> float:
    """Mean 1-Wasserstein distance of projections on 100 directions, the same in every call."""
    directions = np.random.default_rng(0).normal(size=(NUM_DIRECTIONS, first.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    count = min(len(first), len(second))
    projections = [np.sort(draws @ directions.T, axis=0) for draws in (first, second)]
    # Equally many quantiles of each.
    quantiles = [_quantiles(rows, count) for rows in projections]
    return float(np.abs(quantiles[0] - quantiles[1]).mean())


def _quantiles(rows: np.ndarray, count: int) -> np.ndarray:
    if len(rows) % count == 0:
        return rows.reshape(count, -1, rows.shape[1]).mean(axis=1)
    return np.quantile(rows, (np.arange(count) + 0.5) / count, axis=0)


def maximum_mean_discrepancy(first: np.ndarray, second: np.ndarray) -> float:
    """Root of the unbiased squared MMD, 0 where that is negative, on 1,500 draws of each.

    The kernel is Gaussian; its width is the median distance of the second's draws.
    """
    first, second = (_thin(draws, NUM_KERNEL_DRAWS) for draws in (first, second))
    scale = 2.0 * np.median(pdist(second[:500])) ** 2
    within = [
        2.0 * np.exp(-(pdist(draws) ** 2) / scale).sum() / (len(draws) * (len(draws) - 1))
        for draws in (first, second)
    ]
    across = np.exp(-(cdist(first, second) ** 2) / scale).mean()
    return float(np.sqrt(max(sum(within) - 2.0 * across, 0.0)))


def _thin(draws: np.ndarray, count: int) -> np.ndarray:
    return draws[np.linspace(0, len(draws), min(count, len(draws)), endpoint=False).astype(int)]
