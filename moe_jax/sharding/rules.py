"""Which mesh axes split which dimension: one table of names, and one of what parameters hold.

A dimension has a logical axis, such as `hidden`; the table says which mesh axes split it. Within an
array a mesh axis serves the first dimension that takes it, and an axis that does not divide a
dimension leaves it whole.
"""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

AnyMesh = Mesh | AbstractMesh

MESH_AXES: dict[str | None, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "experts": ("expert",),
    "hidden": ("tensor",),
    "heads": ("tensor",),
    "vocab": ("tensor",),
    # The weights of experts have spent `expert` on another dimension; all others use it here.
    "model": ("fsdp", "expert"),
    None: (),
}
"""Logical axis -> mesh axes, the slowest first."""

_EXPERTS_IN = ("experts", "model", "hidden")
_IN, _OUT = ("model", "hidden"), ("hidden", "model")
PARAMETER_AXES: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("experts", "gate"): _EXPERTS_IN,
    ("experts", "up"): _EXPERTS_IN,
    ("experts", "down"): ("experts", "hidden", "model"),
    ("shared_experts", "gate"): _IN,
    ("shared_experts", "up"): _IN,
    ("shared_experts", "down"): _OUT,
    ("feed_forward", "gate"): _IN,
    ("feed_forward", "up"): _IN,
    ("feed_forward", "down"): _OUT,
    ("attention", "query"): ("model", "heads"),
    ("attention", "key"): ("model", "heads"),
    ("attention", "value"): ("model", "heads"),
    ("attention", "out"): ("heads", "model"),
    ("gate", "embedding"): (None, None),
    ("embedding",): ("vocab", "model"),
    ("head",): ("model", "vocab"),
}
"""Last names of a parameter's path -> its logical axes, behind those of a stack of layers. The
optimiser's moments have the same paths; what is not named here is small and stays whole."""


def partition_spec(
    shape: tuple[int, ...], logical_axes: tuple[str | None, ...], mesh: AnyMesh
) -> PartitionSpec:
    """The mesh axes of each dimension of an array; see the module."""
    spent: set[str] = set()
    entries: list[tuple[str, ...] | None] = []
    for length, name in zip(shape, logical_axes, strict=True):
        chosen: list[str] = []
        for axis in MESH_AXES[name]:
            size = mesh.shape[axis]
            divides = length % (size * math.prod(mesh.shape[other] for other in chosen)) == 0
            if axis not in spent and size > 1 and divides:
                chosen.append(axis)
        spent |= set(chosen)
        entries.append(tuple(chosen) or None)
    return PartitionSpec(*entries)


def array_sharding(
    shape: tuple[int, ...], logical_axes: tuple[str | None, ...], mesh: AnyMesh
) -> NamedSharding:
    """`partition_spec` on its mesh."""
    return NamedSharding(mesh, partition_spec(shape, logical_axes, mesh))


def state_shardings(state: PyTree, mesh: AnyMesh) -> PyTree:
    """A sharding for every leaf of parameters, optimiser state or a whole training state.

    Args:
        state: pytree of arrays or of `jax.ShapeDtypeStruct`.
        mesh: of axes `AXES`.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return array_sharding(leaf.shape, logical_axes_of(path, leaf.ndim), mesh)

    return jax.tree_util.tree_map_with_path(one, state)


def logical_axes_of(path: tuple[Any, ...], ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the leaf at a path of `jax.tree_util`."""
    names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
    axes = PARAMETER_AXES.get(names[-2:]) or PARAMETER_AXES.get(names[-1:]) or ()
    if len(axes) > ndim:
        return (None,) * ndim
    return (None,) * (ndim - len(axes)) + axes


def constrain(x: Array, logical_axes: tuple[str | None, ...], mesh: AnyMesh | None) -> Array:
    """Asks the compiler to lay `x` out so; without a mesh, `x` itself."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, array_sharding(x.shape, logical_axes, mesh))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
