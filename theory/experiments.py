"""The learned experiments: which networks each trains, on what.

`facts` of each run hold its active and total parameters, the gate's included, and the table prints
them. Which networks of a comparison have equal counts, each function says; where widths are whole
numbers, equal means up to one neuron.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from theory.construct import pad_network
from theory.datadriven import fit_charts
from theory.model import Stack
from theory.problems import Problem, grid_problem, manifold_problem, partition_problem

DIMS = {"moment_curve": 1, "sphere": 2}


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
        chart_dim: of the construction.
    """

    name: str
    facts: Mapping[str, Any]
    stack: Stack
    problem: Callable[[], Problem]
    is_built: bool = False
    reconstruction_weight: float = 0.0
    chart_dim: int = 1


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
    data: dict[str, int], dims: dict[str, list], weightings: list, experts: int, width: int
) -> Iterator[Run]:
    """L1: the same function in more and more dimensions; `dims` are lists of D by manifold.

    Top-1 networks have equal active parameters, and so has `dense_active`, one expert that answers
    everywhere; `soft` answers with all experts, and `dense_total` has as many parameters as those.
    `built` starts from the data-driven construction and trains its experts; its gate, k-means
    cells, gets no gradient. On the sphere it takes two layers and more parameters than the others.
    """
    for manifold, each in dims.items():
        for dim in each:
            make = _manifold(manifold, dim, data)
            sparse = Stack(dim, 1, experts, width)
            for weighting in weightings:
                if weighting in ("dense_active", "dense_total"):
                    stack = matched(sparse, weighting.removeprefix("dense_"), num_experts=1)
                elif weighting == "built":
                    stack = _built_stack(sparse, manifold)
                else:
                    stack = dataclasses.replace(sparse, weighting=weighting)
                facts = {"manifold": manifold, "D": dim, "weighting": weighting}
                name = f"{manifold} D={dim} {weighting}"
                yield Run(name, facts, stack, make, weighting == "built", chart_dim=DIMS[manifold])


def experts(
    data: dict[str, int], manifold: str, dim: int, counts: list, weightings: list, width: int
) -> Iterator[Run]:
    """L2: more experts of the same width, so that active parameters grow by the gate's alone."""
    for weighting in weightings:
        for count in counts:
            stack = Stack(dim, 1, count, width)
            is_built = weighting == "built"
            if is_built:
                stack = _built_stack(stack, manifold)
            else:
                stack = dataclasses.replace(stack, weighting=weighting)
            facts = {"E": count, "weighting": weighting}
            make = _manifold(manifold, dim, data)
            name = f"{weighting} E={count}"
            yield Run(name, facts, stack, make, is_built, chart_dim=DIMS[manifold])


def gates(data: dict[str, int], cases: list, width: int, gate_dim: int) -> Iterator[Run]:
    """L3: classes of gates on partitions of the plane.

    `cases` are (partition, weighting, gate, matched). `active`: every network has the active
    parameters of experts of `width` behind a hidden layer of `gate_dim`, so that a smaller gate has
    wider experts. `width`: experts of one width, and gates that differ in size.
    """
    for partition, weighting, gate, same in cases:
        if same not in ("active", "width"):
            raise ValueError(f"config.options.cases: matched={same!r} is not active or width")
        num_experts = 9 if partition == "grid" else 4
        stack = Stack(2, 1, num_experts, width, weighting=weighting, gate=gate, gate_dim=gate_dim)
        if same == "active":
            reference = dataclasses.replace(stack, gate="hidden_layer")
            stack = _same_active_gate(stack, reference.active_parameters)
        facts = {"partition": partition, "weighting": weighting, "gate": gate, "matched": same}
        make = cache(partial(partition_problem, jax.random.key(3), partition, **data))
        yield Run(f"{partition} {weighting} {gate}, same {same}", facts, stack, make)


def depth(
    data: dict[str, int], cells: list, axes: int, width: int, state: int, depths: list
) -> Iterator[Run]:
    """L4: L = `axes` layers of E experts of `width`, against fewer, more and wider layers.

    For each E of `cells` and each of the same active and the same total parameters: other numbers
    of layers of E experts, and one layer of L E and of E^L.
    """
    for num in cells:
        make = cache(partial(grid_problem, jax.random.key(4), num, axes, **data))
        deep = Stack(axes, axes, num, width, num_layers=axes, state_dim=state)
        facts = {"cells": num, "layers": axes, "experts": num, "matched": "reference"}
        yield Run(f"{axes} x {num}", facts, deep, make)
        shapes = [(layers, num) for layers in depths if layers != axes]
        shapes += [(1, count) for count in sorted({num * axes, num**axes} - {num})]
        for num_layers, count in shapes:
            for same in ("active", "total"):
                stack = matched(deep, same, num_layers=num_layers, num_experts=count)
                facts = {"cells": num, "layers": num_layers, "experts": count, "matched": same}
                name = f"{num_layers} x {count} on {num} cells an axis, same {same}"
                yield Run(name, facts, stack, make)


