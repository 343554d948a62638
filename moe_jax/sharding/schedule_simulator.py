"""One training step of a mixture of experts under several schedules, simulated on two resources.

Of every layer and part r of the batch there are AT (attention and gate), D (dispatch, an
all-to-all), E (experts) and C (combine, an all-to-all); a prime marks the backward pass; AR is the
all-reduce of the gradients that every device holds. AT and E occupy `compute`, the others
`network`. After FlowMoE (arXiv 2510.00207).
"""

import dataclasses
import math
from collections.abc import Mapping

from moe_jax.sharding.network import EXCHANGES, Cost
from moe_jax.sharding.simulator import Task, Timeline, simulate


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Times of one layer for the whole batch, and how many such layers there are.

    Attributes:
        num_layers: L.
        attention: seconds of AT, forward.
        experts: seconds of E, forward.
        exchange: cost of one all-to-all, D or C, by algorithm; see `exchange_costs`.
        reduction: cost of a layer's AR.
        reduction_bytes: gradients of a layer that AR sums.
        backward: seconds of the backward pass of AT or E over those of the forward pass.
    """

    num_layers: int
    attention: float
    experts: float
    exchange: Mapping[str, Cost]
    reduction: Cost
    reduction_bytes: float
    backward: float = 2.0

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers} must be at least 1")
        if not self.reduction_bytes > 0:
            raise ValueError(f"reduction_bytes={self.reduction_bytes} must be positive")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is cut into parts, and when gradients are summed.

    Attributes:
        parts: R, parts of the batch; D, E and C are done part by part.
        splits_attention: AT is done part by part too, and a part goes on to the next layer without
            waiting for the others.
        chunk_bytes: S, AR is cut into chunks of so many bytes which run when no all-to-all is
            ready; None for one all-reduce of all layers' gradients after the backward pass.
        exchange: algorithm of the all-to-all.
    """

    parts: int = 1
    splits_attention: bool = False
    chunk_bytes: float | None = None
    exchange: str = "linear"

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts={self.parts} must be at least 1")
        if self.chunk_bytes is not None and not self.chunk_bytes > 0:
            raise ValueError(f"chunk_bytes={self.chunk_bytes} must be positive")
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r} is not one of {EXCHANGES}")


MEBIBYTE = 2.0**20
SCHEDULES: dict[str, Schedule] = {
    "vanilla": Schedule(),
    "FasterMoE": Schedule(parts=2),
    "Tutel": Schedule(parts=2, exchange="adaptive"),
    "ScheMoE": Schedule(parts=2, exchange="two_level"),
    "FlowMoE": Schedule(parts=2, splits_attention=True, chunk_bytes=4 * MEBIBYTE),
}
"""In the manner of the systems so named, with what a model of two resources can tell apart.

FasterMoE's shadowing of busy experts needs uneven loads and is left out, as is any compression.
At two parts its order of sends and receives is that of all the others."""


def simulate_step(work: StepWork, schedule: Schedule) -> Timeline:
    """Simulates forward pass, backward pass and the summation of gradients.

    Raises:
        ValueError: if `work.exchange` lacks the schedule's algorithm.
    """
    return simulate(step_tasks(work, schedule))


def step_tasks(work: StepWork, schedule: Schedule) -> list[Task]:
    """The tasks of a step, each resource's in the order in which it runs them.

    Forward: AT_1..AT_R, E_1..E_R beside D_1..D_R, C_1..C_R. Backward: E'_R..E'_1, AT'_R..AT'_1
    beside C'_R..C'_1, D'_R..D'_1. The backward pass waits for the whole forward pass, because the
    statistics of the losses are those of the whole batch.
    """
    if schedule.exchange not in work.exchange:
        raise ValueError(
            f"work.exchange={sorted(work.exchange)} lacks exchange={schedule.exchange!r}"
        )
    tasks: list[Task] = []
    for layer in range(work.num_layers):
        tasks += _forward(work, schedule, layer)
    for layer in reversed(range(work.num_layers)):
        tasks += _backward(work, schedule, layer)
    if schedule.chunk_bytes is None:
        seconds = work.reduction.startup + work.num_layers * work.reduction.transfer
        after = tuple(
            name
            for layer in range(work.num_layers)
            for name in _names("AT'", layer, _attention_parts(schedule))
        )
        tasks.append(Task("AR", "network", seconds, after, kind="reduction"))
    return tasks


def _names(stage: str, layer: int, parts: int) -> tuple[str, ...]:
    return tuple(f"{stage}{layer}.{part}" for part in range(parts))


def _attention_parts(schedule: Schedule) -> int:
    return schedule.parts if schedule.splits_attention else 1


def _part_of(names: tuple[str, ...], part: int, parts: int) -> tuple[str, ...]:
    """The same part where both are cut alike, else all of them."""
    return names[part : part + 1] if len(names) == parts else names


def _stage(
    stage: str,
    layer: int,
    parts: int,
    seconds: float,
    kind: str,
    before: tuple[str, ...],
) -> list[Task]:
    resource = "network" if kind in ("dispatch", "combine") else "compute"
    return [
        Task(name, resource, seconds, _part_of(before, part, parts), kind=kind)
        for part, name in enumerate(_names(stage, layer, parts))
    ]


def _forward(work: StepWork, schedule: Schedule, layer: int) -> list[Task]:
    parts, attention_parts = schedule.parts, _attention_parts(schedule)
    cost = work.exchange[schedule.exchange]
    exchange = cost.startup + cost.transfer / parts
    tasks: list[Task] = []
    before = _names("C", layer - 1, parts) if layer else ()
    for stage, count, seconds, kind in (
        ("AT", attention_parts, work.attention / attention_parts, "attention"),
        ("D", parts, exchange, "dispatch"),
        ("E", parts, work.experts / parts, "experts"),
        ("C", parts, exchange, "combine"),
    ):
        tasks += _stage(stage, layer, count, seconds, kind, before)
        before = _names(stage, layer, count)
    return tasks


def _backward(work: StepWork, schedule: Schedule, layer: int) -> list[Task]:
    parts, attention_parts = schedule.parts, _attention_parts(schedule)
    cost = work.exchange[schedule.exchange]
    exchange = cost.startup + cost.transfer / parts
    is_last = layer == work.num_layers - 1
    before = () if is_last else _names("AT'", layer + 1, attention_parts)
    tasks: list[Task] = []
    for stage, count, seconds, kind in (
        ("C'", parts, exchange, "combine"),
        ("E'", parts, work.backward * work.experts / parts, "experts"),
        ("D'", parts, exchange, "dispatch"),
        ("AT'", attention_parts, work.backward * work.attention / attention_parts, "attention"),
    ):
        cut = _stage(stage, layer, count, seconds, kind, before)
        if is_last and stage == "C'":
            cut = [task._replace(after=_names("C", layer, parts)) for task in cut]
        tasks += reversed(cut)
        before = _names(stage, layer, count)
    if schedule.chunk_bytes is not None:
        tasks += _chunks(work, schedule.chunk_bytes, layer, before)
    return tasks


def _chunks(work: StepWork, chunk_bytes: float, layer: int, before: tuple[str, ...]) -> list[Task]:
    count = math.ceil(work.reduction_bytes / chunk_bytes)
    share = chunk_bytes / work.reduction_bytes
    tasks: list[Task] = []
    for chunk in range(count):
        rest = max(1.0 - chunk * share, 0.0)
        seconds = work.reduction.startup + work.reduction.transfer * min(share, rest)
        name = f"AR{layer}.{chunk}"
        tasks.append(Task(name, "network", seconds, before, gives_way=True, kind="reduction"))
    return tasks
