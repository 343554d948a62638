"""Figures of a fit: densities, the trace of the divergence, and the experts with their weights."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Float

from moe_jax.product_of_t.diagnostics import History
from moe_jax.product_of_t.experts import Experts

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import Normalize  # noqa: E402
from matplotlib.patches import Ellipse  # noqa: E402

GRID = 140
# Below the largest log density: at these a Gaussian has radii of 1 to 4 standard deviations.
DROPS = (0.5, 2.0, 4.5, 8.0)
MAX_MARGINALS = 12
MAX_DRAWN_EXPERTS = 20
# Where an expert's D is twice its least, drawn as an ellipse; for a t with few degrees of freedom
# about its half-height.
_LEVEL = 1.0

LogDensity = Callable[[Any], Any]


def plot_contours(
    log_densities: Mapping[str, LogDensity],
    draws: Float[np.ndarray, "draws 2"],
    path: Path,
) -> None:
    """Contours of densities on the plane, one panel each, the first one's grey in all of them.

    Args:
        log_densities: log density up to a constant, z [2] -> scalar, by title. First the target.
        draws: their central 99% in each coordinate sets the axes.
        path: file to write.
    """
    limits = _limits(draws)
    axis = [np.linspace(low, high, GRID) for low, high in limits]
    grid = np.stack(np.meshgrid(*axis), axis=-1).reshape(-1, 2)
    levels = [-drop for drop in reversed(DROPS)]
    figure, row = plt.subplots(
        1,
        len(log_densities),
        figsize=(0.4 + 3.6 * len(log_densities), 3.7),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    first: np.ndarray | None = None
    for axes, (title, log_density) in zip(row.flat, log_densities.items(), strict=True):
        values = _evaluate(log_density, grid).reshape(GRID, GRID)
        values = values - values.max()
        if first is None:
            first = values
            axes.contourf(*axis, values, levels=[*levels, 0.0], cmap="Greys", extend="neither")
        else:
            # Matplotlib dashes what is negative, as all levels are.
            style: dict[str, Any] = {"levels": levels, "linestyles": "solid"}
            axes.contour(*axis, first, colors="0.6", linewidths=0.8, **style)
            axes.contour(*axis, values, colors="C3", linewidths=1.3, **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("$z_1$")
    row[0, 0].set_ylabel("$z_2$")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_marginals(
    draws: Mapping[str, Float[np.ndarray, "draws dim"]],
    names: Sequence[str],
    path: Path,
) -> None:
    """Marginal densities of up to 12 coordinates, as histograms; the first set of draws filled.

    Args:
        draws: draws by label; first the reference if there is one.
        names: name of each coordinate.
        path: file to write.
    """
    first = next(iter(draws.values()))
    shown = min(first.shape[1], MAX_MARGINALS)
    columns = min(shown, 4)
    rows = -(-shown // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(0.6 + 2.6 * columns, 0.7 + 2.0 * rows),
        squeeze=False,
        layout="constrained",
    )
    for index, axes in enumerate(grid.flat):
        if index >= shown:
            axes.set_visible(False)
            continue
        low, high = _limits(first[:, index : index + 1])[0]
        bins = np.linspace(low, high, 50)
        for style, (label, values) in enumerate(draws.items()):
            heights, _ = np.histogram(values[:, index], bins)
            heights = heights / (len(values) * (bins[1] - bins[0]))
            if style == 0:
                axes.stairs(heights, bins, fill=True, color="0.8", label=label)
            else:
                line = ("-", "--", ":")[(style - 1) % 3]
                axes.stairs(heights, bins, color=f"C{(2 + style) % 10}", ls=line, label=label)
        axes.set_title(names[index], fontsize=9)
        axes.set_yticks([])
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    if shown < first.shape[1]:
        figure.suptitle(f"first {shown} of {first.shape[1]} coordinates", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_history(history: History, path: Path) -> None:
    """Fisher divergence, active experts and k-hat of the batches against scores taken."""
    scores = np.asarray(history.score_evaluations) / 1000
    panels = (
        ("weighted Fisher divergence", history.fisher_divergence, "log"),
        ("active experts", history.num_active, "linear"),
        ("k-hat of the batch", history.pareto_k, "linear"),
    )
    figure, row = plt.subplots(1, 3, figsize=(11.0, 3.3), layout="constrained")
    starts = scores[1:][np.diff(np.asarray(history.round)) > 0]
    for axes, (title, values, scale) in zip(row, panels, strict=True):
        axes.plot(scores, values, color="C0", lw=1.2)
        for start in starts:
            axes.axvline(start, color="0.6", ls=":", lw=1.0)
        if np.any(np.asarray(values) > 0):
            axes.set_yscale(scale)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("thousand scores of the target")
        axes.grid(alpha=0.3)
    row[2].axhline(0.7, color="C3", ls="--", lw=1.0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_experts(
    experts: Experts,
    exponents: Float[np.ndarray, " experts"],
    draws: Float[np.ndarray, "draws dim"],
    names: Sequence[str],
    path: Path,
) -> None:
    """The 20 experts of the largest exponents, in the first two coordinates, and all exponents.

    A positive definite expert is the ellipse on which D_k = 2, projected; one in a single direction
    of the plane is the line on which D_k = 1.

    Raises:
        ValueError: in one dimension, which has no plane.
    """
    if draws.shape[1] < 2:
        raise ValueError("draws [draws 1]: experts are drawn in the plane of two coordinates")
    exponents = np.asarray(exponents)
    num_full = experts.full_loc.shape[0]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.0, 4.3), layout="constrained", width_ratios=(1.15, 1.0)
    )
    left.plot(*draws[:1500, :2].T, ".", ms=1.5, color="0.75", zorder=0)
    active = np.flatnonzero(exponents > 1e-6 * exponents.sum())
    largest = active[np.argsort(-exponents[active])][:MAX_DRAWN_EXPERTS]
    color_of = plt.get_cmap("viridis_r")
    scale = Normalize(0.0, exponents.max())
    # The largest on top.
    for index in largest[::-1]:
        color = color_of(scale(exponents[index]))
        if index < num_full:
            covariance = np.linalg.inv(np.asarray(experts.full_precision[index]))[:2, :2]
            _draw_ellipse(left, np.asarray(experts.full_loc[index])[:2], covariance, color)
        else:
            factored = index - num_full
            factor = np.asarray(experts.factored_factor[factored])
            has_diagonal = np.any(np.asarray(experts.factored_diagonal[factored]) > 0)
            is_line = factor.shape[1] == 1 and not has_diagonal and not np.any(factor[2:])
            if is_line:
                loc = np.asarray(experts.factored_loc[factored])[:2]
                _draw_line(left, loc, factor[:2, 0], color)
    (x_low, x_high), (y_low, y_high) = _limits(draws[:, :2])
    left.set_xlim(x_low, x_high)
    left.set_ylim(y_low, y_high)
    left.set_xlabel(names[0])
    left.set_ylabel(names[1])
    left.set_title(f"{len(largest)} largest of {len(active)} active experts", fontsize=10)
    mappable = plt.cm.ScalarMappable(scale, color_of)
    figure.colorbar(mappable, ax=left, label="exponent")
    order = active[np.argsort(-exponents[active])]
    kinds = np.where(order < num_full, "C0", "C1")
    right.bar(np.arange(len(order)), exponents[order], color=list(kinds), width=1.0)
    right.bar([0], [0], color="C0", label="positive definite")
    if np.any(order >= num_full):
        right.bar([0], [0], color="C1", label="diagonal or low rank")
    right.set_yscale("log")
    right.set_ylim(max(exponents[order].min(), 1e-4 * exponents.max()) / 2, None)
    right.set_xlabel("active experts, by exponent")
    right.set_title(f"exponents, {exponents.sum():.3g} in all", fontsize=10)
    right.legend(fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_ellipse(axes: Axes, loc: np.ndarray, covariance: np.ndarray, color: Any) -> None:
    values, vectors = np.linalg.eigh(covariance)
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    width, height = 2.0 * np.sqrt(_LEVEL * values[::-1])
    axes.add_patch(
        Ellipse((loc[0], loc[1]), width, height, angle=angle, fill=False, color=color, lw=1.1)
    )
    axes.plot(*loc, ".", ms=4, color=color)


def _draw_line(axes: Axes, loc: np.ndarray, normal: np.ndarray, color: Any) -> None:
    direction = np.array([-normal[1], normal[0]])
    if np.any(direction):
        end = loc + direction
        axes.axline((loc[0], loc[1]), (end[0], end[1]), color=color, lw=0.9, ls="--")


def _limits(draws: np.ndarray) -> list[tuple[float, float]]:
    """The central 99% of each coordinate, and a quarter more on either side."""
    low, high = np.quantile(draws, [0.005, 0.995], axis=0)
    margin = 0.25 * np.maximum(high - low, 1e-12)
    return list(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))


def _evaluate(log_density: LogDensity, points: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        values = np.asarray(jax.jit(jax.vmap(log_density))(jnp.asarray(points)))
    return np.where(np.isfinite(values), values, -1e300)
