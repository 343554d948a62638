"""The learned experiments: which networks each trains, on what.

Every network of a comparison has the same active parameters, those of the gate included, unless the
name says otherwise; `facts` of each run hold active and total counts.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.datadriven import fit_charts
from theory.model import Stack
from theory.problems import Problem, grid_problem, manifold_problem, partition_problem


@dataclasses.dataclass(frozen=True)
class Run:
    """One network on one problem, all seeds.

    Attributes:
        name: unique in the experiment.
        facts: what the figure and the table show of it.
        stack: the network.
        problem: makes the data.
        is_built: start from the data-driven construction, at `start_learning_rate`.
        reconstruction_weight: see `train_seeds`.
    """

    name: str
    facts: Mapping[str, Any]
    stack: Stack
    problem: Callable[[], Problem]
    is_built: bool = False
    reconstruction_weight: float = 0.0


def runs_of(name: str, options: Mapping[str, Any], data: Mapping[str, int]) -> list[Run]:
    """The runs of an experiment.

    Args:
        name: a key of `EXPERIMENTS`.
        options: what the experiment varies, see its function.
        data: num_train and num_test.

    Raises:
        ValueError: for an unknown experiment, or an option it does not have.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment={name!r} is not one of {tuple(EXPERIMENTS)}")
    function = EXPERIMENTS[name]
    known = tuple(inspect.signature(function).parameters)[1:]
    for option in options:
        if option not in known:
            raise ValueError(f"config.options.{option} is not an option of {name}: {known}")
    missing = [option for option in known if option not in options]
    if missing:
        raise ValueError(f"config.options.{missing[0]} is missing")
    runs = []
    for run in function(dict(data), **options):
        counts = {"active": run.stack.active_parameters, "total": run.stack.total_parameters}
        runs.append(dataclasses.replace(run, facts={**run.facts, **counts}))
    return runs


def dimension(
    data: dict[str, int], manifolds: list, dims: list, weightings: list, experts: int, width: int
) -> Iterator[Run]:
    """L1: the same function in more and more dimensions.

    `built` among the weightings starts from the data-driven construction and trains its experts;
    its gate, k-means cells, gets no gradient. Curves only.
    """
    for manifold in manifolds:
        for dim in dims:
            make = _manifold(manifold, dim, data)
            for weighting in weightings:
                is_built = weighting == "built"
                if is_built and manifold != "moment_curve":
                    continue
                stack = Stack(
                    dim, 1, experts, width + is_built, weighting="hard" if is_built else weighting
                )
                facts = {"manifold": manifold, "D": dim, "weighting": weighting}
                yield Run(f"{manifold} D={dim} {weighting}", facts, stack, make, is_built)


def experts(
    data: dict[str, int], manifold: str, dim: int, counts: list, weightings: list, width: int
) -> Iterator[Run]:
    """L2: more experts of the same width."""
    for weighting in weightings:
        for count in counts:
            is_built = weighting == "built"
            stack = Stack(
                dim, 1, count, width + is_built, weighting="hard" if is_built else weighting
            )
            facts = {"E": count, "weighting": weighting}
            make = _manifold(manifold, dim, data)
            yield Run(f"{weighting} E={count}", facts, stack, make, is_built)


def gates(data: dict[str, int], cases: list, width: int) -> Iterator[Run]:
    """L3: classes of gates on partitions of the plane; `cases` are (partition, weighting, gate)."""
    for partition, weighting, gate in cases:
        num_experts = 9 if partition == "grid" else 4
        stack = Stack(2, 1, num_experts, width, weighting=weighting, gate=gate)
        facts = {"partition": partition, "weighting": weighting, "gate": gate}
        make = cache(partial(partition_problem, jax.random.key(3), partition, **data))
        yield Run(f"{partition} {weighting} {gate}", facts, stack, make)


def depth(
    data: dict[str, int], cells: int, axes: int, width: int, state: int, depths: list
) -> Iterator[Run]:
    """L4: layers of E experts, against one layer of as many experts and of E^L, matched."""
    make = cache(partial(grid_problem, jax.random.key(4), cells, axes, **data))
    for num_layers in depths:
        deep = Stack(axes, axes, cells, width, num_layers=num_layers, state_dim=state)
        facts = {"layers": num_layers, "experts": cells, "matched": "reference"}
        yield Run(f"{num_layers} x {cells}", facts, deep, make)
    deep = Stack(axes, axes, cells, width, num_layers=axes, state_dim=state)
    for count in sorted({cells * axes, cells**axes}):
        for matched in ("active", "total"):
            stack = _one_layer(deep, count, matched)
            facts = {"layers": 1, "experts": count, "matched": matched}
            yield Run(f"1 x {count}, same {matched}", facts, stack, make)


def encoders(
    data: dict[str, int],
    manifold: str,
    dim: int,
    codes: list,
    weights: list,
    experts: int,
    width: int,
) -> Iterator[Run]:
    """L5: experts f_low(Enc x) of d' codes, with and without reconstruction, and full experts."""
    make = _manifold(manifold, dim, data)
    yield Run("full", {"code": 0, "weight": 0.0}, Stack(dim, 1, experts, width), make)
    for weight in weights:
        for code in codes:
            stack = Stack(dim, 1, experts, width, encoder_dim=code)
            facts = {"code": code, "weight": weight}
            name = f"d'={code}, reconstruction {weight}"
            yield Run(name, facts, stack, make, reconstruction_weight=weight)


def sharing(
    data: dict[str, int], manifold: str, dim: int, selected: list, experts: int, width: int
) -> Iterator[Run]:
    """L6: k of k E experts of width m / k, with half of m in a shared expert or without one."""
    make = _manifold(manifold, dim, data)
    for shared in (0, width // 2):
        for k in selected:
            routed = (width - shared) // k
            stack = Stack(dim, 1, experts * k, routed, num_selected=k, shared_dim=shared)
            facts = {"k": k, "shared": shared > 0}
            yield Run(f"k={k}{', shared expert' if shared else ''}", facts, stack, make)


EXPERIMENTS: dict[str, Callable[..., Iterator[Run]]] = {
    "dimension": dimension,
    "experts": experts,
    "gates": gates,
    "depth": depth,
    "encoders": encoders,
    "sharing": sharing,
}


def built_start(stack: Stack, problem: Problem) -> list[Any]:
    """Parameters of the data-driven construction in the shape of a one-layer stack, float32.

    Raises:
        ValueError: if a cell holds too few points for its chart.
    """
    build = fit_charts(
        jax.random.key(0),
        problem.x.astype(np.float64),
        problem.y.astype(np.float64),
        dim=1,
        num_charts=stack.num_experts,
        num_segments=stack.hidden_dim - 1,
    )
    variables = build.network.params[0]["params"]
    return [jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), variables)]


def _manifold(name: str, dim: int, data: Mapping[str, int]) -> Callable[[], Problem]:
    return cache(partial(manifold_problem, jax.random.key(1), name, dim, **data))


def _one_layer(deep: Stack, num_experts: int, matched: str) -> Stack:
    """One layer of as many active, or total, parameters as `deep`, up to one neuron."""
    wanted = deep.active_parameters if matched == "active" else deep.total_parameters
    counted = 1 if matched == "active" else num_experts
    shape = dataclasses.replace(deep, num_layers=1, num_experts=num_experts, hidden_dim=1)
    gate = shape.token_dim * num_experts
    hidden = round((wanted - gate) / (2 * shape.token_dim * counted))
    return dataclasses.replace(shape, hidden_dim=max(hidden, 1))
