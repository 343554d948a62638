"""What trained stacks are measured by: errors, partitions, paths, ranks, capacity, linear regions.

Every entry of a record is a list over seeds. Errors are relative to the variance of the held-out
values, which is about 1. Top-1 networks are measured as they answer; `hard_` entries put weight 1
on the expert of largest score, whatever rule the network was trained with.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from theory.capacity import degrees_of_freedom, empirical_capacity, rademacher_value
from theory.cells import (
    adjusted_rand,
    misrouted_near_ties,
    purity,
    specialisation,
    tie_mass,
)
from theory.fit import ONCE
from theory.model import Stack, apply_stack, expert_weights
from theory.network import Network, lift, moe_layer
from theory.paths import encode_paths, path_stats
from theory.problems import Problem
from theory.rank import effective_rank, local_dimension
from theory.regions import linear_regions_on_segment

MAP_SIDE = 60
"""Points a side of the recorded maps of the plane."""

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

CAPACITIES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
RIDGE = 1e-4
"""Of `freedom`, relative to the number of points: features of mean square above it count."""


def evaluate_seeds(stack: Stack, params: list[PyTree], problem: Problem) -> dict[str, Any]:
    """The record of a network: a list over seeds under each name.

    - `mse`, `sup`, `train_mse`: as the network answers, held out and on points trained on;
      `hard_mse`, `hard_sup`: by the expert of largest score alone (k of them for k > 1).
    - `experts_used`: by the first gate; `logit_rank`: effective rank of its scores, centred.
    - `answer_rank`: effective rank of the last layer's experts by points; `own_rank`, for several
      outputs: of an expert's answers on its own cell, centred, the mean over experts.
    - one layer, top-1: `specialisation`, the experts' loss on others' cells less that on their own;
      `cell_dim`, principal directions for 95% of a cell's variance, the mean over cells; `freedom`,
      `capacity`, `rademacher`: of the class of functions with this network's gate and neurons.
    - with cells and one layer: `purity`, `adjusted_rand`, `tie_mass`, `misrouted_ties`.
    - several layers: `paths`, `joint_perplexity`, `total_correlation`, `unseen_mass`, `chao1`.
    - encoders: `code_rank`, of their weights.
    - affine top-1 gates on cells of the plane: `pieces` and `gate_jumps`, the means over segments
      across it, two parallel to each axis.
    """
    own, hard, selection, logits, answers = _answers(stack, params, problem.x_test)
    trained, *_ = _answers(stack, params, problem.x[: len(problem.x_test)])
    record: dict[str, Any] = {}
    for name, y in (("", own), ("hard_", hard)):
        gap = np.abs(y - problem.y_test[None])
        record[f"{name}mse"] = np.mean(gap**2, axis=(1, 2)).tolist()
        record[f"{name}sup"] = gap.max(axis=(1, 2)).tolist()
    gap = trained - problem.y[None, : trained.shape[1]]
    record["train_mse"] = np.mean(gap**2, axis=(1, 2)).tolist()
    per_seed: list[dict[str, float]] = []
    for seed in range(len(own)):
        one = jax.tree.map(lambda leaf, seed=seed: np.asarray(leaf[seed]), params)
        facts = _of_scores(selection[seed], logits[seed], answers[seed])
        if stack.num_layers == 1:
            facts |= _of_cells(selection[seed, 0], logits[seed, 0], problem)
        if stack.num_layers == 1 and stack.num_selected == 1 and not stack.shared_dim:
            facts |= _of_one_layer(stack, one, problem, selection[seed, 0], answers[seed])
        if stack.num_layers > 1:
            facts |= _of_paths(selection[seed].T, stack.num_experts)
        if stack.encoder_dim:
            facts["code_rank"] = _mean_rank(one[0]["experts"]["encoder"][:, 1:])
        if problem.labels is not None and _is_library_row(stack):
            facts |= _of_segments(stack_network(stack, one))
        per_seed.append(facts)
    return record | {name: [facts[name] for facts in per_seed] for name in per_seed[0]}


def partition_map(stack: Stack, params: list[PyTree], seed: int) -> list[str]:
    """Which path each point of [-1, 1]^2 takes in one seed's network, a character a path.

    Rows of `MAP_SIDE` points from below; paths in order of appearance.
    """
    side = (np.arange(MAP_SIDE) + 0.5) * 2 / MAP_SIDE - 1
    points = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2).astype(np.float32)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[seed])[None], params)
    _, _, selection, *_ = _answers(stack, one, points)
    paths = encode_paths(selection[0].T, stack.num_experts)
    _, first, inverse = np.unique(paths, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))[inverse.reshape(-1)] % len(SYMBOLS)
    return ["".join(SYMBOLS[i] for i in row) for row in number.reshape(MAP_SIDE, MAP_SIDE)]


def stack_network(stack: Stack, params: Sequence[Mapping[str, Any]]) -> Network:
    """A trained stack as layers of the library in float64; one more neuron emits the constant.

    Raises:
        ValueError: unless gates are affine, one expert is selected, and experts are plain.
    """
    if not _is_library_row(stack):
        raise ValueError(
            f"gate={stack.gate!r}, num_selected={stack.num_selected}, "
            f"shared_dim={stack.shared_dim}, encoder_dim={stack.encoder_dim}: expected an affine "
            "gate, one expert selected, none shared and no encoder"
        )
    layers = []
    for layer in params:
        up, down = (np.asarray(layer["experts"][name], np.float64) for name in ("up", "down"))
        kernel = np.asarray(layer["router"]["gate"]["kernel"], np.float64)
        constant = np.zeros((len(up), up.shape[1], 1))
        constant[:, 0] = 1.0
        emitted = np.zeros((len(up), 1, down.shape[2]))
        emitted[:, 0, 0] = 1.0
        rest = down.copy()
        rest[:, :, 0] = 0.0
        layers.append(
            moe_layer(
                kernel,
                np.concatenate([up, constant], axis=2),
                np.concatenate([rest, emitted], axis=1),
            )
        )
    modules, variables = zip(*layers, strict=True)
    return Network(modules, variables, stack.input_dim, stack.output_dim)


def _is_library_row(stack: Stack) -> bool:
    is_plain = not stack.shared_dim and not stack.encoder_dim
    return stack.gate == "affine" and stack.num_selected == 1 and is_plain


def _answers(stack: Stack, params: list[PyTree], x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Own and hard answers, selections, scores and each expert's answers, seeds first."""
    return tuple(map(np.asarray, _apply_seeds(stack, params, jnp.asarray(x))))


