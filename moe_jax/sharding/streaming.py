"""Streaming of tokens and experts through a package of chiplets, as in Mozart (arXiv 2603.07006).

A chiplet for attention stands at the root of a tree; G switches hang from it, and C chiplets with
experts from each switch. The chiplets of a switch share one memory port, and the weights of one
layer at a time fit beside them.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from moe_jax.sharding.network import check_positive
from moe_jax.sharding.placement import visited_devices
from moe_jax.sharding.simulator import Task, Timeline, simulate


@dataclasses.dataclass(frozen=True)
class Package:
    """The hardware; rates are guesses but for the memory's. Links carry both directions at once.

    Attributes:
        groups, chiplets_per_group: G and C.
        attention_flops, expert_flops: per second, of the attention chiplet and of one other.
        memory_bandwidth: bytes a second of one port; the attention chiplet has its own.
        trunk_bandwidth, leaf_bandwidth: bytes a second of a switch's link to the root, and of a
            chiplet's to its switch.
    """

    groups: int = 4
    chiplets_per_group: int = 4
    attention_flops: float = 256e12
    expert_flops: float = 64e12
    memory_bandwidth: float = 256e9
    trunk_bandwidth: float = 32e9
    leaf_bandwidth: float = 16e9

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def num_chiplets(self) -> int:
        """G C, those with experts."""
        return self.groups * self.chiplets_per_group


@dataclasses.dataclass(frozen=True)
class StreamedModel:
    """A model of equal layers, and the tokens that pass it at once.

    Attributes:
        num_layers: L.
        num_tokens: of the batch.
        attention_flops: per token, of attention, gate and whatever each token passes besides.
        expert_flops: per token and expert.
        attention_bytes, expert_bytes: weights of a layer's attention, and of one expert.
        token_bytes: of a token on a link.
    """

    num_layers: int
    num_tokens: int
    attention_flops: float
    expert_flops: float
    attention_bytes: float
    expert_bytes: float
    token_bytes: float

    def __post_init__(self) -> None:
        check_positive(self)


@dataclasses.dataclass(frozen=True)
class Streaming:
    """Which of Mozart's parts are on; its placement is an argument of `simulate_streaming`.

    Attributes:
        micro_batches: parts of the batch that follow each other through a layer; 1 is without
            streaming of tokens.
        streams_weights: load a layer's weights as soon as its predecessor's are done with, the
            busiest chiplet's first; else after the layer's attention.
        merges_copies: send a token once over every link, copied at switches, and add the experts'
            answers of a token at chiplets and switches; else once for each of its experts.
    """

    micro_batches: int = 1
    streams_weights: bool = False
    merges_copies: bool = False

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches={self.micro_batches} must be at least 1")


def simulate_streaming(
    package: Package,
    model: StreamedModel,
    streaming: Streaming,
    use: Bool[np.ndarray, "tokens experts"],
    permutation: Int[np.ndarray, " experts"],
) -> Timeline:
    """Simulates the forward pass of all layers.

    Args:
        package: the hardware.
        model: the work.
        streaming: what is on.
        use: which experts each of some recorded tokens went to; scaled to the batch.
        permutation: chiplet c, in switch c // C, holds places c E / (G C) and on.

    Raises:
        ValueError: if the chiplets do not divide the experts.
    """
    traffic = _traffic(package, model, streaming, use, permutation)
    tasks: list[Task] = []
    for layer in range(model.num_layers):
        tasks += _weights(package, model, streaming, traffic, layer)
        for part in range(streaming.micro_batches):
            tasks += _micro_batch(package, model, streaming, traffic, layer, part)
    return simulate(tasks)


@dataclasses.dataclass(frozen=True)
class _Traffic:
    """Of one micro-batch: tokens over each leaf and trunk, and rows to compute on each chiplet."""

    leaf: list[float]
    trunk: list[float]
    rows: list[float]
    weights: float


def _traffic(
    package: Package,
    model: StreamedModel,
    streaming: Streaming,
    use: Bool[np.ndarray, "tokens experts"],
    permutation: Int[np.ndarray, " experts"],
) -> _Traffic:
    chiplets = package.num_chiplets
    visits = visited_devices(use, permutation, chiplets)
    rows = use[:, permutation].reshape(len(use), chiplets, -1).sum(axis=(0, 2))
    by_group = (package.groups, package.chiplets_per_group)
    if streaming.merges_copies:
        leaf = visits.sum(axis=0)
        trunk = visits.reshape(len(use), *by_group).any(axis=2).sum(axis=0)
    else:
        leaf, trunk = rows, rows.reshape(by_group).sum(axis=1)
    scale = model.num_tokens / len(use) / streaming.micro_batches
    return _Traffic(
        leaf=(leaf * scale).tolist(),
        trunk=(trunk * scale).tolist(),
        rows=(rows * scale).tolist(),
        weights=model.expert_bytes * use.shape[1] / chiplets,
    )


def _weights(
    package: Package,
    model: StreamedModel,
    streaming: Streaming,
    traffic: _Traffic,
    layer: int,
) -> list[Task]:
    last = streaming.micro_batches - 1
    if streaming.streams_weights:
        before: tuple[str, ...] = (f"A{layer - 1}.{last}",) if layer else ()
        order = np.argsort(-np.array(traffic.rows), kind="stable").tolist()
    else:
        before = _answered(package, layer - 1, last) if layer else ()
        order = list(range(package.num_chiplets))
    seconds = model.attention_bytes / package.memory_bandwidth
    tasks = [Task(f"W{layer}", "memory", seconds, before, kind="weights")]
    for chiplet in order:
        if not streaming.streams_weights:
            before = (f"A{layer}.{last}",)
        else:
            before = (f"E{layer - 1}.{last}.{chiplet}",) if layer else ()
        port = f"memory {chiplet // package.chiplets_per_group}"
        seconds = traffic.weights / package.memory_bandwidth
        tasks.append(Task(f"W{layer}.{chiplet}", port, seconds, before, kind="weights"))
    return tasks


def _answered(package: Package, layer: int, part: int) -> tuple[str, ...]:
    """Every token of a part is back at the attention chiplet, whatever links it came by."""
    return tuple(f"C{layer}.{part}.g{group}" for group in range(package.groups)) + tuple(
        f"C{layer}.{part}.{chiplet}" for chiplet in range(package.num_chiplets)
    )


def _micro_batch(
    package: Package,
    model: StreamedModel,
    streaming: Streaming,
    traffic: _Traffic,
    layer: int,
    part: int,
) -> list[Task]:
    tag = f"{layer}.{part}"
    before = (f"W{layer}", *(_answered(package, layer - 1, part) if layer else ()))
    tokens = model.num_tokens / streaming.micro_batches
    seconds = tokens * model.attention_flops / package.attention_flops
    tasks = [Task(f"A{tag}", "attention", seconds, before, kind="attention")]
    for group, count in enumerate(traffic.trunk):
        seconds = count * model.token_bytes / package.trunk_bandwidth
        down = Task(f"D{tag}.g{group}", f"down {group}", seconds, (f"A{tag}",), kind="dispatch")
        first = group * package.chiplets_per_group
        chiplets = range(first, first + package.chiplets_per_group)
        # A switch passes on what arrives, so a leaf is busy beside its trunk and not after it.
        answers = tuple(f"E{tag}.{chiplet}" for chiplet in chiplets)
        up = Task(f"C{tag}.g{group}", f"up {group}", seconds, answers, kind="combine")
        tasks += [down, up]
    for chiplet, count in enumerate(traffic.leaf):
        group = chiplet // package.chiplets_per_group
        seconds = count * model.token_bytes / package.leaf_bandwidth
        down = Task(f"D{tag}.{chiplet}", f"leaf {chiplet}", seconds, (f"A{tag}",), kind="dispatch")
        arrived = (f"W{layer}.{chiplet}", f"D{tag}.{chiplet}", f"D{tag}.g{group}")
        work = traffic.rows[chiplet] * model.expert_flops / package.expert_flops
        compute = Task(f"E{tag}.{chiplet}", f"chiplet {chiplet}", work, arrived, kind="experts")
        answered = (f"E{tag}.{chiplet}",)
        up = Task(f"C{tag}.{chiplet}", f"leaf up {chiplet}", seconds, answered, kind="combine")
        tasks += [down, compute, up]
    return tasks
