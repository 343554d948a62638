"""Figure of a rate study: errors against sample size, with every slope that has been claimed."""

from pathlib import Path

import matplotlib
import numpy as np

from moe_jax.contaminated.rates import RateStudy, SlopeTable, mean_errors

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

ROW_TITLES = {
    "beta": r"gate slope $\|\hat\beta-\beta^*\|$",
    "exp_tau": r"gate intercept $|e^{\hat\tau}-e^{\tau^*}|$",
    "eta": r"expert $\|\hat\eta-\eta^*\|$",
    "nu": r"variance $|\hat\nu-\nu^*|$",
}


def plot_rates(study: RateStudy, slopes: SlopeTable, path: Path) -> None:
    """Log-log panels of mean error against n, one a row of the study.

    Points are means over replicates with bootstrap intervals; the solid grey line is the mean error
    of a Gaussian with the Cramer-Rao covariance. The fitted line is ours; the slopes of theory and
    paper, which come without a constant, are drawn through the middle of ours. The legend gives
    every slope as a number, ours with its interval.
    """
    sizes = np.asarray(study.sizes, np.float64)
    columns = min(2, len(study.rows))
    num_lines = -(-len(study.rows) // columns)
    figure, grid = plt.subplots(
        num_lines,
        columns,
        figsize=(5.6 * columns, 0.7 + 4.0 * num_lines),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    means = mean_errors(study)
    center = np.exp(np.mean(np.log(sizes)))
    for index, (row, axes) in enumerate(zip(study.rows, grid.flat, strict=False)):
        mean, low, high = means.mean[:, index], means.low[:, index], means.high[:, index]
        ours = slopes.ours[row]
        fitted = np.exp(np.mean(np.log(mean))) * (sizes / center) ** ours.slope
        axes.plot(
            sizes,
            study.bound_mean[:, index],
            color="0.55",
            linewidth=2.5,
            label=f"Cramér–Rao {slopes.bound[row]:.3f}",
            zorder=1,
        )
        axes.errorbar(
            sizes,
            mean,
            yerr=np.stack([mean - low, high - mean]),
            fmt="o",
            color="C0",
            markersize=4.5,
            capsize=3,
            zorder=4,
        )
        label = f"ours {ours.slope:.3f} [{ours.low:.3f}, {ours.high:.3f}]"
        axes.plot(sizes, fitted, color="C0", linewidth=1.2, label=label, zorder=3)
        for name, style, color in (("theory", "--", "C2"), ("paper", ":", "C3")):
            claimed = getattr(slopes, name).get(row)
            if claimed is None:
                continue
            line = np.exp(np.mean(np.log(mean))) * (sizes / center) ** claimed
            label = f"{name} {claimed:.3g}"
            axes.plot(sizes, line, style, color=color, linewidth=1.8, label=label, zorder=2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.set_title(ROW_TITLES.get(row, row), fontsize=11)
        axes.grid(alpha=0.3, which="major")
        axes.legend(fontsize=9, title="slope of log error on log n", title_fontsize=8)
        if index % columns == 0:
            axes.set_ylabel("mean error")
        if index + columns >= len(study.rows):
            axes.set_xlabel("n")
    for axes in grid.flat[len(study.rows) :]:
        axes.set_visible(False)
    count = study.errors.shape[1]
    figure.suptitle(f"{study.design}: {study.title}; {count} replicates", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
