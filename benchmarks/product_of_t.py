"""Product of t-experts against Gaussians, flows and Pathfinder, on equal counts of scores.

python -m benchmarks.product_of_t --output=benchmarks/results/product_of_t.json

Fits every target with every method for three keys: first the product, then the others with the
count of scores it took, flows on targets up to 10 dimensions also with ten times that. Prints
medians, writes JSON and figures beside it. Two processes of one thread each, about 40 minutes on 2
cores; a target whose record lies in --runs is not fitted again.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks.product_of_t_ablation import ABLATION_CASES, run_ablation
from benchmarks.product_of_t_baselines import (
    Fit,
    run_gaussian,
    run_nuts,
    run_pathfinder,
    run_variational,
)
from benchmarks.product_of_t_cases import SWEEP_CASES, SYNTHETIC_CASES, Case, load_case
from benchmarks.product_of_t_convergence import run_convergence
from benchmarks.product_of_t_cost import run_cost
from benchmarks.product_of_t_figures import draw_figures
from benchmarks.product_of_t_metrics import compare
from benchmarks.product_of_t_tables import METHODS, print_tables
from moe_jax.product_of_t import fit_product_of_t, pareto_smooth
from moe_jax.product_of_t.posteriordb import POSTERIORS

ROOT = Path(__file__).resolve().parent.parent
NUM_PATHS = 20
# Of a flow that may evaluate ten times as many scores.
TENFOLD = " x10"
MAX_TENFOLD_DIM = 10


def run_case(case: Case, keys: Sequence[jax.Array], wanted: Sequence[str]) -> dict[str, Any]:
    """The wanted methods on one target: errors, k-hat, counts and seconds of every key."""
    methods: dict[str, list[dict[str, Any]]] = {"ProductOfT": run_product(case, keys)}
    budget = max(run["scores"] for run in methods["ProductOfT"])
    with_tenfold = case.dim <= MAX_TENFOLD_DIM and case.name not in POSTERIORS
    for name in wanted:
        if name != "ProductOfT" and (with_tenfold or not name.endswith(TENFOLD)):
            fits = _run_peer(name, list(keys), case, budget)
            methods[name] = [describe(fit, case) for fit in fits]
    return {
        "dim": case.dim,
        "budget": budget,
        "floor": compare(case.fresh, case.reference),
        "methods": methods,
    }


def _run_peer(name: str, keys: list[jax.Array], case: Case, budget: int) -> list[Fit]:
    arguments = (keys, case.log_density, case.dim)
    if name in ("GSM", "BaM"):
        return run_gaussian(name, *arguments, budget)
    if name in ("Pathfinder", "MultiPathfinder"):
        return run_pathfinder(1 if name == "Pathfinder" else NUM_PATHS, *arguments)
    if name == "NUTS":
        return run_nuts(keys[:1], *arguments[1:])
    factor = 10 if name.endswith(TENFOLD) else 1
    return run_variational(name.removesuffix(TENFOLD), *arguments, factor * budget)


def run_product(case: Case, keys: Sequence[jax.Array]) -> list[dict[str, Any]]:
    """The product's runs. The first also compiles: what it took longer than the others' median."""
    records = []
    for key in keys:
        began = time.perf_counter()
        with warnings.catch_warnings():
            # What they say is in the record.
            warnings.simplefilter("ignore", UserWarning)
            result = fit_product_of_t(key, case.log_density, case.dim)
        seconds = time.perf_counter() - began
        ratios = result.log_density - result.log_q
        evaluations = result.evaluations
        fit = Fit(
            np.asarray(result.draws),
            np.asarray(ratios),
            int(evaluations.total_scores),
            int(evaluations.log_density),
            seconds,
            0.0,
        )
        history, pool, reference = result.history, result.pool, case.reference
        records.append(
            describe(fit, case)
            | {
                "pool_mean": float(np.abs((pool.mean - reference.mean) / reference.sd).max()),
                "pool_sd": float(np.abs(pool.standard_deviation / reference.sd - 1.0).max()),
                "pool_pareto_k": pool.pareto_k,
                "trusted": bool(result.trusted),
                "warnings": list(result.warnings),
                "fisher_divergence": float(history.fisher_divergence[-1]),
                "degrees_of_freedom": float(result.distribution.degrees_of_freedom),
                "num_active": int(history.num_active[-1]),
                "normalizer_ess": float(result.normalizer_ess),
            }
        )
    rest = float(np.median([record["seconds"] for record in records[1:] or records]))
    compile_seconds = max(records[0]["seconds"] - rest, 0.0)
    records[0]["seconds"] -= compile_seconds
    return [record | {"compile_seconds": compile_seconds} for record in records]


def describe(fit: Fit, case: Case) -> dict[str, Any]:
    """Errors of the draws, of weighted means and deviations, k-hat, counts and seconds."""
    record = compare(fit.draws, case.reference) | {
        "scores": fit.scores,
        "log_densities": fit.log_densities,
        "seconds": fit.seconds,
        "compile_seconds": fit.compile_seconds,
    }
    if fit.log_ratios is not None:
        with jax.enable_x64(True):
            log_weights, pareto_k = pareto_smooth(jax.numpy.asarray(fit.log_ratios))
            record["pareto_k"] = float(pareto_k)
            weights = np.exp(np.asarray(log_weights))
        record["ess"] = float(1.0 / np.sum(weights**2))
        if len(weights) == len(fit.draws):
            standard = (fit.draws - case.reference.mean) / case.reference.sd
            mean = weights @ standard
            variance = weights @ (standard - mean) ** 2
            record["weighted_mean"] = float(np.abs(mean).max())
            record["weighted_sd"] = float(np.abs(np.sqrt(variance) - 1.0).max())
    return record


def run_part(name: str, num_keys: int, methods: Sequence[str]) -> dict[str, Any]:
    """One part of the benchmark in this process: a case, or `ablation:CASE`, or a study."""
    keys = [jax.random.key(seed) for seed in range(num_keys)]
    kind, _, case = name.rpartition(":")
    # The peers mix dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if name == "convergence":
            return run_convergence(keys)
        if name == "cost":
            return run_cost()
        if kind == "ablation":
            return run_ablation(load_case(case), keys)
        with jax.enable_x64(True):
            return run_case(load_case(name), keys, methods)


def parts(only: Sequence[str]) -> list[str]:
    """Every part, those that take longest first; `only` chooses by name."""
    cases = dict.fromkeys([*reversed(SWEEP_CASES), *POSTERIORS, *SYNTHETIC_CASES])
    ablations = [f"ablation:{case}" for case in ABLATION_CASES]
    every = [*cases, *ablations, "convergence", "cost"]
    unknown = set(only) - set(every)
    if unknown:
        raise app.UsageError(f"--only={sorted(unknown)} must be of {every}")
    return [name for name in every if name in only] if only else every


def run_parts(
    names: Iterable[str], folder: Path, num_keys: int, methods: Sequence[str], num_processes: int
) -> None:
    """Runs each part in a process of its own, on one core, several at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [name for name in names if not record_path(folder, name).exists()]
    cores = sorted(os.sched_getaffinity(0))
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    while waiting or running:
        for slot in range(num_processes):
            if slot not in running and waiting:
                name = waiting.pop(0)
                core = cores[slot % len(cores)]
                command = [sys.executable, "-m", "benchmarks.product_of_t", f"--part={name}"]
                command += [f"--keys={num_keys}", f"--runs={folder}"]
                command += [f"--methods={','.join(methods)}"]
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),
                )
                running[slot] = name, process
        for slot, (name, process) in list(running.items()):
            try:
                code = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            del running[slot]
            state = "done" if code == 0 else f"FAILED with status {code}"
            print(f"{name}: {state}; {len(waiting) + len(running)} left", file=sys.stderr)


