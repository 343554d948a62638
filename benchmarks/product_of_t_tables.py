"""Medians over keys, printed, and the questions the benchmark was made to answer."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.product_of_t_cases import SKEWED_POSTERIORS, SYNTHETIC_CASES
from moe_jax.product_of_t.posteriordb import POSTERIORS

GAUSSIANS = ("AutoNormal", "AutoMultivariateNormal", "GSM", "BaM", "Pathfinder")
METHODS = (
    "ProductOfT",
    *GAUSSIANS,
    "MultiPathfinder",
    "AutoBNAFNormal",
    "AutoBNAFNormal x10",
    "AutoIAFNormal",
    "AutoIAFNormal x10",
    "NUTS",
)
MAX_MEAN_ERROR, MAX_SD_ERROR, MAX_PARETO_K = 0.1, 0.1, 0.7


def median(runs: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Median over runs, None if none has the entry."""
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None


def print_tables(results: Mapping[str, Any]) -> None:
    """Prints every table the results have the records for."""
    cases = [name for name in results if "methods" in results[name]]
    synthetic = [name for name in cases if name not in POSTERIORS]
    posteriors = [name for name in POSTERIORS if name in cases]
    for title, names in (("synthetic", synthetic), ("posteriordb", posteriors)):
        for metric in ("sliced_wasserstein", "mmd", "mean", "sd", "pareto_k"):
            _print_metric(f"{title}: {metric}", names, results, metric)
    _print_cost(cases, results)
    for line in claims(results):
        print(line)
    _print_ablation(results)
    if "cost" in results:
        _print_update(results["cost"])
    if "convergence" in results:
        _print_convergence(results["convergence"])


def claims(results: Mapping[str, Any]) -> list[str]:
    """The required comparisons as sentences, with the targets on which they fail."""
    lines = []
    names = [name for name in SYNTHETIC_CASES if name in results]
    if names:
        value = {
            (name, method): median(results[name]["methods"].get(method, ()), "sliced_wasserstein")
            for name in names
            for method in METHODS
        }
        for method, share in (
            ("AutoMultivariateNormal", 0.5),
            ("AutoIAFNormal x10", 1.0),
            ("AutoBNAFNormal x10", 1.0),
        ):
            run = [n for n in names if value[n, method] is not None]
            lost = [n for n in run if not value[n, "ProductOfT"] <= share * value[n, method]]
            if run:
                lines.append(
                    f"sliced Wasserstein at most {share} of {method}'s on {len(run) - len(lost)} "
                    f"of {len(run)} synthetic targets" + _except(lost)
                )
    names = [name for name in POSTERIORS if name in results]
    if names:
        runs = {name: results[name]["methods"]["ProductOfT"] for name in names}
        far = [
            name
            for name in names
            if median(runs[name], "mean") > MAX_MEAN_ERROR
            or median(runs[name], "sd") > MAX_SD_ERROR
        ]
        heavy = [name for name in names if not median(runs[name], "pareto_k") < MAX_PARETO_K]
        worse = [
            name
            for name in names
            if name in SKEWED_POSTERIORS
            and not all(
                median(runs[name], "pareto_k")
                < median(results[name]["methods"][method], "pareto_k")
                for method in GAUSSIANS
                if method in results[name]["methods"]
            )
        ]
        silent = [name for name in far if any(run["trusted"] for run in runs[name])]
        skewed = [name for name in names if name in SKEWED_POSTERIORS]
        total = len(names)
        lines += [
            f"means within {MAX_MEAN_ERROR} and deviations within {MAX_SD_ERROR:.0%} on "
            f"{total - len(far)} of {total} posteriors" + _except(far),
            f"k-hat below {MAX_PARETO_K} on {total - len(heavy)} of {total}" + _except(heavy),
            f"k-hat below every Gaussian's on {len(skewed) - len(worse)} of {len(skewed)} skewed"
            + _except(worse),
            f"of {len(far)} that are off, {len(far) - len(silent)} had said so in every run"
            + _except(silent),
        ]
    return lines


def _except(names: list[str]) -> str:
    return f"; not on {', '.join(names)}" if names else ""


def _print_metric(title: str, names: list[str], results: Mapping[str, Any], metric: str) -> None:
    if not names:
        return
    methods = [
        m for m in METHODS if any(_cell(results[n]["methods"].get(m, ()), metric) for n in names)
    ]
    has_floor = metric in results[names[0]]["floor"]
    print(f"\n{title}, medians over keys\n")
    header = ["target", *methods, *(["reference again"] if has_floor else [])]
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for name in names:
        cells = [_cell(results[name]["methods"].get(method, ()), metric) for method in methods]
        cells += [f"{results[name]['floor'][metric]:.3f}"] if has_floor else []
        print(f"| {' | '.join([name, *cells])} |")


def _cell(runs: Iterable[Mapping[str, Any]], metric: str) -> str:
    value = median(runs, metric)
    return "" if value is None else f"{value:.3g}" if abs(value) >= 100 else f"{value:.3f}"


def _print_cost(names: list[str], results: Mapping[str, Any]) -> None:
    if not names:
        return
    print("\nscores / seconds (compilation), medians over keys\n")
    print(f"| target | {' | '.join(METHODS)} |\n|{' --- |' * (len(METHODS) + 1)}")
    for name in names:
        cells = []
        for method in METHODS:
            runs = results[name]["methods"].get(method)
            cells.append(
                f"{median(runs, 'scores'):,.0f} / {median(runs, 'seconds'):.1f} "
                f"({median(runs, 'compile_seconds'):.0f})"
                if runs
                else ""
            )
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def _print_ablation(results: Mapping[str, Any]) -> None:
    found = {
        name.partition(":")[2]: r for name, r in results.items() if name.startswith("ablation:")
    }
    if not found:
        return
    print("\nchoice of experts: sliced Wasserstein (k-hat), medians over keys\n")
    print(f"| variant | {' | '.join(found)} |\n|{' --- |' * (len(found) + 1)}")
    for variant in next(iter(found.values())):
        cells = []
        for runs in (record[variant] for record in found.values()):
            distance, k = median(runs, "sliced_wasserstein"), median(runs, "pareto_k")
            failed = sum("failed" in run for run in runs)
            cell = "" if distance is None else f"{distance:.3f} ({k:.2f})"
            cells.append(cell + (f" {failed} failed" if failed else ""))
        print(f"| {variant} | {' | '.join(cells)} |")


def _print_update(record: Mapping[str, Any]) -> None:
    memory = record["peak_bytes_of_50_dims_500_experts"] / 2**30
    print(f"\nmemory of an update of 500 experts in 50 dimensions: {memory:.2f} GiB\n")
    print("| batch, experts | update, ms | Gram alone, ms | ratio |\n| --- | --- | --- | --- |")
    for sizes, seconds in record["processor_seconds_of_batch_and_experts"].items():
        update, gram = seconds["update"], seconds["gram"]
        cells = (sizes, f"{1e3 * update:.1f}", f"{1e3 * gram:.1f}", f"{update / gram:.1f}")
        print(f"| {' | '.join(cells)} |")


def _print_convergence(record: Mapping[str, Any]) -> None:
    print("\nerror of the exponents, factor an iteration on a product of the experts\n")
    for rate, found in record["in_family"].items():
        print(f"eta = {rate}: {statistics.median(found['rates']):.3f}")
    print("\nfloor of the error outside the family\n")
    for batch, found in record["outside"].items():
        print(f"batch {batch}: {found['floor']:.3f}")
