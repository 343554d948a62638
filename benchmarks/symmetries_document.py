"""Writes the measured figures of latent mixtures of symmetries into docs/symmetries.md.

python -m benchmarks.symmetries_document

Tables and figure are made of benchmarks/results/symmetries.json alone; a test compares.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

from benchmarks.doc_tables import markdown_table, write_tables  # noqa: E402
from benchmarks.symmetries_tables import (  # noqa: E402
    BARS,
    BY_VALIDATION,
    CHOSEN,
    KINDS,
    recovery_verdicts,
    summarize,
    verdicts,
)

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "symmetries.md"
RESULTS = ROOT / "benchmarks" / "results" / "symmetries.json"
FIGURE = ROOT / "benchmarks" / "results" / "symmetries_sample_efficiency.png"
NAMES = {
    "pendulum": "pendulum",
    "lotka_volterra": "Lotka-Volterra",
    "swing_wscc9": "9-bus grid",
    "demand": "demand",
    "carbon_dioxide": "carbon dioxide",
    "damped_pendulum": "damped pendulum",
    "double_pendulum_large": "double pendulum",
    "lorenz": "Lorenz",
}
GROUPS = {
    "accuracy": ("pendulum", "lotka_volterra", "swing_wscc9"),
    "real": ("demand", "carbon_dioxide"),
    "chaotic": ("damped_pendulum", "double_pendulum_large", "lorenz"),
}
SPEED = "latent mixture of symmetries"


@functools.cache
def load() -> dict[str, Any]:
    """The recorded figures."""
    return json.loads(RESULTS.read_text())["figures"]


def tables() -> dict[str, str]:
    """Every table of the document by its name."""
    found = {name: errors_of(systems) for name, systems in GROUPS.items()}
    return found | {
        "verdicts": bars(),
        "recovery": recovery(),
        "sample_efficiency": sample_efficiency(),
        "speed": speed(),
        "cost": cost(),
    }


def errors_of(systems: Sequence[str]) -> str:
    """Interpolation / extrapolation of every model on some systems, medians over seeds."""
    summaries = [summarize(load(), system, 64) for system in systems]
    most = max(row["seeds"] for summary in summaries for row in summary.values())
    names = {
        name
        for summary in summaries
        for name, row in summary.items()
        if row["seeds"] == most or BY_VALIDATION not in name
    }
    rows = [
        [name, *(_errors(summary[name], most) if name in summary else "" for summary in summaries)]
        for name in sorted(names, key=lambda name: (*_rank(name), name))
    ]
    return markdown_table(
        ["interpolation / extrapolation", *(NAMES[system] for system in systems)], rows
    )


def bars() -> str:
    """What is required of accuracy and recovery, and whether it was met."""
    lines = []
    for system in BARS:
        lines += verdicts(system, summarize(load(), system, 64))
    lines += recovery_verdicts(load())
    rows = [line.partition(": ")[::2] for line in lines]
    return markdown_table(["", "measured, and required"], rows)


def recovery() -> str:
    """Frequencies and growths of the recovered generators, medians over seeds."""
    runs = [record for key, record in load().items() if key.startswith("recovery/")]
    rows = []
    for name in runs[0]:
        omega, sigma, error, angle = (
            np.median([run[name][key] for run in runs])
            for key in ("omega", "sigma", "relative_error", "canonical_angle")
        )
        rows.append([name, f"{omega:.4f}", f"{error:.3%}", f"{sigma:.4f}", f"{angle:.0e}"])
    head = ["observed map", "frequency (1.3)", "off by", "growth (-damping)", "canonical angle"]
    return markdown_table(head, rows)


def sample_efficiency() -> str:
    """Errors on the pendulum by the number of training trajectories, first seed."""
    curves = _curves()
    sizes = sorted({size for curve in curves.values() for size in curve})
    rows = [
        [name, *(_errors(curve[size]) if size in curve else "" for size in sizes)]
        for name, curve in curves.items()
    ]
    return markdown_table(["interpolation / extrapolation", *map(str, sizes)], rows)


def speed() -> str:
    """Training steps a processor second, medians of rounds, and the mixture's multiple of them."""
    rates = {
        name: np.median(record["steps_per_processor_second"])
        for name, record in load()["speed"].items()
    }
    rows = []
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        ours = rates[f"{SPEED}, {name.rsplit(', ', 1)[1]}"]
        rows.append([name, f"{rate:.0f}", f"{ours / rate:.1f}"])
    return markdown_table(["model", "steps a second", "mixture of that width, times"], rows)


