"""Runs one learned experiment: trains its networks, writes a table and a figure.

python -m theory.main --config=configs/theory/gates.py --workdir=runs/theory/gates

Started again with the same command, it skips the runs that are done and takes up the one that was
interrupted. `--full` runs the whole sweep in place of the small default. Any entry of the
configuration can be set on the command line: --config.train.num_seeds=4.
"""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from moe_jax.training import (
    Checkpoints,
    Interrupts,
    Progress,
    exit_code,
    from_mapping,
    lock_workdir,
    prepare_workdir,
    run_program,
)
from theory.evaluation import evaluate_seeds, partition_map
from theory.experiments import Run, built_start, runs_of
from theory.fit import TrainConfig, train_seeds
from theory.plots import draw_experiment, draw_maps
from theory.tables import write_record, write_table

SECTIONS = ("experiment", "seed", "data", "train", "start_learning_rate", "options", "full")


def run_experiment(config: Mapping[str, Any], workdir: str | Path, *, full: bool = False) -> int:
    """Trains what is not yet trained, then writes `table.md` and `figure.png`.

    Where the plane is cut into cells, `partitions.png` shows what the trained gates make of it.
    `results.json` holds the configuration and all that was measured of the finished runs,
    `record.json` what table and figures show of it.

    Args:
        config: see configs/theory.
        workdir: folder of the results.
        full: let the section `full` replace entries of the others.

    Returns:
        The exit status: 0 when complete or after SIGTERM, 130 after Ctrl-C.

    Raises:
        ValueError: for a configuration that cannot be used, or a workdir of another one.
    """
    config = _merged(config, full)
    train = from_mapping(TrainConfig, config["train"], "train")
    runs = runs_of(config["experiment"], config["options"], config["data"])
    folder = prepare_workdir(workdir)
    with Interrupts() as interrupts, lock_workdir(folder):
        results = _read_results(folder, config)
        total = train.num_steps * len(runs)
        done = train.num_steps * sum(run.name in results["runs"] for run in runs)
        with Progress(total, done, show=("loss",)) as progress:
            for index, run in enumerate(runs):
                if run.name in results["runs"]:
                    continue

                def report(step: int, loss: float, index: int = index) -> bool:
                    progress.update(index * train.num_steps + step, loss=loss)
                    return interrupts.requested is not None

                record = _train_run(run, config, train, folder, report)
                if record is None:
                    break
                results["runs"][run.name] = record
                _write(folder, results)
                progress.print(
                    f"{run.name}: mse {np.median(record['mse']):.3g}, {record['seconds']:.0f} s"
                )
                if interrupts.requested is not None:
                    break
        if any(run.name not in results["runs"] for run in runs):
            print(f"{len(results['runs'])} of {len(runs)} runs are done in {folder}")
            print("to resume, run the same command again")
            return exit_code(interrupts.requested)
        table = write_table(results, folder / "table.md")
        write_record(results, folder / "record.json")
        draw_experiment(results, folder / "figure.png")
        if any("map" in run for run in results["runs"].values()):
            draw_maps(results, folder / "partitions.png")
        print(table)
        print(f"table and figures in {folder}")
    return 0


def _train_run(
    run: Run, config: Mapping[str, Any], train: TrainConfig, folder: Path, report: Any
) -> dict[str, Any] | None:
    begun = time.perf_counter()
    problem = run.problem()
    start, before = None, {}
    if run.is_built:
        start = built_start(run.stack, problem, chart_dim=run.chart_dim)
        stacked = jax.tree.map(lambda leaf: leaf[None], start)
        before = evaluate_seeds(run.stack, stacked, problem)
        before = {f"start_{name}": before[name] for name in ("mse", "sup")}
        rate = float(config["start_learning_rate"])
        train = TrainConfig(**{**vars(train), "learning_rate": rate})
    saved = folder / "checkpoints" / run.name.replace(" ", "_").replace(",", "")
    with Checkpoints(saved, keep=1) as checkpoints:
        params = train_seeds(
            jax.random.key(config["seed"]),
            run.stack,
            problem,
            train,
            start=start,
            reconstruction_weight=run.reconstruction_weight,
            checkpoints=checkpoints,
            report=report,
        )
    if params is None:
        return None
    record = {"facts": dict(run.facts), **evaluate_seeds(run.stack, params, problem), **before}
    if problem.jump:
        record["floor"] = problem.jump / 2
    if problem.labels is not None and run.stack.input_dim == 2:
        # The seed in the middle, by what the experiment asks of partitions.
        ranking = record["purity" if run.stack.num_layers == 1 else "paths"]
        seed = int(np.argsort(ranking, stable=True)[len(ranking) // 2])
        record["map"] = partition_map(run.stack, params, seed)
    shutil.rmtree(saved, ignore_errors=True)
    return {**record, "seconds": time.perf_counter() - begun}


def _merged(config: Mapping[str, Any], full: bool) -> dict[str, Any]:
    for name in config:
        if name not in SECTIONS:
            raise ValueError(f"config.{name} is not a configuration key; known: {SECTIONS}")
    for name in SECTIONS:
        if name not in config:
            raise ValueError(f"config.{name} is missing")
    merged = {name: config[name] for name in SECTIONS if name != "full"}
    if full:
        for section, entries in config["full"].items():
            merged[section] = {**merged[section], **entries}
    return merged


def _read_results(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(config))
    path = folder / "results.json"
    if not path.exists():
        return {"config": plain, "runs": {}}
    results = json.loads(path.read_text())
    if results["config"] != plain:
        raise ValueError(
            f"workdir={folder} holds results of another configuration; choose another workdir"
        )
    return results


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    partial = folder / "results.json.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(folder / "results.json")


def run() -> None:
    """Entry point of the program."""
    full = flags.DEFINE_bool("full", False, "Run the whole sweep instead of the small default.")
    run_program(
        lambda config, workdir: run_experiment(config, workdir, full=full.value), "runs/theory"
    )


if __name__ == "__main__":
    run()
