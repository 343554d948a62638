"""How well a gate's cells match a known partition, and whether experts specialise on them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe_jax.core import SparseMoE
from theory.checks import (
    as_numbers,
    check_finite,
    check_indices,
    check_number,
    check_points,
)
from theory.network import Network, lift


def purity(selection: Int[np.ndarray, " points"], labels: Int[np.ndarray, " _"]) -> float:
    """Share of the points whose label is the commonest of their cell; the largest label's at worst.

    Finer cells are never less pure: report the number of cells, or `adjusted_rand`, with it.

    Raises:
        ValueError: unless both hold a whole number a point, for at least one point.
    """
    table = _contingency(selection, labels)
    return float(table.max(axis=1).sum() / table.sum())


def adjusted_rand(selection: Int[np.ndarray, " points"], labels: Int[np.ndarray, " _"]) -> float:
    """Agreement of two partitions over pairs of points, 1 if equal and 0 on average by chance.

    Raises:
        ValueError: as `purity`, or for one point, which has no pairs.

    Reference: Hubert and Arabie 1985, Comparing partitions.
    """
    table = _contingency(selection, labels)
    if table.sum() < 2:
        raise ValueError("selection holds 1 point; pairs need at least 2")

    def pairs(counts: np.ndarray) -> float:
        counts = counts.astype(np.float64)
        return float(np.sum(counts * (counts - 1)) / 2)

    together, rows, columns = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    expected = rows * columns / pairs(table.sum(keepdims=True))
    largest = (rows + columns) / 2
    return 1.0 if largest == expected else (together - expected) / (largest - expected)


def tie_mass(gate_logits: Float[np.ndarray, "points experts"], width: float) -> float:
    """Share of the points whose two largest scores differ by at most `width`.

    Raises:
        ValueError: for fewer than two experts, no point, NaN, or a width that is negative or NaN.
    """
    return float(np.mean(_is_tied(gate_logits, width)))


def misrouted_near_ties(
    gate_logits: Float[np.ndarray, "points experts"], labels: Int[np.ndarray, " _"], width: float
) -> float:
    """Share of the points that are both near a tie, as in `tie_mass`, and misrouted.

    A point is misrouted if its label is not the commonest of its expert's cell; all misrouted
    points are 1 - `purity`, so the ratio says how many a shift of the borders could mend.

    Raises:
        ValueError: as `tie_mass` and `purity`.
    """
    tied = _is_tied(gate_logits, width)
    selection = np.argmax(gate_logits, axis=1)
    table = _contingency(selection, labels)
    _, row = np.unique(selection, return_inverse=True)
    _, column = np.unique(labels, return_inverse=True)
    return float(np.mean(tied & (table.argmax(axis=1)[row] != column)))


class Specialisation(NamedTuple):
    """How much worse experts do outside their own cell.

    Attributes:
        loss: float64[experts, cells], mean squared error of expert e forced on cell c; NaN for an
            empty cell.
        margin: mean of the off-diagonal less that of the diagonal, over cells with points.
    """

    loss: np.ndarray
    margin: float


def specialisation(
    answers: Float[np.ndarray, "experts points outputs"],
    y: Float[np.ndarray, "_ _"],
    selection: Int[np.ndarray, " _"],
) -> Specialisation:
    """The matrix of every expert's loss on every expert's cell.

    Args:
        answers: of each expert on all points, see `forced_answers`.
        y: the target.
        selection: whose cell each point lies in, 0..experts-1.

    Raises:
        ValueError: if the shapes disagree, something is not finite, a selection is out of range, or
            there is one expert only.
    """
    answers, y = as_numbers("answers", answers), as_numbers("y", y)
    selection = np.asarray(selection)
    if (
        answers.ndim != 3
        or len(answers) < 2
        or answers.shape[1:] != y.shape
        or selection.shape != y.shape[:1]
        or not y.size
    ):
        raise ValueError(
            f"answers {answers.shape}, y {y.shape} and selection {selection.shape} disagree: "
            "expected [experts > 1, points, outputs], [points, outputs], [points]"
        )
    check_finite("answers", answers)
    check_finite("y", y)
    num_experts = len(answers)
    selection = check_indices("selection", selection, len(y), num_experts)
    square = np.mean((answers - y[None]) ** 2, axis=2)
    loss = np.full((num_experts, num_experts), np.nan)
    for cell in np.unique(selection):
        loss[:, cell] = square[:, selection == cell].mean(axis=1)
    own = np.eye(num_experts, dtype=bool)
    return Specialisation(loss, float(np.nanmean(loss[~own]) - np.nanmean(loss[own])))


def forced_answers(
    network: Network, x: Float[np.ndarray, "points D"]
) -> Float[np.ndarray, "experts points outputs"]:
    """Answers of each expert on all points, whatever the gate says, by closing the others.

    Raises:
        ValueError: unless the network is a single layer and the points are of its dimension.
    """
    if len(network.layers) != 1:
        raise ValueError(f"network has {len(network.layers)} layers; expected 1")
    x = check_points("x", x, network.input_dim)
    (layer,), (variables,) = network.layers, network.params
    answers = []
    with jax.enable_x64(True):
        tokens = jnp.asarray(lift(x, network.model_dim))
        variables = jax.tree.map(jnp.asarray, variables)
        for e in range(layer.num_experts):
            out = _apply_open(layer, variables, tokens, jnp.arange(layer.num_experts) == e)
            answers.append(np.asarray(out)[:, 1 : 1 + network.output_dim])
    return np.stack(answers)


@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _apply_open(layer: SparseMoE, variables: Any, tokens: Array, is_open: Array) -> Array:
    answer: Any = layer.apply(variables, tokens, expert_mask=is_open)
    return answer[0]


def _is_tied(gate_logits: np.ndarray, width: float) -> Bool[np.ndarray, " points"]:
    if np.ndim(gate_logits) != 2 or np.shape(gate_logits)[1] < 2 or not len(gate_logits):
        raise ValueError(
            f"gate_logits {np.shape(gate_logits)} must score at least two experts, at a point "
            "or more"
        )
    gate_logits = as_numbers("gate_logits", gate_logits)
    if np.any(np.isnan(gate_logits)):
        raise ValueError("gate_logits hold NaN, which is no tie and no choice")
    width = check_number("width", width, 0.0)
    top = np.partition(gate_logits, -2, axis=1)[:, -2:]
    # Two infinite scores are equal, whatever their difference.
    with np.errstate(invalid="ignore"):
        return (top[:, 1] == top[:, 0]) | (top[:, 1] - top[:, 0] <= width)


def _contingency(selection: np.ndarray, labels: np.ndarray) -> np.ndarray:
    selection, labels = np.asarray(selection), np.asarray(labels)
    if selection.shape != labels.shape or selection.ndim != 1 or not len(labels):
        raise ValueError(
            f"selection {selection.shape} and labels {labels.shape} disagree: expected a number a "
            "point in each"
        )
    for name, array in (("selection", selection), ("labels", labels)):
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} must hold whole numbers, not {array.dtype}")
    _, row = np.unique(selection, return_inverse=True)
    _, column = np.unique(labels, return_inverse=True)
    table = np.zeros((row.max() + 1, column.max() + 1), int)
    np.add.at(table, (row, column), 1)
    return table
