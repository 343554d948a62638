"""Figures of a training run, drawn from its metrics."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float, Int

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.ticker import MaxNLocator  # noqa: E402

MAX_COLUMNS = 4
MAX_RECORDS = 300
MAX_WINDOWS = 40


def plot_loss(
    records: Sequence[Mapping[str, Any]],
    path: Path,
    references: Mapping[str, float] | None = None,
) -> None:
    """Bits per byte against steps: training, held-out, and horizontal lines for references.

    Training is drawn as means over up to 40 windows, and every record pale behind them. The
    vertical axis fits what follows the first tenth of the run, whose steep fall would flatten the
    rest.
    """
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    curves = {kind: _curve(records, kind) for kind in ("train", "eval")}
    steps, values = curves["train"]
    if len(steps) > MAX_WINDOWS:
        axes.plot(steps, values, color="C0", alpha=0.25, linewidth=0.8)
        width = -(-len(steps) // MAX_WINDOWS)
        steps, values = _window_means(steps, width), _window_means(values, width)
    if len(steps):
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, values, label="training", marker=marker, markersize=4, color="C0")
    steps, values = curves["eval"]
    if len(steps):
        axes.plot(steps, values, label="held out", marker="o", markersize=4, color="C1")
    styles = itertools.cycle(("--", ":", "-.", (0, (1, 4))))
    for style, (name, value) in zip(styles, (references or {}).items(), strict=False):
        label = f"{name}: {value:.2f}"
        axes.axhline(value, color="0.3", linestyle=style, linewidth=1.2, label=label, zorder=1)
    steps, values = (np.concatenate(parts) for parts in zip(*curves.values(), strict=True))
    is_shown = np.isfinite(values) & (steps >= 0.1 * np.max(steps, initial=0))
    if is_shown.any():
        shown = np.concatenate([values[is_shown], list((references or {}).values())])
        margin = 0.05 * max(np.ptp(shown), 0.1)
        axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.set_title(_last_step(records), loc="right", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_expert_load(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Load of every expert over its layer's mean, one panel a sparse layer, over the steps.

    Grey where a load is not a number.

    Returns:
        Whether a figure was drawn; False for a run without sparse layers.
    """
    loads = [
        (record["step"], np.asarray(record["load"], np.float64))
        for record in records
        if record["kind"] == "train" and record.get("load") is not None
    ]
    if not loads:
        return False
    steps, load = _thinned([step for step, _ in loads], [value for _, value in loads])
    # A record's load is the mean over the steps since the record before it.
    edges = np.concatenate([[0], steps])
    num_layers, num_experts = load.shape[1:]
    rows = -(-num_layers // MAX_COLUMNS)
    columns = -(-num_layers // rows)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(1.6 + 2.6 * columns, 0.9 + 2.1 * rows),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for layer, axes in enumerate(grid.flat):
        if layer >= num_layers:
            axes.set_visible(False)
            continue
        image = axes.pcolormesh(
            edges,
            np.arange(num_experts + 1) - 0.5,
            num_experts * load[:, layer].T,
            vmin=0.0,
            vmax=2.0,
            cmap="RdBu_r",
            rasterized=True,
        )
        axes.set_facecolor("0.6")
        axes.set_title(f"sparse layer {layer}", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        if layer % columns == 0:
            axes.set_ylabel("expert")
        if layer + columns >= num_layers:
            axes.set_xlabel("step")
            axes.tick_params(labelbottom=True)
    figure.suptitle(_last_step(records), x=0.99, ha="right", fontsize=10)
    figure.colorbar(
        image,
        ax=grid,
        label="load / mean load (1: balanced)",
        ticks=(0.0, 0.5, 1.0, 1.5, 2.0),
        extend="max",
        aspect=15 * rows,
        pad=0.02,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _curve(records: Sequence[Mapping[str, Any]], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and bits per byte of the records of one kind that have them."""
    points = [
        (record["step"], record["bits_per_byte"])
        for record in records
        if record["kind"] == kind and record.get("bits_per_byte") is not None
    ]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _window_means(values: np.ndarray, width: int) -> np.ndarray:
    """Means of `width` neighbours each; the last window may be shorter."""
    first = np.arange(0, len(values), width)
    return np.add.reduceat(values, first) / np.diff(first, append=len(values))


def _last_step(records: Sequence[Mapping[str, Any]]) -> str:
    return f"at step {max((record['step'] for record in records), default=0)}"


def _thinned(
    steps: Sequence[int], loads: Sequence[np.ndarray]
) -> tuple[Int[np.ndarray, " records"], Float[np.ndarray, "records layers experts"]]:
    """Means over neighbouring records, so that no column of the figure is thinner than a pixel."""
    first = np.unique(np.linspace(0, len(steps), MAX_RECORDS, endpoint=False).astype(int))
    sizes = np.diff(first, append=len(steps))
    load = np.add.reduceat(np.stack(loads), first) / sizes[:, None, None]
    return np.array(steps)[first + sizes - 1], load