def encoders(
    data: dict[str, int],
    manifold: str,
    dim: int,
    codes: list,
    weights: list,
    experts: int,
    width: int,
) -> Iterator[Run]:
    """L5: experts f_low(Enc x) of d' codes, with and without reconstruction, and full experts.

    Encoded experts are as wide as the full ones' active parameters allow; without reconstruction
    also of the full ones' width, and then smaller.
    """
    make = _manifold(manifold, dim, data)
    full = Stack(dim, 1, experts, width)
    yield Run("full", {"code": 0, "weight": 0.0, "matched": "reference"}, full, make)
    for same, weight in [("active", weight) for weight in weights] + [("width", 0.0)]:
        for code in codes:
            stack = dataclasses.replace(full, encoder_dim=code)
            if same == "active":
                stack = _fitted_width(stack, full.active_parameters, "active")
            facts = {"code": code, "weight": weight, "matched": same}
            name = f"d'={code}, reconstruction {weight}, same {same}"
            yield Run(name, facts, stack, make, reconstruction_weight=weight)


def sharing(
    data: dict[str, int],
    manifold: str,
    dim: int,
    selected: list,
    shared: list,
    experts: int,
    width: int,
) -> Iterator[Run]:
    """L6: k of k E experts and a shared expert of 0 or more neurons, at equal active parameters.

    Those of one of E experts of `width`: what larger gates and the shared expert take, the routed
    experts lack in width.
    """
    make = _manifold(manifold, dim, data)
    wanted = Stack(dim, 1, experts, width).active_parameters
    for neurons in shared:
        for k in selected:
            stack = Stack(dim, 1, experts * k, 1, num_selected=k, shared_dim=neurons)
            stack = _fitted_width(stack, wanted, "active")
            facts = {"k": k, "shared": neurons}
            name = f"k={k}, shared expert of {neurons}" if neurons else f"k={k}"
            yield Run(name, facts, stack, make)


EXPERIMENTS: dict[str, Callable[..., Iterator[Run]]] = {
    "dimension": dimension,
    "experts": experts,
    "gates": gates,
    "depth": depth,
    "encoders": encoders,
    "sharing": sharing,
}


def built_start(stack: Stack, problem: Problem, *, chart_dim: int = 1) -> list[Any]:
    """Parameters of the data-driven construction in the shape of the stack, float32.

    One layer for charts of dimension 1, two for dimension 2.

    Raises:
        ValueError: if a cell holds too few points for its chart.
    """
    width = stack.hidden_dim
    build = fit_charts(
        jax.random.key(0),
        problem.x.astype(np.float64),
        problem.y.astype(np.float64),
        dim=chart_dim,
        num_charts=stack.num_experts,
        num_segments=width - 1 if chart_dim == 1 else math.isqrt(width) - 1,
    )
    network = pad_network(build.network, stack.token_dim, (width,) * stack.num_layers)
    to_float = partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, jnp.float32))
    return [to_float(variables["params"]) for variables in network.params]


def _built_stack(sparse: Stack, manifold: str) -> Stack:
    if DIMS[manifold] == 1:
        return dataclasses.replace(sparse, weighting="hard")
    # The fewest nodes of a square, 16, and as many neurons for its 15 grid lines and the constant.
    code = max(sparse.input_dim, 15) + sparse.num_experts
    return dataclasses.replace(
        sparse, weighting="hard", num_layers=2, state_dim=code, hidden_dim=16
    )


def _manifold(name: str, dim: int, data: Mapping[str, int]) -> Callable[[], Problem]:
    return cache(partial(manifold_problem, jax.random.key(1), name, dim, **data))


def matched(stack: Stack, same: str, **shape: Any) -> Stack:
    """Another shape, its experts as wide as the stack's `active` or `total` parameters allow."""
    wanted = stack.active_parameters if same == "active" else stack.total_parameters
    return _fitted_width(dataclasses.replace(stack, **shape), wanted, same)


def _fitted_width(stack: Stack, wanted: int, same: str) -> Stack:
    """The stack with experts of the width that brings its parameters nearest to `wanted`."""

    def count(width: int) -> int:
        sized = dataclasses.replace(stack, hidden_dim=width)
        return sized.active_parameters if same == "active" else sized.total_parameters

    neuron = count(2) - count(1)
    width = max(1, 1 + round((wanted - count(1)) / neuron))
    return dataclasses.replace(stack, hidden_dim=width)


def _same_active_gate(stack: Stack, wanted: int) -> Stack:
    """As `_fitted_width`; a dense layer before the gate, which has a width too, gives the rest."""
    if stack.gate != "dense":
        return _fitted_width(stack, wanted, "active")
    sizes = [dataclasses.replace(stack, gate_dim=size) for size in range(1, stack.gate_dim + 1)]
    fitted = [_fitted_width(each, wanted, "active") for each in sizes]
    return min(
        fitted,
        key=lambda each: (
            abs(each.active_parameters - wanted),
            abs(each.hidden_dim - stack.hidden_dim),
        ),
    )
