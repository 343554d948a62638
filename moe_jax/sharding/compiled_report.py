"""What a program compiled for a topology needs of each chip: memory, products, exchanges, time."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_jax.sharding.hlo_schedule import Collective, covered_share, read_schedule


class Chip(NamedTuple):
    """Rates of one chip, from its public data sheet.

    Attributes:
        memory_bytes: of high-bandwidth memory.
        flops: bfloat16 products a second.
        network: bytes a second over all links to other chips of the slice.
    """

    memory_bytes: float
    flops: float
    network: float


CHIPS = {
    "v4": Chip(32 * 2.0**30, 275e12, 300e9),
    "v5e": Chip(16 * 2.0**30, 197e12, 200e9),
    "v5p": Chip(95 * 2.0**30, 459e12, 600e9),
    "v6e": Chip(32 * 2.0**30, 918e12, 400e9),
}


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """Needs of one chip.

    Attributes:
        argument_bytes, output_bytes, temporary_bytes: memory; outputs that take an argument's place
            are not in `output_bytes`.
        flops: of matrix products, by the compiled program, recomputation included.
        exchanged: bytes by kind of collective and mesh axes it runs along, such as `data,expert`.
        covered: share of those bytes that run beside enough products to hide them.
        chip: the rates used.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    flops: float
    exchanged: dict[tuple[str, str], int]
    covered: float
    chip: Chip

    @property
    def memory_bytes(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @property
    def missing_bytes(self) -> float:
        """By how much the program exceeds the chip's memory; 0 if it fits."""
        return max(0.0, self.memory_bytes - self.chip.memory_bytes)

    @property
    def step_seconds(self) -> float:
        """Predicted: products at the peak rate, plus exchanges that no product covers.

        Optimistic: every link of the chip is taken to be busy, and nothing but products to compute.
        """
        exposed = (1.0 - self.covered) * sum(self.exchanged.values())
        return self.flops / self.chip.flops + exposed / self.chip.network

    def utilisation(self, model_flops: float) -> float:
        """Share of the peak that a model's own FLOPs per chip make of the predicted time."""
        return model_flops / (self.step_seconds * self.chip.flops) if self.step_seconds else 0.0

    def __str__(self) -> str:
        """A few lines to print."""
        gib = 2.0**30
        lines = [
            f"memory: arguments {self.argument_bytes / gib:.2f} + outputs "
            f"{self.output_bytes / gib:.2f} + temporaries {self.temporary_bytes / gib:.2f} = "
            f"{self.memory_bytes / gib:.2f} of {self.chip.memory_bytes / gib:.0f} GiB",
            f"products: {self.flops / 1e12:.3f} TFLOP",
            *(
                f"{kind} along {axes}: {count / gib:.3f} GiB"
                for (kind, axes), count in self.exchanged.items()
            ),
            f"covered: {self.covered:.0%} of the exchanged bytes",
            f"predicted: {1e3 * self.step_seconds:.2f} ms",
        ]
        if self.missing_bytes:
            lines.insert(1, f"does NOT fit: {self.missing_bytes / gib:.2f} GiB too much")
        return "\n".join(lines)


def report_compiled(compiled: Any, mesh_shape: Mapping[str, int], chip: Chip) -> CompiledReport:
    """Reads a program that `jax.jit(f).lower(...).compile()` returned.

    Args:
        compiled: the program.
        mesh_shape: size of each axis, as `mesh.shape`.
        chip: one of `CHIPS`, or rates of another.

    Raises:
        ValueError: if the groups of a collective do not fit the mesh.
    """
    memory = compiled.memory_analysis()
    report = read_schedule(compiled.as_text())
    return CompiledReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
        temporary_bytes=memory.temp_size_in_bytes,
        flops=report.flops,
        exchanged=exchanged_bytes(report.collectives, mesh_shape),
        covered=covered_share(report.collectives, chip.flops / chip.network),
        chip=chip,
    )


def exchanged_bytes(
    collectives: tuple[Collective, ...], mesh_shape: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    """Bytes by kind and axes; collectives within single devices are left out."""
    out: dict[tuple[str, str], int] = {}
    for one in collectives:
        axes = ",".join(group_axes(one.group, mesh_shape))
        if axes:
            out[one.kind, axes] = out.get((one.kind, axes), 0) + one.times * one.num_bytes
    return out


def group_axes(group: str, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the devices of a group differ.

    Args:
        group: text of replica groups or of source-target pairs: `{{0,1},{2,3}}`, the same as
            `[2,2]<=[4]` or, transposed, `[2,2]<=[2,2]T(1,0)`; `{}` and no text for all devices.
        mesh_shape: sizes of the axes; devices are numbered with the last axis fastest.

    Raises:
        ValueError: if the text cannot be read or names a device that the mesh has not.
    """
    sizes = tuple(mesh_shape.values())
    num_devices = int(np.prod(sizes))
    if group in ("", "{}"):
        groups = [np.arange(num_devices)]
    elif found := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", group):
        shape, source = ([int(n) for n in found[index].split(",")] for index in (1, 2))
        devices = np.arange(int(np.prod(source))).reshape(source)
        if found[3]:
            devices = devices.transpose([int(axis) for axis in found[3].split(",")])
        groups = list(devices.reshape(shape))
    elif re.fullmatch(r"\{\{[\d,{}]*\}\}", group):
        groups = [
            np.array([int(n) for n in members.split(",")])
            for members in re.findall(r"\{([\d,]+)\}", group)
        ]
    else:
        raise ValueError(f"group={group!r} names no groups of devices")
    largest = max(int(members.max()) for members in groups)
    if largest >= num_devices:
        raise ValueError(f"group={group!r} names device {largest} of a mesh of {num_devices}")
    differs = np.zeros(len(sizes), bool)
    for members in groups:
        places = np.stack(np.unravel_index(members, sizes))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, is_used in zip(mesh_shape, differs, strict=True) if is_used)
