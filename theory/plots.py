"""Table and figure of a learned experiment, from its results file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

# What each experiment shows: abscissa, what tells the curves apart, the panels' quantities.
SHAPES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "dimension": ("D", ("manifold", "weighting"), ("mse", "hard_mse")),
    "experts": ("E", ("weighting",), ("mse", "hard_mse")),
    "gates": ("gate", ("partition", "weighting"), ("purity", "hard_mse")),
    "depth": ("experts", ("layers", "matched"), ("hard_mse", "hard_sup")),
    "encoders": ("code", ("weight",), ("hard_mse", "hard_sup")),
    "sharing": ("k", ("shared",), ("mse", "sup")),
}
LABELS = {
    "D": "ambient dimension D",
    "E": "experts E, each of the same width",
    "code": "code dimension d' of the experts",
    "k": "experts selected k, each of width m / k",
    "experts": "experts a layer",
    "gate": "gate",
    "mse": "mean squared error / variance, as trained",
    "hard_mse": "mean squared error / variance, top-1",
    "sup": "largest error / standard deviation",
    "hard_sup": "largest error / standard deviation, top-1",
    "purity": "purity of the gate's cells",
}
_COLUMNS = (
    "mse", "hard_mse", "hard_sup", "purity", "adjusted_rand", "tie_mass", "paths", "unseen_mass",
    "experts_used", "start_mse",
)  # fmt: skip


def write_table(results: Mapping[str, Any], path: Path) -> str:
    """Writes and returns a Markdown table: medians over seeds, with least and largest."""
    runs = results["runs"]
    columns = [name for name in _COLUMNS if any(name in run for run in runs.values())]
    head = ["run", "active", "total", *columns]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for name, run in runs.items():
        cells = [_spread(run[column]) if column in run else "" for column in columns]
        facts = run["facts"]
        lines.append(" | ".join([name, str(facts["active"]), str(facts["total"]), *cells]))
    text = "\n".join(f"| {line} |" for line in lines) + "\n"
    path.write_text(text)
    return text


def draw_experiment(results: Mapping[str, Any], path: Path) -> None:
    """Draws medians over seeds with bars from the least to the largest, a panel a quantity."""
    abscissa, grouping, quantities = SHAPES[results["config"]["experiment"]]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in results["runs"].values():
        facts = run["facts"]
        label = ", ".join(_group_label(name, facts[name]) for name in grouping)
        groups.setdefault(label, []).append(run)
    figure, panels = plt.subplots(
        1, len(quantities), figsize=(5.2 * len(quantities), 4.4), layout="constrained"
    )
    for axes, quantity in zip(panels, quantities, strict=True):
        _draw_panel(axes, groups, abscissa, quantity)
    num_seeds = results["config"]["train"]["num_seeds"]
    figure.suptitle(f"medians of {num_seeds} seeds; bars from the least to the largest", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
    names = list(dict.fromkeys(r["facts"][abscissa] for runs in groups.values() for r in runs))
    is_named = isinstance(names[0], str)
    is_log = abscissa in ("D", "E", "k")
    for i, (label, runs) in enumerate(groups.items()):
        runs = [run for run in runs if quantity in run]
        if not runs:
            continue
        values = np.array(
            [[_quantile(run[quantity], q) for q in (0.5, 0.0, 1.0)] for run in runs]
        ).T
        if is_named:
            places = np.array([names.index(run["facts"][abscissa]) for run in runs], float)
            places += 0.12 * (i - (len(groups) - 1) / 2)
        else:
            places = np.array([run["facts"][abscissa] for run in runs], float)
            shift = i - (len(groups) - 1) / 2
            places = places * (1 + 0.02 * shift) if is_log else places + 0.12 * shift
        bars = np.abs(values[1:] - values[0])
        axes.errorbar(
            places, values[0], bars, label=label, color=f"C{i % 10}", capsize=2,
            marker="os^Dv<>P"[i % 8], markersize=5, linewidth=1.2,
            linestyle="none" if is_named or len(runs) == 1 else "-",
        )  # fmt: skip
    if is_named:
        axes.set_xticks(range(len(names)), [str(name).replace("_", "\n") for name in names])
    elif is_log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(names, [str(name) for name in names])
    else:
        axes.set_xticks(names, [str(name) for name in names])
    if quantity == "purity":
        axes.set_ylim(0, 1.05)
    else:
        axes.set_yscale("log")
    floors = {run["floor"] for runs in groups.values() for run in runs if "floor" in run}
    if quantity == "hard_sup" and floors:
        axes.axhline(
            min(floors),
            color="0.3",
            linestyle="--",
            label="half the least jump: least for fewer than E^L affine cells",
        )
        axes.legend(handles=axes.get_lines()[-1:], fontsize=8)
    axes.set_xlabel(LABELS[abscissa])
    axes.set_ylabel(LABELS[quantity])
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def _group_label(name: str, value: Any) -> str:
    if name == "shared":
        return "with a shared expert" if value else "no shared expert"
    if name == "weight":
        return f"reconstruction weight {value}"
    if name == "layers":
        return f"{value} layer{'s' if value > 1 else ''}"
    if name == "matched":
        return "E experts each" if value == "reference" else f"same {value} parameters"
    return str(value).replace("_", " ")


def _quantile(values: Sequence[float | int], q: float) -> float:
    return float(np.quantile(values, q))


def _spread(values: Sequence[float | int]) -> str:
    low, middle, high = (f"{_quantile(values, q):.3g}" for q in (0.0, 0.5, 1.0))
    return middle if low == high else f"{middle} [{low}, {high}]"
