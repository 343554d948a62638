"""Which of the E^L paths through a deep mixture are used, from a finite sample."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from theory.checks import check_count


@dataclasses.dataclass(frozen=True)
class PathStats:
    """Summary of the paths of n points.

    Attributes:
        num_paths: distinct paths seen, a lower bound on those in use.
        coverage: num_paths / E^L.
        layer_perplexity: float64[layers], exp of the entropy of each layer's choice, at most E.
        joint_perplexity: exp of the entropy of the path, at most E^L.
        total_correlation: sum of the layers' entropies less that of the path, in nats: 0 if the
            layers choose independently.
        unseen_mass: Good-Turing estimate of the probability that a new point takes an unseen path,
            (paths seen once) / n.
        chao1: estimate of the number of paths in use, num_paths + f1 (f1 - 1) / (2 (f2 + 1)), with
            f1 paths seen once and f2 seen twice (Chao 1984, bias-corrected).
    """

    num_paths: int
    coverage: float
    layer_perplexity: np.ndarray
    joint_perplexity: float
    total_correlation: float
    unseen_mass: float
    chao1: float


def encode_paths(
    selection: Int[np.ndarray, "points layers"], num_experts: int
) -> Int[np.ndarray, " points"]:
    """Number of each path, the choices as digits in base E, the first layer the most significant.

    Raises:
        ValueError: if E^L is 2^63 or more, a choice is not in [0, E), or choices are not whole
            numbers, a row a point.
    """
    selection = np.asarray(selection)
    if selection.ndim != 2 or not np.issubdtype(selection.dtype, np.integer):
        raise ValueError(
            f"selection {selection.dtype}{selection.shape} must be whole numbers [points, layers]"
        )
    num_layers = selection.shape[1]
    check_count("num_experts", num_experts)
    check_count("layers", num_layers)
    if num_experts ** min(num_layers, 63) >= 2**63 or (num_experts > 1 and num_layers > 63):
        raise ValueError(
            f"num_experts={num_experts} to the power layers={num_layers} is not below 2^63"
        )
    if selection.size and not 0 <= selection.min() <= selection.max() < num_experts:
        raise ValueError(
            f"selection holds {selection.min()} to {selection.max()}; expected [0, {num_experts})"
        )
    weight = num_experts ** np.arange(num_layers - 1, -1, -1, dtype=np.int64)
    return selection.astype(np.int64) @ weight


def path_stats(selection: Int[np.ndarray, "points layers"], num_experts: int) -> PathStats:
    """Counts and entropies of the paths.

    Raises:
        ValueError: see `encode_paths`; or if there is no point.
    """
    number = encode_paths(selection, num_experts)
    selection = np.asarray(selection)
    if not len(selection):
        raise ValueError(f"selection {selection.shape} holds no point")
    _, counts = np.unique(number, return_counts=True)
    num_points, num_layers = selection.shape
    layers = np.array(
        [_entropy(np.bincount(column, minlength=num_experts)) for column in selection.T]
    )
    joint = _entropy(counts)
    once, twice = int(np.sum(counts == 1)), int(np.sum(counts == 2))
    return PathStats(
        num_paths=len(counts),
        coverage=len(counts) / num_experts**num_layers,
        layer_perplexity=np.exp(layers),
        joint_perplexity=float(np.exp(joint)),
        total_correlation=max(float(layers.sum() - joint), 0.0),
        unseen_mass=once / num_points,
        chao1=len(counts) + once * (once - 1) / (2 * (twice + 1)),
    )


def _entropy(counts: Float[np.ndarray, "..."] | Int[np.ndarray, "..."]) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-np.sum(share * np.log(share)))
