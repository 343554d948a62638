"""Effective ranks of matrices and local dimensions of data."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from theory.checks import check_indices, check_points


class EffectiveRank(NamedTuple):
    """Two effective ranks of a matrix with singular values s; k equal ones give k in both.

    Attributes:
        entropy: exp of the entropy of s_i / sum s (Roy and Vetterli 2007).
        participation: (sum s^2)^2 / sum s^4.
    """

    entropy: float
    participation: float


def effective_rank(
    matrix: Float[np.ndarray, "rows columns"], *, center: bool = False
) -> EffectiveRank:
    """Effective ranks, of the matrix as it is or with its columns' means taken off.

    Raises:
        ValueError: if the matrix is 0 or not finite; or its rows are equal, up to rounding, and
            their mean is taken off.
    """
    matrix = check_points("matrix", matrix, largest=np.inf)
    # Scaled first, by a power of 2, which rounds nothing: squares of huge numbers are infinite.
    largest = np.abs(matrix).max()
    if largest == 0:
        raise ValueError(f"matrix {matrix.shape} must not be 0")
    matrix = np.ldexp(matrix, -int(np.frexp(largest)[1]))
    if center:
        matrix = matrix - matrix[:1]
        matrix = matrix - matrix.mean(axis=0, keepdims=True)
        if np.abs(matrix).max() <= 1e-15 * len(matrix):
            raise ValueError(
                f"matrix of {len(matrix)} rows that are equal has no rank once centred"
            )
    s = np.linalg.svd(matrix, compute_uv=False)
    share = s / s.sum()
    share = share[share > 0]
    entropy = float(np.exp(-np.sum(share * np.log(share))))
    s = s / s.max()
    return EffectiveRank(entropy, float(np.sum(s**2) ** 2 / np.sum(s**4)))


def local_dimension(
    x: Float[np.ndarray, "points D"],
    selection: Int[np.ndarray, " _"],
    *,
    explained: float = 0.95,
) -> Int[np.ndarray, " cells"]:
    """Principal components of each cell that explain a share of its variance.

    Args:
        x: points.
        selection: cell of each point, 0..cells-1.
        explained: share of the variance, in (0, 1).

    Returns:
        Their number a cell; 0 for a cell of fewer than two different points.

    Raises:
        ValueError: if the shapes disagree, a point is not finite, a cell is negative or the share
            is not in (0, 1).
    """
    x = check_points("x", x)
    if np.shape(selection) != x.shape[:1]:
        raise ValueError(f"selection {np.shape(selection)} disagrees with x {x.shape}")
    selection = check_indices("selection", selection, len(x))
    if not 0 < explained < 1:
        raise ValueError(f"explained={explained} is not in (0, 1)")
    dims = np.zeros(int(selection.max()) + 1, int)
    for cell in np.unique(selection):
        member = x[selection == cell]
        # From the first point, so that identical points are 0 and not rounding errors.
        member = member - member[:1]
        scale = np.abs(member).max()
        if scale == 0:
            continue
        member = member / scale
        variance = np.linalg.svd(member - member.mean(axis=0), compute_uv=False) ** 2
        share = np.cumsum(variance) / variance.sum()
        dims[cell] = 1 + min(int(np.searchsorted(share, explained)), len(share) - 1)
    return dims
