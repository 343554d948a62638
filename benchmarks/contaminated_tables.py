"""Writes the measured figures of contaminated mixtures into docs/contaminated.md.

python -m benchmarks.contaminated_tables

Each table is made of the JSON files in benchmarks/results alone; a test compares.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contaminated_exact import (
    DERIVATIVE_TOLERANCE,
    EXPONENT_TOLERANCE,
    INVARIANCE_TOLERANCE,
)
from benchmarks.doc_tables import markdown_table, write_tables

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "contaminated.md"
ROWS = ("beta", "exp_tau", "eta", "nu")


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"contaminated_{name}.json").read_text())


def acceptance() -> str:
    """T1 to T10: asked, measured and whether within."""
    rates, exact, rows = load("rates"), load("exact"), []
    for name in ("T1", "T2", "T3"):
        record, study = rates[name], rates[name]["study"]
        checks = {key: check for key, check in record["checks"].items() if "slope" in key}
        asked = ", ".join(_middle(check["accept"]) for check in checks.values())
        ratios = np.concatenate(list(study["rmse_over_bound"].values()))
        if name == "T1":
            asked += "; RMSE / bound in [.80, 1.35]"
            checks = record["checks"]
        measured = ", ".join(f"{record['checks'][f'slope {row}']['value']:.3f}" for row in ROWS)
        measured += f"; RMSE / bound {ratios.min():.2f} to {ratios.max():.2f}"
        what = f"{study['title']}: slopes of beta, e^tau, eta, nu"
        rows.append([name, what, asked, measured, _passed(checks)])
    worst = max(
        abs(row["measured"][key] - row["expected"][key])
        for row in exact["T4"]["figures"].values()
        for key in row["expected"]
    )
    rows.append(
        [
            "T4",
            "exponents of 9 merging experts by quadrature: largest distance from the integer",
            f"{EXPONENT_TOLERANCE}",
            f"{worst:.3f}",
            _yes(worst <= EXPONENT_TOLERANCE),
        ]
    )
    for name, what in (
        ("T5", "exponents of the fitted experts' errors between Delta .5 and .35, n = 40,000"),
        ("T6", "coverage of 95 % intervals and mean likelihood ratio, (a), n = 1,000, 400 fits"),
        ("T9", "no contamination rejected at 5 %, n = 100, 99 draws, 200 data sets"),
    ):
        checks = rates[name]["checks"]
        asked = "; ".join(f"{key} {_range(check['accept'])}" for key, check in checks.items())
        measured = ", ".join(f"{check['value']:.3f}" for check in checks.values())
        rows.append([name, what, asked, measured, _passed(checks)])
    worst = max(value for row in exact["T7"]["figures"].values() for value in row.values())
    rows.append(
        [
            "T7",
            "score and information of 11 families against autodiff, relative",
            f"{DERIVATIVE_TOLERANCE:.0e}",
            f"{worst:.0e}",
            _yes(worst <= DERIVATIVE_TOLERANCE),
        ]
    )
    found = exact["T8"]["figures"]
    rows.append(
        [
            "T8",
            ", ".join(found),
            ", ".join(f"{INVARIANCE_TOLERANCE[key]:.0e}" for key in found),
            ", ".join(f"{value:.0e}" for value in found.values()),
            _yes(all(value <= INVARIANCE_TOLERANCE[key] for key, value in found.items())),
        ]
    )
    years = load("real_data")["phones"]["years"]
    rows.append(
        [
            "T10",
            "Belgian telephone calls: responsibility above 1/2",
            "exactly 1964 to 1970",
            f"{years[0]} to {years[-1]}, {len(years)} years",
            _yes(years == list(range(1964, 1971))),
        ]
    )
    rows.sort(key=lambda row: int(row[0][1:]))
    return markdown_table(("test", "what", "accepted", "measured", "within"), rows)


def slopes() -> str:
    """Theory, paper, bound and ours side by side."""
    rows = []
    for record in load("rates").values():
        study = record.get("study")
        if study is None:
            continue
        sizes = study["sizes"]
        title = (
            f"{study['title']}; {study['replicates']} fits of {sizes[0]:,} to {sizes[-1]:,} rows"
        )
        for key, source in (
            ("theory", "the paper's theorem"),
            ("paper", "the paper reports"),
            ("bound", "Cramér-Rao bound"),
        ):
            values = [study["slopes"][row][key] for row in ROWS]
            if None not in values:
                rows.append([title, source, *(f"{value:.3f}" for value in values)])
                title = ""
        ours = [study["slopes"][row] for row in ROWS]
        rows.append(["", "ours", *(f"{s['ours_slope']:.3f} ({s['ours_se']:.3f})" for s in ours)])
    return markdown_table(
        ("design", "slope of log error on log n", "beta", "e^tau", "eta", "nu"), rows
    )


def real_data() -> str:
    """Mean held-out log-likelihood a row over splits."""
    rows = []
    for name, splits in load("real_data")["splits"].items():
        mean = {key: np.mean([s[key] for s in splits]) for key in splits[0] if "status" not in key}
        gain = np.array([s["softmax gate"] - s["refit"] for s in splits])
        error = gain.std(ddof=1) / np.sqrt(len(gain))
        scores = [f"{mean[key]:.3f}" for key in ("frozen", "refit", "constant gate")]
        rows.append(
            [name, f"{mean['train']:.0f}/{mean['test']:.0f}", *scores]
            + [f"{mean['softmax gate']:.3f}", f"{gain.mean():+.3f} ± {error:.3f}"]
            + [f"{np.sum(gain > 0)} of {len(gain)}", f"{mean['AUC']:.2f}", f"{mean['LR']:.0f}"]
        )
    head = ["data", "train/test", "frozen", "refit", "constant gate", "softmax gate"]
    return markdown_table([*head, "softmax - refit", "splits won", "AUC", "LR"], rows)


def speed() -> str:
    """Seconds of one fit beside the peers'."""
    rows = []
    for row in load("speed")["peers"]:
        ours, flexmix, mixtools = row["ours"], row["flexmix"], row["mixtools"]
        rows.append(
            [f"{row['n']:,}", f"{ours['seconds']:.3f}", f"{row['ours, one start']['seconds']:.3f}"]
            + [f"{flexmix['seconds']:.2f} ({flexmix['seconds'] / ours['seconds']:.1f})"]
            + [
                f"{mixtools['seconds']:.2f} ({mixtools['seconds'] / ours['seconds']:.0f})"
                if mixtools["seconds"]
                else f"not there in {mixtools['over_seconds']:.0f} s"
            ]
        )
    head = ("rows", "ours, four starts", "ours, one start", "flexmix (times ours)")
    return markdown_table((*head, "mixtools hmeEM (times ours)"), rows)


