"""Tables and verdicts of `benchmarks/symmetries.py`."""

import json
from typing import Any

import numpy as np

BY_VALIDATION = "size by validation"
CHOSEN = f"algebra, {BY_VALIDATION}"
SPLINE = "cubic spline, then persistence"
KINDS = ("interpolation", "extrapolation")
# Interpolation and extrapolation, required of the median over seeds.
BARS = {"pendulum": (0.004, 0.05), "lotka_volterra": (0.004, 0.015), "swing_wscc9": (0.006, 0.02)}
# Systems on which the mixings are compared at the width of the phase space.
TIGHT = ("pendulum", "lotka_volterra")


def summarize(figures: dict[str, Any], system: str, rows: int) -> dict[str, dict[str, Any]]:
    """Medians over seeds by model, and those of the size that validates best seed by seed."""
    by_seed: dict[str, dict[str, Any]] = {}
    for key, record in figures.items():
        parts = key.split("/")
        if parts[:2] == [system, str(rows)] and len(parts) == 4:
            by_seed.setdefault(parts[2], {})[parts[3]] = record
    for models in by_seed.values():
        kinds: dict[str, list[Any]] = {}
        for name, record in models.items():
            if ", d = " in name:
                kinds.setdefault(name.rsplit(", d = ", 1)[0], []).append(record)
        for kind, sizes in kinds.items():
            if len(sizes) > 1:
                best = min(sizes, key=lambda record: record["validation_error"])
                models[f"{kind}, {BY_VALIDATION}"] = best
    names = list(dict.fromkeys(name for models in by_seed.values() for name in models))
    summary = {}
    for name in names:
        runs = [models[name] for models in by_seed.values() if name in models]
        summary[name] = {"seeds": len(runs)} | {
            kind: float(np.median([run[kind] for run in runs])) for kind in KINDS
        }
        seconds = [run["processor_seconds"] for run in runs if "processor_seconds" in run]
        if seconds:
            summary[name]["processor_seconds"] = float(np.median(seconds))
    return summary


def verdicts(system: str, summary: dict[str, dict[str, Any]]) -> list[str]:
    """What was required of a system, and whether it was met."""
    lines = []
    if CHOSEN in summary and system in BARS:
        own, spline = summary[CHOSEN], summary[SPLINE]
        for kind, bar in zip(KINDS, BARS[system], strict=True):
            lines.append(_verdict(f"{system} {kind} {own[kind]:.4f} <= {bar}", own[kind] <= bar))
        gain = spline["interpolation"] / own["interpolation"]
        lines.append(_verdict(f"{system} {gain:.1f} times better than the spline >= 4", gain >= 4))
    both = [summary.get(f"{mixing}, d = 2") for mixing in ("algebra", "output")]
    if both[0] and both[1] and system in TIGHT:
        ratio = both[0]["extrapolation"] / both[1]["extrapolation"]
        text = f"{system} algebra / output in extrapolation at d = 2, {ratio:.2f} <= 0.6"
        lines.append(_verdict(text, ratio <= 0.6))
    return lines


def recovery_verdicts(figures: dict[str, Any]) -> list[str]:
    """Medians over seeds of the recovered frequencies and angles, and whether they suffice."""
    runs = [record for key, record in figures.items() if key.startswith("recovery/")]
    lines = []
    for name in runs[0] if runs else ():
        error = float(np.median([run[name]["relative_error"] for run in runs]))
        angle = float(np.median([run[name]["canonical_angle"] for run in runs]))
        text = f"recovery, {name}, {len(runs)} seeds: frequency {error:.2%} <= 2%"
        lines.append(_verdict(text, error <= 0.02))
        text = f"recovery, {name}, {len(runs)} seeds: canonical angle {angle:.3f} <= 1 degree"
        lines.append(_verdict(text, angle <= 1.0))
    return lines


def print_tables(figures: dict[str, Any]) -> None:
    """Prints what there is as Markdown tables, and the verdicts."""
    cases = dict.fromkeys(tuple(key.split("/")[:2]) for key in figures if key.count("/") == 3)
    for system, rows in cases:
        summary = summarize(figures, system, int(rows))
        print(f"\n{system}, {rows} training trajectories; medians over seeds\n")
        print("| model | interpolation | extrapolation | seeds | processor seconds |")
        print("| --- | --- | --- | --- | --- |")
        for name, row in summary.items():
            seconds = f"{row['processor_seconds']:.0f}" if "processor_seconds" in row else ""
            print(
                f"| {name} | {row['interpolation']:.4f} | {row['extrapolation']:.4f} "
                f"| {row['seeds']} | {seconds} |"
            )
        if rows == "64":
            print("\n".join(["", *verdicts(system, summary)]))
    print("\n".join(["", *recovery_verdicts(figures)]))
    for key, record in figures.items():
        if key.count("/") != 3:
            print(f"\n{key}: {json.dumps(record, indent=1)}")


def _verdict(text: str, is_met: bool) -> str:
    return f"{'met' if is_met else 'MISSED'}: {text}"
