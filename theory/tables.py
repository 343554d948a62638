"""The table of a learned experiment and the figures asked of it, from its results file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.training.rates import fit_floor, fit_rate

_ALWAYS = ("facts", "floor", "map", "seconds")
_COLUMNS = {
    "dimension": (
        "mse", "sup", "hard_mse", "hard_sup", "start_mse", "start_sup", "experts_used",
        "specialisation", "cell_dim", "answer_rank", "logit_rank",
    ),
    "experts": (
        "mse", "train_mse", "sup", "hard_mse", "start_mse", "experts_used", "specialisation",
        "cell_dim", "answer_rank", "freedom", "capacity", "rademacher",
    ),
    "gates": (
        "hard_mse", "hard_sup", "purity", "adjusted_rand", "tie_mass", "misrouted_ties",
        "experts_used", "specialisation", "logit_rank",
    ),
    "depth": (
        "hard_mse", "hard_sup", "paths", "chao1", "unseen_mass", "joint_perplexity",
        "total_correlation", "experts_used", "gate_jumps", "pieces", "own_rank",
    ),
    "encoders": ("hard_mse", "hard_sup", "experts_used", "cell_dim", "code_rank", "answer_rank"),
    "sharing": (
        "mse", "sup", "hard_mse", "train_mse", "experts_used", "answer_rank", "logit_rank",
    ),
}  # fmt: skip


def write_table(results: Mapping[str, Any], path: Path) -> str:
    """Writes and returns a Markdown table: medians over seeds, with least and largest.

    Below it, what the experiment was asked: ratios, differences, rates with intervals.
    """
    runs, experiment = results["runs"], results["config"]["experiment"]
    columns = [name for name in _COLUMNS[experiment] if any(name in run for run in runs.values())]
    head = ["run", "active", "total", *columns]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for name, run in runs.items():
        cells = [spread(run[column]) if column in run else "" for column in columns]
        facts = run["facts"]
        lines.append(" | ".join([name, str(facts["active"]), str(facts["total"]), *cells]))
    text = "\n".join(f"| {line} |" for line in lines) + "\n"
    asked = answers(results)
    if asked:
        text += "\n" + "\n".join(f"- {line}" for line in asked) + "\n"
    path.write_text(text)
    return text


def write_record(results: Mapping[str, Any], path: Path) -> None:
    """Writes what the table and the figures read, to 4 digits, an entry a line.

    benchmarks/results/theory_*.json are such files.
    """
    kept = (*_ALWAYS, *_COLUMNS[results["config"]["experiment"]])
    blocks = []
    for name, run in results["runs"].items():
        lines = [f"   {json.dumps(key)}: {_short(run[key])}" for key in kept if key in run]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    config = json.dumps(results["config"])
    path.write_text(f'{{\n "config": {config},\n "runs": {{\n' + ",\n".join(blocks) + "\n }\n}\n")


def answers(results: Mapping[str, Any]) -> list[str]:
    """What an experiment was asked, as sentences with the numbers of its runs."""
    function = {"dimension": _dimension, "experts": _experts, "gates": _gates, "depth": _depth}
    chosen = function.get(results["config"]["experiment"])
    return [] if chosen is None else chosen(results["runs"])


def spread(values: Sequence[float | int]) -> str:
    """The median, and in brackets the least and the largest where they differ."""
    low, middle, high = (f"{float(np.quantile(values, q)):.3g}" for q in (0.0, 0.5, 1.0))
    return middle if low == high else f"{middle} [{low}, {high}]"


def _dimension(runs: Mapping[str, Any]) -> list[str]:
    lines = []
    groups: dict[tuple[str, str], list[Any]] = {}
    for run in runs.values():
        groups.setdefault((run["facts"]["manifold"], run["facts"]["weighting"]), []).append(run)
    for (manifold, weighting), group in groups.items():
        first, last = group[0], group[-1]
        ratio = _median(last["mse"]) / _median(first["mse"])
        lines.append(
            f"{manifold}, {weighting}: median mse at D = {last['facts']['D']} is {ratio:.3g} times "
            f"that at D = {first['facts']['D']}"
        )
        for run in group if weighting == "built" else []:
            worse = {
                name: sum(value > run[f"start_{name}"][0] for value in run[name])
                for name in ("mse", "sup")
            }
            lines.append(
                f"{manifold}, D = {run['facts']['D']}, built: of {len(run['mse'])} seeds "
                f"{worse['mse']} end above their start's mse and {worse['sup']} above its sup error"
            )
    return lines


def _experts(runs: Mapping[str, Any]) -> list[str]:
    lines = []
    groups: dict[str, list[Any]] = {}
    for run in runs.values():
        groups.setdefault(run["facts"]["weighting"], []).append(run)
    for weighting, group in groups.items():
        counts = np.array([run["facts"]["E"] for run in group], float)
        if len(counts) < 5:
            continue
        rmse = np.sqrt(np.array([run["mse"] for run in group], float)).T
        fit, floor = fit_rate(counts, rmse), fit_floor(counts, rmse)
        local = ", ".join(f"{slope:.2f}" for slope in fit.local_slopes)
        lines.append(
            f"{weighting}: root mean squared error falls as E^({fit.slope:.2f} ± "
            f"{fit.half_width:.2f}), between neighbours {local}; with a floor, "
            f"{floor.floor:.2g} + {floor.scale:.2g} E^({-floor.rate:.2f}), the floor in "
            f"[{floor.floor_interval[0]:.2g}, {floor.floor_interval[1]:.2g}]"
        )
    return lines


def _gates(runs: Mapping[str, Any]) -> list[str]:
    lines = []
    for matched in ("active", "width"):
        found = {
            run["facts"]["gate"]: _median(run["purity"])
            for run in runs.values()
            if (run["facts"]["partition"], run["facts"]["weighting"]) == ("rings", "likelihood")
            and run["facts"]["matched"] == matched
        }
        if "affine" in found and "hidden_layer" in found:
            lines.append(
                f"rings, likelihood, same {matched}: median purity {found['hidden_layer']:.3f} of "
                f"the two-layer gate, {found['hidden_layer'] - found['affine']:.3f} above affine"
            )
    return lines


def _depth(runs: Mapping[str, Any]) -> list[str]:
    lines = []
    for run in runs.values():
        facts = run["facts"]
        if facts["matched"] != "reference":
            continue
        peers = {
            (other["facts"]["layers"], other["facts"]["experts"], other["facts"]["matched"]): other
            for other in runs.values()
            if other["facts"]["cells"] == facts["cells"]
        }
        for same in ("active", "total"):
            flat = peers.get((1, facts["layers"] * facts["experts"], same))
            if flat is None:
                continue
            lines.append(
                f"{facts['cells']} cells an axis: median top-1 mse {_median(run['hard_mse']):.3g} "
                f"of {facts['layers']} layers of {facts['experts']}, "
                f"{_median(flat['hard_mse']):.3g} "
                f"of one layer of {flat['facts']['experts']} with the same {same} parameters"
            )
    return lines


def _short(entry: Any) -> str:
    if isinstance(entry, list):
        entry = [float(f"{x:.4g}") if isinstance(x, float) else x for x in entry]
    elif isinstance(entry, float):
        entry = float(f"{entry:.4g}")
    return json.dumps(entry, separators=(", ", ": "))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