def size() -> str:
    """Many fits at once, and large data."""
    results = load("speed")
    many, million = results["many"], results["million"]
    rows = [
        [f"{many['fits']:,} fits of {many['n']:,} rows, 1 covariate", f"{many['seconds']:.1f}"]
        + [f"{many['first_call_seconds']:.1f}", "", str(many["statuses"]).strip("{}")]
    ]
    for row in million["rows"]:
        rows.append(
            [f"1 fit of {row['n']:,} rows, {row['covariates']} covariates"]
            + [f"{row['seconds']:.2f}", f"{row['first_call_seconds']:.1f}"]
            + [f"{row['iterations']} on all rows, {row['sample_iterations']} on the sample"]
            + [f"{row['status']}, {row['agree']} of {row['starts']} starts agree"]
        )
    table = markdown_table(("four starts each", "s", "s, first call", "iterations", "status"), rows)
    return f"{table}\n\nLargest memory of the process: {million['peak_gib']:.2f} GiB."


def tables() -> dict[str, str]:
    """All of them by name."""
    return {table.__name__: table() for table in (acceptance, slopes, real_data, speed, size)}


def _middle(accept: Sequence[float]) -> str:
    return f"{(accept[0] + accept[1]) / 2:.3g} ± {(accept[1] - accept[0]) / 2:.2f}"


def _range(accept: Sequence[float | None]) -> str:
    low, high = accept
    if low is None or high is None:
        return f"at most {high:g}" if low is None else f"at least {low:g}"
    return f"{low:g} to {high:g}"


def _passed(checks: Mapping[str, Any]) -> str:
    return _yes(all(check["passed"] for check in checks.values()))


def _yes(is_within: bool) -> str:
    return "yes" if is_within else "NO"


if __name__ == "__main__":
    write_tables(DOCUMENT, tables())
