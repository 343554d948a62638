"""Which mesh axes a value varies over inside `jax.shard_map`."""

from typing import Any

import jax
from jaxtyping import Array


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Declares each array to vary over every mesh axis that one of them varies over.

    JAX does so by itself in its own operations, but neither before a custom derivative, whose rule
    must return gradients that vary as the arguments do, nor for what a loop carries. The derivative
    of the declaration is the sum over the axes added. Changes nothing outside `shard_map`.
    """
    axes = frozenset[Any]().union(*(_axes(array) for array in arrays))
    return tuple(_vary(array, tuple(sorted(axes - _axes(array)))) for array in arrays)


def _axes(array: Array) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    # JAX 0.10.2 moved the set into a record of its own.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _vary(array: Array, axes: tuple[Any, ...]) -> Array:
    return jax.lax.pcast(array, axes, to="varying") if axes else array