def record_path(folder: Path, name: str) -> Path:
    """File of one part's record."""
    return folder / f"{name.replace(':', '_')}.json"


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark, or one part of it."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    folder = Path(flags.FLAGS.runs).absolute()
    if flags.FLAGS.part:
        record = run_part(flags.FLAGS.part, flags.FLAGS.keys, flags.FLAGS.methods)
        record_path(folder, flags.FLAGS.part).write_text(json.dumps(record, indent=1) + "\n")
        return
    names = parts(flags.FLAGS.only)
    run_parts(names, folder, flags.FLAGS.keys, flags.FLAGS.methods, flags.FLAGS.processes)
    files = {name: record_path(folder, name) for name in names}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    missing = [name for name in names if name not in results]
    print_tables(results)
    if missing:
        print(f"\nfailed: {', '.join(missing)}")
    output = Path(flags.FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"keys": flags.FLAGS.keys, "results": results}, indent=1) + "\n")
    draw_figures(results, output)


if __name__ == "__main__":
    flags.DEFINE_integer("keys", 3, "Number of keys.", lower_bound=1)
    flags.DEFINE_integer("processes", 2, "Processes at a time.", lower_bound=1)
    flags.DEFINE_list("only", [], "Parts to run; all by default.")
    flags.DEFINE_list("methods", list(METHODS), "Methods to run; all by default.")
    flags.DEFINE_string("part", "", "One part, in this process, writing only its record.")
    flags.DEFINE_string("runs", "runs/product_of_t_benchmark", "Folder of the records.")
    flags.DEFINE_string("output", "benchmarks/results/product_of_t.json", "File to write.")
    app.run(main)
