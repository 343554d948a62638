"""Figures of a learned experiment, from its results file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

from theory.evaluation import SYMBOLS  # noqa: E402
from theory.problems import RING_RADII, cell_of  # noqa: E402

# What each experiment shows: abscissa, what has a row of panels for each of its values (or None),
# what tells the curves apart, the panels' quantities.
SHAPES: dict[str, tuple[str, str | None, tuple[str, ...], tuple[str, ...]]] = {
    "dimension": ("D", "manifold", ("weighting",), ("mse", "sup", "hard_mse")),
    "experts": ("E", None, ("weighting",), ("mse", "hard_mse")),
    "gates": ("gate", None, ("partition", "weighting", "matched"), ("purity", "hard_mse")),
    "depth": ("shape", "cells", ("matched",), ("hard_mse", "hard_sup", "paths")),
    "encoders": ("code", None, ("weight", "matched"), ("hard_mse", "hard_sup")),
    "sharing": ("k", None, ("shared",), ("mse", "sup")),
}
TITLES = {
    "dimension": "L1: one smooth function on a curve and on the sphere, at a random place in R^D",
    "experts": "L2: a smooth function on a curve, by the number of experts of one width",
    "gates": "L3: an affine function on each cell of a partition of the plane, by class of gates",
    "depth": "L4: E x E cells of the plane, a jump at every face, by the number of layers",
    "encoders": "L5: a smooth function on the sphere, experts that see d' directions only",
    "sharing": "L6: a smooth function on a curve, k experts a point of equal active width together",
}
_WORDS = {
    "built": "top-1 from the data-driven construction",
    "straight_through": "top-1, straight-through",
    "switch": "top-1, Switch weights",
    "soft": "soft, all experts answer",
    "likelihood": "top-1, likelihood",
    "dense_active": "dense, equal active parameters",
    "dense_total": "dense, equal total parameters",
    "hidden_layer": "two-layer",
    "dense": "dense + affine",
    "active": "equal active parameters",
    "total": "equal total parameters",
    "width": "experts of equal width",
    "reference": "2 layers of E experts, the others' reference",
}
_SHAPE_ORDER = ("1 x E", "1 x 2E", "1 x E²", "2 x E", "3 x E")
LABELS = {
    "D": "ambient dimension D",
    "E": "experts E, each of the same width",
    "code": "code dimension d' of the experts",
    "k": "experts selected k, of k E experts",
    "shape": "layers x experts a layer",
    "gate": "gate",
    "mse": "mean squared error / variance, as trained",
    "hard_mse": "mean squared error / variance, top-1",
    "sup": "largest error / standard deviation",
    "hard_sup": "largest error / standard deviation, top-1",
    "purity": "purity of the gate's cells",
    "paths": "distinct paths used",
}
_MARKERS = "os^Dv<>PX*"


def draw_experiment(results: Mapping[str, Any], path: Path) -> None:
    """Draws medians over seeds with bars from the least to the largest, a panel a quantity."""
    abscissa, split, grouping, quantities = SHAPES[results["config"]["experiment"]]
    rows: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in results["runs"].values():
        facts = run["facts"]
        row = "" if split is None else _group_label(split, facts[split])
        label = ", ".join(_group_label(name, facts[name]) for name in grouping)
        rows.setdefault(row, {}).setdefault(label, []).append(run)
    figure, grid = plt.subplots(
        len(rows),
        len(quantities),
        figsize=(5.2 * len(quantities), 0.6 + 4.0 * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for panels, (row, groups) in zip(grid, rows.items(), strict=True):
        for axes, quantity in zip(panels, quantities, strict=True):
            _draw_panel(axes, groups, abscissa, quantity)
            axes.set_title(row, fontsize=10)
    num_seeds = results["config"]["train"]["num_seeds"]
    title = TITLES[results["config"]["experiment"]]
    figure.suptitle(
        f"{title}\nmedians of {num_seeds} seeds; bars from the least to the largest", fontsize=10
    )
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3 if len(labels) < 7 else 4, fontsize=8
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_maps(results: Mapping[str, Any], path: Path) -> None:
    """Draws which expert, or path of experts, answers where, of the middle seed of each network.

    Red lines are the target's jumps.
    """
    runs = {name: run for name, run in results["runs"].items() if "map" in run}
    columns = 5
    rows = -(-len(runs) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.4 * columns, 2.9 * rows), layout="constrained", squeeze=False
    )
    colors = plt.get_cmap("tab20")(np.arange(len(SYMBOLS)) % 20)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, run in zip(grid.flat, runs.values(), strict=False):
        facts = run["facts"]
        number = np.array([[SYMBOLS.index(symbol) for symbol in row] for row in run["map"]])
        axes.imshow(colors[number], origin="lower", extent=(-1, 1, -1, 1), interpolation="nearest")
        _draw_jumps(axes, facts.get("partition", "cells"), facts.get("cells", 3))
        if "experts" in facts:
            used = f"{_quantile(run['paths'], 0.5):g} paths" if "paths" in run else "one layer"
            same = "" if facts["matched"] == "reference" else f", equal {facts['matched']}"
            pieces = facts["cells"] ** 2
            title = f"{facts['layers']} x {facts['experts']}{same}\n{used}, {pieces} pieces"
        else:
            title = (
                f"{_WORDS.get(facts['gate'], facts['gate'])} gate\n"
                f"{facts['weighting'].replace('_', '-')}, equal {facts['matched']}\n"
                f"purity {_quantile(run['purity'], 0.5):.2f}"
            )
        axes.set_title(title, fontsize=8)
    figure.suptitle(
        "regions of the square in which one expert answers (where there are layers, one path), a "
        "colour each, in the middle seed;\nred: the target's jumps",
        fontsize=9,
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_jumps(axes: Any, partition: str, cells: int) -> None:
    turn = np.linspace(0, 2 * np.pi, 200)
    if partition == "rings":
        for radius in RING_RADII:
            axes.plot(radius * np.cos(turn), radius * np.sin(turn), color="red", linewidth=0.8)
    elif partition == "cells":
        for face in np.linspace(-1, 1, cells + 1)[1:-1]:
            axes.plot([face, face], [-1, 1], color="red", linewidth=0.8)
            axes.plot([-1, 1], [face, face], color="red", linewidth=0.8)
    else:
        side = (np.arange(300) + 0.5) / 150 - 1
        points = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
        cell = cell_of(partition, points).reshape(300, 300)
        edge = np.zeros(cell.shape, bool)
        edge[:-1] = cell[:-1] != cell[1:]
        edge[:, :-1] |= cell[:, :-1] != cell[:, 1:]
        ink = np.zeros((300, 300, 4))
        ink[edge] = (1.0, 0.0, 0.0, 1.0)
        axes.imshow(ink, origin="lower", extent=(-1, 1, -1, 1), interpolation="nearest")
    if partition == "arcs":
        axes.plot(np.cos(turn), np.sin(turn), color="black", linewidth=1.5)
    axes.set_xlim(-1.02, 1.02)
    axes.set_ylim(-1.02, 1.02)


def _draw_panel(
    axes: Any, groups: Mapping[str, Sequence[Mapping[str, Any]]], abscissa: str, quantity: str
) -> None:
    if abscissa == "code":
        # Full experts have no code: a level to compare with, not a point of the curves.
        every = [run for runs in groups.values() for run in runs]
        level = [_quantile(run[quantity], 0.5) for run in every if run["facts"]["code"] == 0]
        axes.axhline(level[0], color="0.3", linestyle="--", label="full experts, median")
        groups = {
            label: [run for run in runs if run["facts"]["code"]] for label, runs in groups.items()
        }
    every = [run for runs in groups.values() for run in runs]
    names = list(dict.fromkeys(_place(run["facts"], abscissa) for run in every))
    is_named = isinstance(names[0], str)
    if is_named:
        names.sort(key=lambda name: (*_SHAPE_ORDER, name).index(name))
    is_log = abscissa in ("D", "E", "k")
    for i, (label, runs) in enumerate(groups.items()):
        runs = [run for run in runs if quantity in run]
        if not runs:
            continue
        values = np.array(
            [[_quantile(run[quantity], q) for q in (0.5, 0.0, 1.0)] for run in runs]
        ).T
        shift = i - (len(groups) - 1) / 2
        if is_named:
            places = np.array([names.index(_place(run["facts"], abscissa)) for run in runs], float)
            places += 0.1 * shift
        else:
            places = np.array([run["facts"][abscissa] for run in runs], float)
            places = places * (1 + 0.02 * shift) if is_log else places + 0.06 * shift
        bars = np.abs(values[1:] - values[0])
        axes.errorbar(
            places, values[0], bars, label=label, color=f"C{i % 10}", capsize=2,
            marker=_MARKERS[i % len(_MARKERS)], markersize=5, linewidth=1.2,
            linestyle="none" if is_named or len(runs) == 1 else "-",
        )  # fmt: skip
    if is_named:
        axes.set_xticks(range(len(names)), [_WORDS.get(name, name) for name in names])
    else:
        if is_log:
            axes.set_xscale("log", base=2)
        axes.set_xticks(names, [str(name) for name in names])
        axes.minorticks_off()
    if quantity == "purity":
        axes.set_ylim(0, 1.05)
    elif quantity == "paths":
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    _draw_levels(axes, every, quantity)
    axes.set_xlabel(LABELS[abscissa])
    axes.set_ylabel(LABELS[quantity])
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def _draw_levels(axes: Any, runs: Sequence[Mapping[str, Any]], quantity: str) -> None:
    """Half the least jump on the panel of sup errors; all E^L paths on that of paths."""
    cells = sorted({run["facts"]["cells"] for run in runs if "cells" in run["facts"]})
    lines = []
    for num, style in zip(cells, ("--", ":", "-.", "-"), strict=False):
        if quantity == "hard_sup":
            level = next(run["floor"] for run in runs if run["facts"]["cells"] == num)
            label = f"half the least jump, {num} cells an axis"
        elif quantity == "paths":
            level = num**2
            label = f"pieces of the target, {num} cells an axis"
        else:
            return
        lines.append(axes.axhline(level, color="0.3", linestyle=style, label=label))
    if lines:
        axes.legend(handles=lines, fontsize=8)


def _place(facts: Mapping[str, Any], abscissa: str) -> Any:
    if abscissa != "shape":
        return facts[abscissa]
    cells, count = facts["cells"], facts["experts"]
    symbol = {cells: "E", 2 * cells: "2E", cells**2: "E²"}[count]
    return f"{facts['layers']} x {symbol}"


def _group_label(name: str, value: Any) -> str:
    if name == "shared":
        return f"shared expert of {value} neurons" if value else "no shared expert"
    if name == "weight":
        return f"reconstruction weight {value}"
    if name == "cells":
        return f"{value} cells an axis"
    return _WORDS.get(str(value), str(value).replace("_", " "))


def _quantile(values: Sequence[float | int], q: float) -> float:
    return float(np.quantile(values, q))
