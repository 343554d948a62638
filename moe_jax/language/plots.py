"""Figures of a training run, drawn from its metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)


def plot_loss(
    records: Sequence[Mapping[str, Any]],
    path: Path,
    references: Mapping[str, float] | None = None,
) -> None:
    """Bits per byte against steps: training, held-out, and horizontal lines for references."""
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    for kind, style in (("train", {"color": "C0", "alpha": 0.8}), ("eval", {"color": "C1"})):
        points = [
            (record["step"], record["bits_per_byte"])
            for record in records
            if record["kind"] == kind and record.get("bits_per_byte") is not None
        ]
        if points:
            label = {"train": "training", "eval": "held out"}[kind]
            marker = "o" if kind == "eval" or len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, ms=4, **style)
    for color, (name, value) in zip(("0.35", "0.55", "0.7"), (references or {}).items()):
        axes.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{name}: {value:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_expert_load(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Load of every expert over its layer's mean, one panel a sparse layer, over the steps.

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
    steps = np.array([step for step, _ in loads])
    load = np.stack([value for _, value in loads])
    relative = load * load.shape[-1]
    num_layers, num_experts = load.shape[1:]
    columns = min(num_layers, 4)
    rows = -(-num_layers // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 2.6 * columns, 0.9 + 2.1 * rows),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    edges = np.concatenate([[steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)], steps])
    for layer, axes in enumerate(grid.flat):
        if layer >= num_layers:
            axes.set_visible(False)
            continue
        image = axes.pcolormesh(
            edges,
            np.arange(num_experts + 1) - 0.5,
            relative[:, layer].T,
            vmin=0.0,
            vmax=2.0,
            cmap="RdBu_r",
            rasterized=True,
        )
        axes.set_title(f"sparse layer {layer}", fontsize=10)
        axes.yaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("expert", fontsize=10)
    figure.colorbar(image, ax=grid, label="load / mean load", extend="max")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
