"""Batches of which every process makes its own rows."""

from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from moe_jax.sharding.rules import array_sharding


@runtime_checkable
class LocalBatches(Protocol):
    """Iterator of this process's rows of each batch, whose position can be saved."""

    def __next__(self) -> PyTree:
        """The rows of the next batch."""

    def get_state(self) -> dict[str, Any]:
        """Position, the same on every process."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Returns to a position."""


class GlobalBatches:
    """Batches as arrays over the whole mesh, from the rows that each process makes.

    Args:
        batches: pytrees of numpy arrays [rows of this process, ...], see `process_rows`.
        batch_size: rows of all processes.
        mesh: of axes `AXES`.
    """

    def __init__(self, batches: LocalBatches, batch_size: int, mesh: Mesh) -> None:
        self._batches = batches
        self._batch_size = batch_size
        self._mesh = mesh

    def __next__(self) -> PyTree:
        """The next batch."""

        def assemble(rows: Any) -> jax.Array:
            shape = (self._batch_size, *rows.shape[1:])
            axes = ("batch",) + (None,) * (rows.ndim - 1)
            sharding = array_sharding(shape, axes, self._mesh)
            return jax.make_array_from_process_local_data(sharding, rows, shape)

        return jax.tree.map(assemble, next(self._batches))

    def get_state(self) -> dict[str, Any]:
        """See `LocalBatches`."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """See `LocalBatches`."""
        self._batches.set_state(state)


def process_rows(batch_size: int, mesh: Mesh) -> slice:
    """The rows of a batch that this process's devices hold.

    Raises:
        ValueError: if the batch does not divide over `data`, `fsdp` and `expert`, or the rows of
            this process are not consecutive.
    """
    pieces = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    if batch_size % pieces:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by data x fsdp x expert = {pieces} of the "
            f"mesh; the nearest that are: {max(batch_size // pieces, 1) * pieces}, "
            f"{(batch_size // pieces + 1) * pieces}"
        )
    sharding = array_sharding((batch_size,), ("batch",), mesh)
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    parts = sorted({part[0].indices(batch_size)[:2] for part in held if part is not None})
    for (_, end), (start, _) in zip(parts, parts[1:], strict=False):
        if start != end:
            raise ValueError(
                f"mesh {dict(mesh.shape)} gives process {jax.process_index()} rows of a batch that "
                "are not consecutive; make the axes of a process's devices the last ones"
            )
    return slice(parts[0][0], parts[-1][1])
