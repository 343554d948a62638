"""Figures of a fitted model: reconstruction, latent phase portrait, spectrum."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

MAX_CHANNELS = 3


class Portrait(NamedTuple):
    """What the figure shows of one model on one set of rows.

    Attributes:
        times: [times], the grid.
        truth, predicted: [rows, times, channels].
        given_times: one array of context times for each row.
        given_values: the observations there, [times, channels] each.
        latent: [rows, times, d], on the grid.
        gate: [rows, times], weight of the first expert at the nearest anchor before.
        spectrum: complex[experts, planes], per unit of time.
        acting: complex, the generators' eigenvalues at the anchors; empty if there is no one.
    """

    times: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray
    given_times: Sequence[np.ndarray]
    given_values: Sequence[np.ndarray]
    latent: np.ndarray
    gate: np.ndarray
    spectrum: np.ndarray
    acting: np.ndarray


def plot_portrait(portrait: Portrait, path: Path, *, row: int = 0, unit: str = "time") -> None:
    """Draws one row's reconstruction above, the phase portrait and the spectrum below."""
    channels = min(portrait.truth.shape[-1], MAX_CHANNELS)
    figure = plt.figure(figsize=(9.0, 1.7 * channels + 3.8), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.7 * channels, 3.8])
    above, below = parts
    grid = above.subplots(channels, 1, sharex=True, squeeze=False)[:, 0]
    for channel, axes in enumerate(grid):
        _draw_channel(axes, portrait, row, channel)
    grid[-1].set_xlabel(unit)
    handles, labels = grid[0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=9)
    phase, plane = below.subplots(1, 2)
    _draw_phase(phase, portrait)
    _draw_spectrum(plane, portrait, unit)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_channel(axes: Axes, portrait: Portrait, row: int, channel: int) -> None:
    times, given = portrait.times, portrait.given_times[row]
    last = given[-1]
    axes.axvspan(times[0], last, color="C2", alpha=0.10, label="interpolation", linewidth=0)
    axes.axvspan(last, times[-1], color="C1", alpha=0.12, label="extrapolation", linewidth=0)
    axes.plot(times, portrait.truth[row, :, channel], color="0.45", linewidth=2.2, label="truth")
    axes.plot(times, portrait.predicted[row, :, channel], color="C0", linewidth=1.3, label="model")
    values = portrait.given_values[row][:, channel]
    axes.plot(given, values, "o", color="k", markersize=3.5, label="observed")
    axes.set_ylabel(f"channel {channel}")
    axes.margins(x=0)
    shown = portrait.truth[row, :, channel]
    margin = 0.25 * max(float(np.ptp(shown)), 1e-6)
    axes.set_ylim(shown.min() - margin, shown.max() + margin)


def _draw_phase(axes: Axes, portrait: Portrait) -> None:
    latent = portrait.latent
    if latent.shape[-1] < 2:
        latent = np.concatenate([latent, np.zeros_like(latent)], axis=-1)
    x, y = latent[..., :2].reshape(-1, 2).T
    image = axes.scatter(x, y, c=portrait.gate.ravel(), s=3, cmap="viridis", linewidths=0)
    axes.figure.colorbar(image, ax=axes, label="weight of expert 0")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("latent 0")
    axes.set_ylabel("latent 1")
    axes.set_title("latent phase portrait", fontsize=10)


def _draw_spectrum(axes: Axes, portrait: Portrait, unit: str) -> None:
    axes.axvline(0.0, color="0.6", linewidth=0.8)
    acting = np.asarray(portrait.acting).ravel()
    axes.plot(acting.real, np.abs(acting.imag), ".", color="C1", alpha=0.25, label="at anchors")
    for index, values in enumerate(portrait.spectrum):
        axes.plot(values.real, np.abs(values.imag), "o", color="C0", markersize=6)
        for value in values:
            at = (value.real, abs(value.imag))
            axes.annotate(str(index), at, xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.plot([], [], "o", color="C0", label="experts")
    axes.set_xlabel(rf"$\sigma$ per unit of {unit}")
    axes.set_ylabel(rf"$|\omega|$, rad per unit of {unit}")
    axes.set_title("spectrum", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.legend(fontsize=8)