@partial(jax.jit, static_argnums=0, compiler_options=ONCE)
def _apply_seeds(stack: Stack, params: list[PyTree], x: Array) -> tuple[Array, ...]:
    def one_seed(params: PyTree) -> tuple[Array, ...]:
        own = apply_stack(stack, params, x)
        if stack.num_selected > 1 or stack.weighting in ("hard", "likelihood"):
            return own.y, own.y, own.selection, own.logits, own.answers
        hard = apply_stack(stack, params, x, weighting="hard")
        return own.y, hard.y, hard.selection, hard.logits, hard.answers

    return jax.vmap(one_seed)(params)


def _of_scores(selection: np.ndarray, logits: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    last = selection[-1]
    facts = {
        "experts_used": float(len(np.unique(selection[0]))),
        "logit_rank": _rank(logits[0], center=True),
        "answer_rank": _rank(answers.reshape(len(answers), -1)),
    }
    if answers.shape[2] > 1:
        own = [answers[e][last == e] for e in np.unique(last)]
        facts["own_rank"] = float(np.mean([_rank(each, center=True) for each in own]))
    return facts


def _of_cells(first: np.ndarray, logits: np.ndarray, problem: Problem) -> dict[str, float]:
    labels = problem.labels
    if labels is None:
        return {}
    facts = {"purity": purity(first, labels), "adjusted_rand": adjusted_rand(first, labels)}
    if logits.shape[1] > 1:
        # Scores have no unit: near is within a tenth of the gap between the two best's median.
        top = np.sort(logits.astype(np.float64), axis=1)[:, -2:]
        near = 0.1 * float(np.median(top[:, 1] - top[:, 0]))
        facts["tie_mass"] = tie_mass(logits.astype(np.float64), near)
        facts["misrouted_ties"] = misrouted_near_ties(logits.astype(np.float64), labels, near)
    return facts


def _of_one_layer(
    stack: Stack, params: Sequence[Any], problem: Problem, first: np.ndarray, answers: np.ndarray
) -> dict[str, float]:
    dims = local_dimension(problem.x_test.astype(np.float64), first)
    facts = {"cell_dim": float(dims[dims > 0].mean())}
    if stack.num_experts > 1:
        y = problem.y_test.astype(np.float64)
        facts["specialisation"] = specialisation(answers.astype(np.float64), y, first).margin
    if stack.encoder_dim or stack.gate != "affine":
        return facts
    features = last_layer_features(stack, params, problem.x_test)
    num = len(features)
    facts["freedom"] = degrees_of_freedom(features, RIDGE * num)

    def fit(phi: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return phi @ np.linalg.lstsq(phi, labels, rcond=None)[0]

    def draw(key: Array, size: int) -> np.ndarray:
        return features[np.asarray(jax.random.permutation(key, num))[:size]]

    sizes = [size for size in CAPACITIES if size <= num]
    facts["capacity"] = float(empirical_capacity(jax.random.key(0), fit, draw, sizes))
    few = draw(jax.random.key(1), min(num, 256))
    facts["rademacher"] = rademacher_value(jax.random.key(2), fit, few, 5)
    return facts


def last_layer_features(
    stack: Stack, params: Sequence[Mapping[str, Any]], x: Float[np.ndarray, "points D"]
) -> Float[np.ndarray, "points features"]:
    """What the experts' last matrices multiply: each neuron times its expert's weight.

    One layer of plain experts behind an affine gate.
    """
    (layer,) = params
    tokens = lift(x.astype(np.float64), stack.token_dim)
    scores = tokens @ np.asarray(layer["router"]["gate"]["kernel"], np.float64)
    with jax.enable_x64(True):
        weights = np.asarray(expert_weights(jnp.asarray(scores), 1, stack.weighting))
    up = np.asarray(layer["experts"]["up"], np.float64)
    hidden = np.maximum(np.einsum("tm,emh->teh", tokens, up), 0.0)
    return (weights[:, :, None] * hidden).reshape(len(x), -1)


def _of_paths(selection: np.ndarray, num_experts: int) -> dict[str, float]:
    stats = path_stats(selection, num_experts)
    return {
        "paths": float(stats.num_paths),
        "joint_perplexity": stats.joint_perplexity,
        "total_correlation": stats.total_correlation,
        "unseen_mass": stats.unseen_mass,
        "chao1": stats.chao1,
    }


def _of_segments(network: Network) -> dict[str, float]:
    """Pieces and jumps of the gates along lines across [-1, 1]^L, two parallel to each axis."""
    found = []
    for axis in range(network.input_dim):
        for level in (-0.45, 0.4):
            ends = np.full((2, network.input_dim), level)
            ends[:, axis] = -1.0, 1.0
            found.append(linear_regions_on_segment(network, ends[0], ends[1]))
    return {
        "pieces": float(np.mean([each.num_pieces for each in found])),
        "gate_jumps": float(np.mean([len(each.gate_jumps) for each in found])),
    }


def _mean_rank(matrices: np.ndarray) -> float:
    return float(np.mean([_rank(each) for each in matrices]))


def _rank(matrix: np.ndarray, *, center: bool = False) -> float:
    """The entropy rank; 0 where nothing varies."""
    matrix = matrix.astype(np.float64)
    if len(matrix) < 1 + center or not np.any(matrix - center * matrix[:1]):
        return 0.0
    return effective_rank(matrix, center=center).entropy
