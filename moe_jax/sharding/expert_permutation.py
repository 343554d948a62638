"""Puts the experts of a checkpoint in another order without changing what the model computes."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

# Axis of the experts, counted from the end, of the arrays of a `moe_jax.core.SparseMoE`.
EXPERT_AXIS = {"experts": -3, "router": -1}
WITHOUT_EXPERTS = ("hidden", "projection", "log_temperature")


def permute_experts(
    params: PyTree, permutation: Int[np.ndarray | Array, "*layers experts"]
) -> PyTree:
    """Moves experts, and the gate's scores of them, to the places of a permutation.

    Serves parameters, variables with `router_state`, the optimiser's moments, or a whole train
    state: every array that stands under `moe/experts` or `moe/router` is permuted, wherever in the
    tree. Outputs change by rounding at most. Experts with exactly equal scores are chosen by the
    lowest index and may change places; so may the groups of a group-limited router, for which the
    permutation must move whole groups, which is not checked.

    Args:
        params: any tree that holds the arrays of sparse layers by name, layers stacked in front as
            in a language model or not at all.
        permutation: place p takes expert permutation[p]; one for all layers, or one for each sparse
            layer from the first to the last.

    Raises:
        ValueError: if `permutation` is none or of the wrong size, if the tree has no sparse layer,
            or a layer whose router scores are not one for each expert (hash, soft with more slots)
            or not in the tree (a random gate without its `router_state`).
    """
    rows = np.asarray(permutation)
    num_experts = rows.shape[-1]
    rows = rows.reshape(-1, num_experts)
    if not (np.sort(rows, axis=-1) == np.arange(num_experts)).all():
        raise ValueError(f"permutation {permutation} is no permutation of {num_experts} experts")
    leaves, structure = jax.tree.flatten_with_path(params)
    found = [(_place(path), leaf) for path, leaf in leaves]
    sizes = {
        place[0]: leaf.shape[0] if leaf.ndim > 3 else 0
        for place, leaf in found
        if place is not None and place[1] == "experts"
    }
    if not sizes:
        raise ValueError("params hold no experts: no array stands under moe/experts or experts")
    scored = {place[0] for place, _ in found if place is not None and place[1] == "router"}
    if missing := sorted(set(sizes) - scored):
        raise ValueError(
            f"the layers {missing} have no gate among params: a hash router has none, and that of "
            "a random gate is in router_state"
        )
    order = _layer_order(sizes)
    num_layers = sum(len(layers) for layers in order.values())
    if len(rows) not in (1, num_layers):
        raise ValueError(f"permutation has {len(rows)} rows for {num_layers} sparse layers")
    rows = np.broadcast_to(rows, (num_layers, num_experts))
    out = [
        leaf if place is None else _permute(leaf, EXPERT_AXIS[place[1]], rows[order[place[0]]])
        for place, leaf in found
    ]
    return jax.tree.unflatten(structure, out)


def _place(path: tuple[Any, ...]) -> tuple[tuple[str, ...], str] | None:
    """The layer's names and which part of it an array is; None if it has no axis of experts."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    for index, name in enumerate(names):
        if name in EXPERT_AXIS:
            if any(part in WITHOUT_EXPERTS for part in names[index:]):
                return None
            layer = tuple(
                part for part in names[:index] if re.fullmatch(r"(blocks|layer)_\d+", part)
            )
            return layer, name
    return None


def _layer_order(sizes: dict[tuple[str, ...], int]) -> dict[tuple[str, ...], list[int]]:
    """Numbers of the sparse layers in the order in which tokens pass them.

    `blocks_i/layer_j` stacks layer j of every repetition of its period, so the layers of a block
    take turns.
    """

    def numbers(names: tuple[str, ...]) -> list[int]:
        return [int(name.rpartition("_")[2]) for name in names]

    order: dict[tuple[str, ...], list[int]] = {}
    first = 0
    for block in sorted({names[:1] for names in sizes}, key=numbers):
        members = sorted((names for names in sizes if names[:1] == block), key=numbers)
        for index, names in enumerate(members):
            repeats = max(sizes[names], 1)
            order[names] = [first + index + len(members) * repeat for repeat in range(repeats)]
        first += sum(len(order[names]) for names in members)
    return order


def _permute(leaf: Array, axis: int, rows: Int[np.ndarray, "layers experts"]) -> Array:
    if leaf.ndim < -axis or leaf.shape[axis] != rows.shape[-1]:
        raise ValueError(
            f"an array of a router or its experts, {leaf.shape}, has not {rows.shape[-1]} experts "
            f"on axis {axis}"
        )
    stacked = math.prod(leaf.shape[: leaf.ndim + axis]) if axis == -3 else len(rows)
    if stacked != len(rows):
        raise ValueError(f"an array of experts, {leaf.shape}, does not stack {len(rows)} layers")
    if len(rows) == 1 and not (leaf.ndim > -axis and leaf.shape[0] == 1):
        return jnp.take(leaf, rows[0], axis=axis)
    return jnp.stack([jnp.take(leaf[layer], row, axis=axis) for layer, row in enumerate(rows)])
