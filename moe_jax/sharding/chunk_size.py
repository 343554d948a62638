"""Bytes per chunk of the gradients' reduction, found by Bayesian optimisation as in FlowMoE.

A Gaussian process over the logarithm of the size models the seconds of a step; the next size to
try has the largest expected improvement (arXiv 2510.00207; Jones, Schonlau and Welch 1998).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve
from scipy.stats import norm

LENGTH_SCALES = (0.1, 0.2, 0.4, 0.8)
NOISE = 1e-2
"""Standard deviation of a measurement over that of the function, both of standardised seconds."""


class ChunkSearch(NamedTuple):
    """What `search_chunk_bytes` tried.

    Attributes:
        chunk_bytes: the size with the least seconds.
        seconds: of that size.
        tried: float64[samples, 2], sizes and seconds in the order in which they were measured.
    """

    chunk_bytes: float
    seconds: float
    tried: np.ndarray


def search_chunk_bytes(
    measure: Callable[[float], float],
    *,
    low: float = 128 * 2.0**10,
    high: float = 16 * 2.0**20,
    num_starts: int = 4,
    num_samples: int = 8,
    improvement: float = 0.01,
    seed: int = 0,
) -> ChunkSearch:
    """Finds the chunk size with the shortest step in few measurements.

    Args:
        measure: bytes -> seconds of a step, for example the mean of ten.
        low, high: range of sizes; FlowMoE's release takes 128 KiB to 16 MiB.
        num_starts: first sizes, drawn one from each of so many equal parts of the range.
        num_samples: measurements in all.
        improvement: xi, how much better than the best a size must promise to be, in standard
            deviations of what was measured.
        seed: of the first sizes.

    Raises:
        ValueError: if the range is empty, or `num_samples` is below `num_starts`.
    """
    if not 0 < low < high < float("inf"):
        raise ValueError(f"low={low}, high={high}: expected 0 < low < high")
    if not 1 <= num_starts <= num_samples:
        raise ValueError(f"num_starts={num_starts} is not in [1, num_samples={num_samples}]")
    rng = np.random.default_rng(seed)
    places = (rng.permutation(num_starts) + rng.uniform(size=num_starts)) / num_starts
    grid = np.linspace(0.0, 1.0, 257)

    def size(place: float) -> float:
        return float(low * (high / low) ** place)

    x = np.array(places)
    y = np.array([measure(size(place)) for place in x])
    while len(x) < num_samples:
        scale = np.std(y) or 1.0
        standard = (y - np.mean(y)) / scale
        mean, deviation = _posterior(x, standard, grid)
        gain = np.min(standard) - mean - improvement
        expected = gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation)
        # Measuring a size twice tells nothing where the steps are simulated.
        expected[np.min(np.abs(grid[:, None] - x[None, :]), axis=1) < 1 / 256] = -np.inf
        x = np.append(x, grid[np.argmax(expected)])
        y = np.append(y, measure(size(x[-1])))
    best = int(np.argmin(y))
    tried = np.stack([[size(place) for place in x], y], axis=1)
    return ChunkSearch(size(x[best]), float(y[best]), tried)


def _posterior(
    x: Float[np.ndarray, " samples"],
    y: Float[np.ndarray, " samples"],
    at: Float[np.ndarray, " points"],
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    """Mean and deviation under the length scale of the largest likelihood."""
    fits = []
    for scale in LENGTH_SCALES:
        gram = _matern(x, x, scale) + NOISE**2 * np.eye(len(x))
        factor = np.linalg.cholesky(gram)
        weights = cho_solve((factor, True), y)
        log_likelihood = -0.5 * y @ weights - np.sum(np.log(np.diagonal(factor)))
        fits.append((log_likelihood, scale, factor, weights))
    _, scale, factor, weights = max(fits, key=lambda fit: fit[0])
    cross = _matern(at, x, scale)
    variance = 1.0 - np.sum(cross * cho_solve((factor, True), cross.T).T, axis=1)
    return cross @ weights, np.sqrt(np.maximum(variance, 1e-12))


def _matern(
    first: Float[np.ndarray, " first"], second: Float[np.ndarray, " second"], scale: float
) -> Float[np.ndarray, "first second"]:
    """Matern kernel with nu = 5/2: (1 + r + r^2 / 3) exp(-r), r = sqrt(5) |x - x'| / scale."""
    distance = np.sqrt(5.0) * np.abs(first[:, None] - second[None, :]) / scale
    return (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
