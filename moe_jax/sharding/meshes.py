"""Meshes of four named axes, made from sizes in a configuration.

| axis     | splits                                                                   |
| -------- | ------------------------------------------------------------------------ |
| `data`   | the batch                                                                |
| `fsdp`   | the batch, and parameters and optimiser state                            |
| `expert` | the batch, and the experts; tokens cross it to reach theirs              |
| `tensor` | heads, hidden units and vocabulary                                       |
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "tensor")
EXCHANGES = ("auto", "ragged", "fixed", "gather")
LISTED = 8
"""Most factorisations that a message lists."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes, and how tokens reach their experts; validates itself.

    Attributes:
        data, fsdp, expert, tensor: sizes; one of them may be -1, for what the others leave of the
            devices. All 1 is one device.
        exchange: see `ExpertParallel`.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    exchange: str = "auto"

    def __post_init__(self) -> None:
        for name, size in zip(AXES, self.sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or not (size >= 1 or size == -1):
                raise ValueError(f"{name}={size!r} must be an integer of at least 1, or -1")
        if self.sizes.count(-1) > 1:
            raise ValueError(f"only one of {AXES} may be -1, not {self.sizes}")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r} is not one of {EXCHANGES}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return (self.data, self.fsdp, self.expert, self.tensor)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of these sizes, neighbours on the network next to each other where it is a torus.

    Args:
        config: sizes.
        devices: all of them if None, of every process.

    Raises:
        ValueError: if the sizes do not multiply to the number of devices, or the torus of the
            devices has no such axes; it lists sizes that fit.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = infer_sizes(config, len(devices))
    grid = _grid(sizes, devices)
    if grid is None:
        others = factorisations(len(devices))
        fitting = [other for other in others if _grid(other, devices) is not None]
        raise ValueError(
            f"{_named(sizes)} does not fit the network of {len(devices)} x "
            f"{devices[0].device_kind}; {_listed(fitting, sizes)}"
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def infer_sizes(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """The sizes with -1 replaced.

    Raises:
        ValueError: if they do not multiply to `num_devices`; it lists sizes that do.
    """
    known = math.prod(size for size in config.sizes if size != -1)
    missing = num_devices // known if num_devices % known == 0 else 0
    sizes = tuple(missing if size == -1 else size for size in config.sizes)
    if math.prod(sizes) != num_devices:
        raise ValueError(
            f"mesh {_named(config.sizes)} does not fit {num_devices} devices; "
            f"{_listed(list(factorisations(num_devices)), config.sizes)}"
        )
    return sizes


def factorisations(number: int, num_factors: int = len(AXES)) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of so many factors, largest first."""
    if num_factors == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, num_factors - 1))


def _grid(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray | None:
    """The devices in these sizes; None where their torus has no such axes."""
    try:
        return mesh_utils.create_device_mesh(sizes, devices)
    except NotImplementedError:
        return None


def _named(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))


def _listed(fitting: list[tuple[int, ...]], asked: tuple[int, ...]) -> str:
    """Those first that keep most of what was asked for."""

    def num_changed(sizes: tuple[int, ...]) -> int:
        return int(np.sum(np.array(sizes) != np.array(asked)))

    nearest = sorted(fitting, key=num_changed)[:LISTED]
    more = f" and {len(fitting) - LISTED} more" if len(fitting) > LISTED else ""
    return f"({', '.join(AXES)}) that fit: {', '.join(map(str, nearest))}{more}"
