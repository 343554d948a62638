"""Reads the text of a compiled XLA module: computations, instructions, shapes, products."""

import math
import re
from typing import NamedTuple

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_COST = re.compile(r'"cost_estimate":\s*\{\s*"flops":\s*"?(\d+)')
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: without the leading %.
        shape: text of the result's type.
        opcode: such as `fusion`.
        operands: names.
        attributes: the text after the operands.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Module(NamedTuple):
    """Computations by name, instructions in the order of the text, and the entry's name."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse_module(text: str) -> Module:
    """Parses `compiled.as_text()`.

    Raises:
        ValueError: if the text is not a scheduled module, whose order of instructions is that in
            which they run, or has no entry computation.
    """
    first = text.partition("\n")[0]
    if "is_scheduled=true" not in first:
        raise ValueError(f"text begins {first[:80]!r}: expected a module with is_scheduled=true")
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            current.append(_instruction(found[1], line[found.end() :]))
    if not entry:
        raise ValueError("text has no ENTRY computation")
    return Module(computations, entry)


def array_bytes(shape: str) -> int:
    """Bytes of all arrays in a type's text, tuples included."""
    total = 0.0
    for name, bits, dims in _ARRAY.findall(shape):
        total += (1.0 if name == "pred" else int(bits) / 8.0) * math.prod(_sizes(dims))
    return math.ceil(total)


def called(instruction: Instruction, attribute: str = "calls") -> str | None:
    """Name of the computation that an instruction runs; None if it runs none."""
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", instruction.attributes)
    return found[1] if found else None


def trip_count(instruction: Instruction) -> int:
    """How often a loop runs; 1 where the compiler does not know."""
    found = _TRIPS.search(instruction.attributes)
    return int(found[1]) if found else 1


def instruction_flops(module: Module, instruction: Instruction, operands: list[str]) -> float:
    """Multiplications and additions of an instruction's matrix products and convolutions.

    Those inside fusions, calls and loops count, and what a kernel says of itself in its cost
    estimate; all other work counts 0.

    Args:
        module: where called computations are.
        instruction: the instruction.
        operands: types of its operands.
    """
    if instruction.opcode == "dot":
        return _dot_flops(instruction, operands)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, operands)
    if instruction.opcode == "custom-call":
        found = _COST.search(instruction.attributes)
        return float(found[1]) if found else 0.0
    if instruction.opcode == "while":
        body = called(instruction, "body")
        return trip_count(instruction) * computation_flops(module, body)
    inner = called(instruction) or called(instruction, "to_apply")
    if instruction.opcode in ("fusion", "call", "async-start"):
        return computation_flops(module, inner)
    return 0.0


def computation_flops(module: Module, name: str | None) -> float:
    """Those of all instructions of a computation."""
    instructions = module.computations.get(name or "", [])
    shapes = {instruction.name: instruction.shape for instruction in instructions}
    return sum(
        instruction_flops(module, one, [shapes.get(operand, "") for operand in one.operands])
        for one in instructions
    )


def _instruction(name: str, rest: str) -> Instruction:
    end = _balanced(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = len(opcode) + _balanced(rest[len(opcode) :])
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[len(opcode) : end]))
    return Instruction(name, shape, opcode, operands, rest[end:])


def _balanced(text: str) -> int:
    """Length of the text up to the bracket that closes its first character."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"brackets of {text[:80]!r} do not close")


def _sizes(dims: str) -> list[int]:
    return [int(size) for size in dims.split(",") if size]


def _first_array(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return _sizes(found[3]) if found else []


def _dot_flops(instruction: Instruction, operands: list[str]) -> float:
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    lhs = _first_array(operands[0])
    contracted = math.prod(lhs[axis] for axis in _sizes(found[1] if found else ""))
    return 2.0 * math.prod(_first_array(instruction.shape)) * contracted


def _convolution_flops(instruction: Instruction, operands: list[str]) -> float:
    """2 x (outputs but for the places of the window) x input features x places that meet.

    A TPU writes a batched product as a dilated convolution of which most places meet padding, so
    these are counted as `xla::HloCostAnalysis` does.
    """
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if found is None:
        return 0.0
    left, right, out = found.groups()
    lhs, rhs = (_first_array(operand) for operand in operands)
    result = _first_array(instruction.shape)
    flops = 2.0 * rhs[right.index("i")]
    flops *= math.prod(result[out.index(label)] for label in "bf")
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    options = dict(item.split("=") for item in window[1].split()) if window else {}
    for label in sorted(set(out) - set("bf")):
        axis = int(label)
        place = {
            key: int(options[key].split("x")[axis]) if key in options else 1
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        }
        low = int(options["pad"].split("x")[axis].split("_")[0]) if "pad" in options else 0
        outputs = np.arange(result[out.index(label)])[:, None]
        taps = np.arange(rhs[right.index(label)])[None, :]
        at = outputs * place["stride"] + taps * place["rhs_dilate"] - low
        size = (lhs[left.index(label)] - 1) * place["lhs_dilate"] + 1
        flops *= int(np.sum((at >= 0) & (at < size) & (at % place["lhs_dilate"] == 0)))
    return flops
