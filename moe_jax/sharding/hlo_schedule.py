"""What a compiled program computes while it communicates, read from its schedule.

The order of instructions in a scheduled module is that in which a device issues them. What stands
between the start and the done of an asynchronous collective can run beside it; a collective without
that pair stops the device.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.sharding.hlo_text import (
    Instruction,
    Module,
    array_bytes,
    called,
    computation_flops,
    instruction_flops,
    parse_module,
    trip_count,
)

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)


class Collective(NamedTuple):
    """A collective of one device's program.

    Attributes:
        name: of its instruction, the start if it is asynchronous.
        kind: one of `KINDS`.
        num_bytes: of its operands or of its results, whichever is larger, each time it runs.
        group: text of the groups of devices, or of the pairs of a collective-permute.
        times: how often it runs, by the known trip counts of the loops around it.
        is_async: has a start and a done.
        flops_beside: of the products between the two, each time.
    """

    name: str
    kind: str
    num_bytes: int
    group: str
    times: int
    is_async: bool
    flops_beside: float


class ScheduleReport(NamedTuple):
    """What `read_schedule` found, of one device.

    Attributes:
        collectives: in the order of the text.
        flops: of all matrix products.
    """

    collectives: tuple[Collective, ...]
    flops: float


def read_schedule(text: str) -> ScheduleReport:
    """Reads a scheduled module, for example `jax.jit(f).lower(x).compile().as_text()`.

    Raises:
        ValueError: if the text is no scheduled module, or a start has no done.
    """
    module = parse_module(text)
    collectives = _collectives(module, module.entry, 1)
    return ScheduleReport(tuple(collectives), computation_flops(module, module.entry))


def covered_share(collectives: Sequence[Collective], flops_per_byte: float = 0.0) -> float:
    """Share of the exchanged bytes that have computation beside them.

    A collective of n bytes with F FLOPs beside it is covered to the extent min(1, F / (r n)), or
    wholly if F > 0 and r = 0. Two collectives under way at once each count the same products, so
    the share is an upper bound.

    Args:
        collectives: of a report, all or a selection.
        flops_per_byte: r, the device's FLOPs a second over its bytes a second on the network.

    Returns:
        The share, 0 if nothing is exchanged.

    Raises:
        ValueError: if r is negative.
    """
    if not flops_per_byte >= 0:
        raise ValueError(f"flops_per_byte={flops_per_byte} must not be negative")
    total = covered = 0.0
    for one in collectives:
        weight = float(one.times * one.num_bytes)
        total += weight
        if one.flops_beside > 0:
            covered += weight * min(
                1.0, one.flops_beside / max(flops_per_byte * one.num_bytes, 1e-9)
            )
    return covered / total if total else 0.0


def bytes_by_kind(collectives: Sequence[Collective]) -> dict[str, int]:
    """Exchanged bytes of each kind that occurs."""
    out: dict[str, int] = {}
    for one in collectives:
        out[one.kind] = out.get(one.kind, 0) + one.times * one.num_bytes
    return out


def _collectives(module: Module, name: str, times: int) -> list[Collective]:
    instructions = module.computations[name]
    shapes = {one.name: one.shape for one in instructions}
    done_of = {
        operand: index
        for index, one in enumerate(instructions)
        if one.opcode.endswith("-done")
        for operand in one.operands
    }
    flops = [
        instruction_flops(module, one, [shapes.get(operand, "") for operand in one.operands])
        for one in instructions
    ]
    found = []
    for index, one in enumerate(instructions):
        for attribute in ("body", "calls", "to_apply"):
            inner = called(one, attribute)
            if one.opcode in ("while", "call", "conditional") and inner in module.computations:
                found += _collectives(module, inner, times * trip_count(one))
        kind = _kind(module, one)
        if kind is None:
            continue
        is_async = one.opcode.endswith("-start")
        if is_async and one.name not in done_of:
            raise ValueError(f"{one.name!r} starts and is never done")
        last = done_of[one.name] if is_async else index
        sent = sum(array_bytes(shapes.get(operand, "")) for operand in one.operands)
        received = array_bytes(instructions[last].shape)
        group = re.search(
            r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*)", one.attributes
        )
        found.append(
            Collective(
                name=one.name,
                kind=kind,
                num_bytes=max(sent, received),
                group=group[1].rstrip(",") if group else "",
                times=times,
                is_async=is_async,
                flops_beside=sum(flops[index + 1 : last]),
            )
        )
    return found


def _kind(module: Module, instruction: Instruction) -> str | None:
    """The kind of collective that an instruction starts or is, None if it is none."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode
    if opcode == "async":
        wrapped = module.computations.get(called(instruction) or "", [])
        return next((one.opcode for one in wrapped if one.opcode in KINDS), None)
    return None