def cost() -> str:
    """Processor minutes of the default command's fits by kind of model, and of one fit."""
    from benchmarks.symmetries import _ALL, FIRST_SEED, jobs

    seconds: dict[str, list[float]] = {}
    for job in jobs(_ALL, range(FIRST_SEED, FIRST_SEED + 3), 1000, 1, full=False):
        if job.model == "untrained":
            continue
        record = load()[job.key]
        cases = record.values() if job.model == "recovery" else [record]
        used = sum(case["processor_seconds"] for case in cases)
        seconds.setdefault(job.model.rsplit(", d = ", 1)[0], []).append(used)
    rows, total = [], 0.0
    for name, used in seconds.items():
        minutes = sum(used) / 60
        total += minutes
        rows.append([name, str(len(used)), f"{np.median(used):.0f}", f"{minutes:.1f}"])
    rows.append(["all", str(sum(map(len, seconds.values()))), "", f"{total:.1f}"])
    return markdown_table(["fits", "number", "seconds of one", "minutes of all"], rows)


def draw(path: Path) -> None:
    """The curves of `sample_efficiency`."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharex=True, layout="constrained")
    styles = {
        "algebra, d = 2": "C0-",
        "algebra, d = 4": "C0--",
        "output, d = 2": "C1-",
        "one expert, d = 2": "C2-",
        "anchored neural ODE, d = 8": "C3-",
        "cubic spline, then persistence": "C4:",
        "linear interpolation, then persistence": "C5:",
        "persistence": "C7:",
        "training mean": "k:",
    }
    for name, curve in _curves().items():
        for axis, kind in zip(axes, KINDS, strict=True):
            values = [row[kind] for row in curve.values()]
            axis.loglog(list(curve), values, styles.get(name, "C8-."), marker="o", ms=4, label=name)
    for axis, kind in zip(axes, KINDS, strict=True):
        sizes = sorted({size for curve in _curves().values() for size in curve})
        axis.set_xticks(sizes, map(str, sizes))
        axis.minorticks_off()
        axis.set_xlabel("training trajectories")
        axis.set_ylabel("squared error, in variances")
        axis.set_title(f"pendulum, {kind}")
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _curves() -> dict[str, dict[int, dict[str, Any]]]:
    """By model and size, the figures of the first seed; models of one size alone are left out."""
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    for key, record in load().items():
        parts = key.split("/")
        if parts[0] == "pendulum" and parts[2:3] == ["10"]:
            curves.setdefault(parts[3], {})[int(parts[1])] = record
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    curves = {name: curves[name] for name in sorted(curves, key=_rank)}
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _rank(name: str) -> tuple[int, int]:
    kinds = (CHOSEN, "algebra", "output", "one", "anchored", "Latent", "ODE", "linear l")
    places = [place for place, kind in enumerate(kinds) if name.startswith(kind)]
    width = int(name.rsplit(" ", 1)[1]) if ", d = " in name else 0
    return (places[0] if places else len(kinds), width)


def _errors(row: dict[str, Any], seeds: int = 1) -> str:
    """Both errors, and the number of seeds where it is not `seeds`."""
    text = " / ".join(f"{row[kind]:.4f}".removeprefix("0") for kind in KINDS)
    return text if row.get("seeds", seeds) == seeds else f"{text} ({row['seeds']} seed)"


def main() -> None:
    """Writes the tables and draws the figure."""
    write_tables(DOCUMENT, tables())
    draw(FIGURE)


if __name__ == "__main__":
    main()
