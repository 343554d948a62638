"""Effective ranks of matrices and local dimensions of data."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


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
        ValueError: if the matrix (centred) is 0 or not finite.
    """
    if center:
        matrix = matrix - matrix.mean(axis=0, keepdims=True)
    if not np.all(np.isfinite(matrix)) or not np.any(matrix):
        raise ValueError(f"matrix {matrix.shape} must be finite and not 0")
    s = np.linalg.svd(matrix, compute_uv=False)
    share = s / s.sum()
    share = share[share > 0]
    entropy = float(np.exp(-np.sum(share * np.log(share))))
    # Scaled first: fourth powers of small numbers are 0.
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
        Their number a cell; 0 for a cell of fewer than two points.

    Raises:
        ValueError: if the shapes disagree or the share is not in (0, 1).
    """
    if selection.shape != x.shape[:1]:
        raise ValueError(f"selection {selection.shape} disagrees with x {x.shape}")
    if not 0 < explained < 1:
        raise ValueError(f"explained={explained} is not in (0, 1)")
    dims = np.zeros(int(selection.max(initial=-1)) + 1, int)
    for cell in range(len(dims)):
        member = x[selection == cell]
        if len(member) < 2:
            continue
        variance = np.linalg.svd(member - member.mean(axis=0), compute_uv=False) ** 2
        dims[cell] = 1 + np.searchsorted(np.cumsum(variance) / variance.sum(), explained)
    return dims
