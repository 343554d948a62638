"""Figures of the benchmark's results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

from benchmarks.product_of_t_cases import (  # noqa: E402
    SWEEP_DIMS,
    SWEEP_FAMILIES,
    SYNTHETIC_CASES,
)
from benchmarks.product_of_t_tables import METHODS, median  # noqa: E402
from moe_jax.product_of_t.posteriordb import POSTERIORS  # noqa: E402

_COLORS = {
    "ProductOfT": "black",
    "AutoNormal": "C0",
    "AutoMultivariateNormal": "C9",
    "GSM": "C2",
    "BaM": "C8",
    "Pathfinder": "C6",
    "MultiPathfinder": "C4",
    "AutoBNAFNormal": "C1",
    "AutoBNAFNormal x10": "C1",
    "AutoIAFNormal": "C3",
    "AutoIAFNormal x10": "C3",
    "NUTS": "0.6",
}
_SWEPT = [method for method in METHODS if not method.endswith("x10")]


def draw_figures(results: Mapping[str, Any], output: Path) -> None:
    """Draws what the results have the records for, beside the JSON file."""
    for family in SWEEP_FAMILIES:
        dims = [dim for dim in SWEEP_DIMS if f"{family}_{dim}" in results]
        if len(dims) > 1:
            path = output.with_name(f"{output.stem}_dims_{family}.png")
            _draw_sweep(results, family, dims, path)
    for title, names in (("synthetic", SYNTHETIC_CASES), ("posteriordb", POSTERIORS)):
        found = [name for name in names if name in results]
        if found:
            _draw_errors(results, found, output.with_name(f"{output.stem}_{title}.png"))
    if "convergence" in results:
        _draw_convergence(
            results["convergence"], output.with_name(f"{output.stem}_convergence.png")
        )


def _draw_sweep(results: Mapping[str, Any], family: str, dims: list[int], path: Path) -> None:
    """Error, scores, seconds and effective share of the draws against the dimension."""
    panels = {
        "sliced Wasserstein distance": "sliced_wasserstein",
        "scores of the target": "scores",
        "seconds, compiled": "seconds",
        "effective share of draws": "ess",
    }
    figure, grid = plt.subplots(2, 2, figsize=(10.0, 7.4), sharex=True, layout="constrained")
    for axes, (title, metric) in zip(grid.flat, panels.items(), strict=True):
        for method in _SWEPT:
            points = [(d, _value(results, f"{family}_{d}", method, metric)) for d in dims]
            points = [(d, value) for d, value in points if value is not None and value > 0]
            if not points:
                continue
            x, y = np.array(points).T
            y = y / 4000 if metric == "ess" else y
            width = 2.2 if method == "ProductOfT" else 1.2
            axes.plot(x, y, "o-", ms=3.5, lw=width, color=_COLORS[method], label=method)
        if metric == "sliced_wasserstein":
            floor = [results[f"{family}_{d}"]["floor"][metric] for d in dims]
            axes.plot(dims, floor, ":", color="0.4", label="exact draws again")
            figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(dims, [str(dim) for dim in dims])
        axes.minorticks_off()
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in grid[1]:
        axes.set_xlabel("dimension")
    figure.suptitle(f"{family}, medians over keys", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_errors(results: Mapping[str, Any], names: list[str], path: Path) -> None:
    """Sliced Wasserstein distance and k-hat of every method, one row a target."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 1.6 + 0.42 * len(names)), sharey=True, layout="constrained"
    )
    rows = np.arange(len(names))[::-1]
    for method in METHODS:
        marker = "D" if method == "ProductOfT" else "s" if method.endswith("x10") else "o"
        size = 60 if method == "ProductOfT" else 26
        for axes, metric in ((left, "sliced_wasserstein"), (right, "pareto_k")):
            values = [_value(results, name, method, metric) for name in names]
            shown = [(v, r) for v, r in zip(values, rows, strict=True) if v is not None]
            if not shown:
                continue
            x, y = np.array(shown).T
            # k-hat has no upper limit; what is beyond the panel sits on its edge.
            x = np.clip(x, -0.3, 2.0) if metric == "pareto_k" else x
            front = 3 if method == "ProductOfT" else 2
            axes.scatter(
                x, y, s=size, marker=marker, color=_COLORS[method], label=method, zorder=front,
                alpha=0.85, linewidths=0,
            )  # fmt: skip
    floors = [results[name]["floor"]["sliced_wasserstein"] for name in names]
    left.scatter(floors, rows, marker="|", s=120, color="0.3", label="reference again")
    left.set_xscale("log")
    # Labels of their own: those of a logarithmic axis overlap within a decade.
    low, high = left.get_xlim()
    ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if low <= t <= high]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.set_xlabel("sliced Wasserstein distance\n(reference standard deviations)")
    right.axvline(0.7, color="0.4", ls=":")
    right.set_xlabel("k-hat\n(dotted: 0.7; beyond 2 drawn at 2)")
    left.set_yticks(rows, names)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_convergence(record: Mapping[str, Any], path: Path) -> None:
    """Error of the exponents against iterations, in and outside the family."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    for color, (rate, found) in zip("C0 C1 C2".split(), record["in_family"].items(), strict=True):
        factor = np.median(found["rates"])
        for index, errors in enumerate(found["errors"]):
            label = f"eta = {rate}: factor {factor:.3f} an iteration" if index == 0 else None
            left.semilogy(np.maximum(errors, 1e-16), color=color, label=label)
    left.set_title("target is a product of the experts", fontsize=10)
    for color, (batch, found) in zip("C0 C1 C2".split(), record["outside"].items(), strict=True):
        for index, errors in enumerate(found["errors"]):
            label = f"batch {batch}: floor {found['floor']:.3f}" if index == 0 else None
            right.semilogy(errors, color=color, label=label, lw=1.0)
    right.set_title("target outside the family, eta = 10", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("iteration")
        axes.set_ylabel("|exponents - limit|")
        axes.legend(fontsize=9)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _value(results: Mapping[str, Any], name: str, method: str, metric: str) -> float | None:
    runs = results[name]["methods"].get(method)
    return median(runs, metric) if runs else None
