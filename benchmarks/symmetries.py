"""Latent mixtures of symmetries against interpolation, linear latents and neural ODEs.

python -m benchmarks.symmetries --output=benchmarks/results/symmetries.json

Every fit is kept in the JSON by system, rows, seed and model, and is not repeated: the command goes
on where it was stopped. `--parts` names what to run: `accuracy` (integrable systems and the 9-bus
grid), `real` (measured series, see `benchmarks/symmetries_real.py`), `recovery` (of a known
generator), `chaotic` (chaotic and damped systems, where no gain is expected), `sample_efficiency`,
`speed` and `memory`.

All seeds are run of `accuracy` and `recovery`, the first one alone of the other parts and of linear
latents. Left out unless `--full` is given: the other seeds of these; Latent ODEs and linear latents
of the other parts, and two of the five sample sizes; output mixing and single experts of `real` and
`chaotic`; ODE-RNNs; anchored neural ODEs of two coordinates; output mixing and single
experts of the larger latent; other weights of the latent consistency. Each is one of the
comparison's peers or ablations, and none of the bars needs it.

A job that fails is named, the others go on, and the exit status is 1.

All learned models see the same observations, have the same number of starts and of steps, keep what
is best of ten looks at validation trajectories, and have their latent size chosen there. Errors are
on noise-free truth, in variances. Seeds begin at 10: the library's default weights were chosen on
data of seeds below.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks.symmetries_speed import speed_steps
from benchmarks.symmetries_tables import print_tables
from moe_jax.symmetries import LatentMoSConfig, predict
from moe_jax.symmetries.baselines import linear_latent, single_expert
from moe_jax.symmetries.data import IrregularBatch
from moe_jax.symmetries.fit import fit
from moe_jax.symmetries.losses import LossConfig
from moe_jax.symmetries.main import Data, errors, simulate_splits, untrained_baselines
from moe_jax.symmetries.model import LatentMoS, apply_model
from moe_jax.symmetries.neural import NEURAL, fit_neural, predict_neural
from moe_jax.symmetries.sample import low_resolution
from moe_jax.symmetries.settings import read_settings
from moe_jax.symmetries.simulate import oscillators
from moe_jax.symmetries.spectrum import canonical_angle, generator_matrices, spectrum
from moe_jax.training import keep_compiled_programs

FIRST_SEED = 10
ROWS = 64
SAMPLE_SIZES = (8, 16, 32, 64, 128)
FEW_SIZES = (8, 32, 64)
CONSISTENCIES = (0.1, 1.0)  # beside the default of 0.3
LINEAR = "linear latent, d = 8"
ANCHORED = "anchored neural ODE"


class System(NamedTuple):
    """What is simulated, and the numbers of latent planes that are compared on it."""

    config: dict[str, Any]
    planes: tuple[int, int]


SYSTEMS = {
    "pendulum": System({"name": "pendulum"}, (1, 2)),
    "lotka_volterra": System({"name": "lotka_volterra"}, (1, 2)),
    "swing_wscc9": System({"name": "swing"}, (2, 4)),
    "damped_pendulum": System({"name": "damped_pendulum"}, (1, 2)),
    "double_pendulum_large": System(
        {"name": "double_pendulum", "options": {"large": True}}, (2, 4)
    ),
    "lorenz": System({"name": "lorenz"}, (2, 4)),
    "demand": System({}, (1, 2)),
    "carbon_dioxide": System({}, (1, 2)),
}
PARTS = {
    "accuracy": ("pendulum", "lotka_volterra", "swing_wscc9"),
    "real": ("demand", "carbon_dioxide"),
    "chaotic": ("damped_pendulum", "double_pendulum_large", "lorenz"),
    "sample_efficiency": ("pendulum",),
}


class Job(NamedTuple):
    """One figure to measure: a model on a system, or recovery of a generator (system "")."""

    system: str
    rows: int
    seed: int
    model: str
    steps: int
    starts: int

    @property
    def key(self) -> str:
        """Where it stands in the JSON."""
        if not self.system:
            return f"{self.model}/{self.seed}"
        return f"{self.system}/{self.rows}/{self.seed}/{self.model}"


def mos_configs(system: str, obs_dim: int) -> dict[str, tuple[LatentMoSConfig, LossConfig]]:
    """The compared mixtures, by name; d is the width of the latent."""
    found = {}
    # A trend is a translation: carbon dioxide rises.
    translations = int(system == "carbon_dioxide")
    for planes in SYSTEMS[system].planes:
        base = LatentMoSConfig(obs_dim=obs_dim, planes=planes, translations=translations)
        size = f"d = {base.slice_dim}"
        found[f"algebra, {size}"] = base, LossConfig()
        found[f"output, {size}"] = dataclasses.replace(base, mixing="output"), LossConfig()
        found[f"one expert, {size}"] = single_expert(base), LossConfig()
        if system in PARTS["accuracy"] and planes == SYSTEMS[system].planes[0]:
            for weight in CONSISTENCIES:
                found[f"algebra, consistency {weight}, {size}"] = (
                    base,
                    LossConfig(consistency=weight),
                )
    return found | {LINEAR: (linear_latent(LatentMoSConfig(obs_dim=obs_dim)), LossConfig())}


def models_of(system: str, part: str, *, full: bool) -> list[str]:
    """Names of a system's models in a part, the mixtures first."""
    names = ["untrained", *mos_configs(system, 1)]
    peers = [f"{name}, d = 8" for name in NEURAL]
    if full:
        return [*names, f"{ANCHORED}, d = 2", *peers]
    small = mos_configs(system, 1)[names[1]][0].slice_dim
    kept = ["untrained", *(f"{kind}, d = {small}" for kind in ("output", "one expert")), LINEAR]
    names = [n for n in names if n in kept or n.startswith("algebra, d")]
    left_out: tuple[str, ...] = ("ODE-RNN",)
    if part != "accuracy":
        left_out += ("Latent ODE", LINEAR)
    if part in ("real", "chaotic"):
        left_out += ("output", "one expert")
    return [name for name in names + peers if not name.startswith(left_out)]


def jobs(
    parts: Sequence[str], seeds: Sequence[int], steps: int, starts: int, *, full: bool
) -> list[Job]:
    """All that the parts ask for, in order; seeds of a model in a row, to be compiled once."""
    found = []
    for part in parts:
        if part == "recovery":
            found += [Job("", 0, seed, part, steps, starts) for seed in seeds]
        sizes = (ROWS,)
        if part == "sample_efficiency":
            sizes = SAMPLE_SIZES if full else FEW_SIZES
        for system in PARTS.get(part, ()):
            found += [
                Job(system, rows, seed, model, steps, starts)
                for model in models_of(system, part, full=full)
                for rows in sizes
                for seed in (
                    seeds if full or (part == "accuracy" and model != LINEAR) else seeds[:1]
                )
            ]
    return list(dict.fromkeys(found))


@functools.cache
def splits(system: str, rows: int, seed: int) -> Data:
    """The observations of one system; of a simulated one 64 validation and 200 test rows."""
    if system in PARTS["real"]:
        from benchmarks.symmetries_real import real_data

        return real_data(system, seed)
    config = {"seed": seed, "system": SYSTEMS[system].config | {"rows": rows}}
    return simulate_splits(read_settings(config))


def measure(job: Job) -> dict[str, Any]:
    """The figures of one job, by name of the model."""
    keep_compiled_programs()
    if not job.system:
        return recover(job.seed)
    start = _processor_seconds()
    data = splits(job.system, job.rows, job.seed)
    if job.model == "untrained":
        answers = untrained_baselines(data)
        if job.system in PARTS["real"]:
            from benchmarks.symmetries_real import seasonal_naive

            answers |= seasonal_naive(job.system, data)
        return {name: errors(answer, data) for name, answer in answers.items()}
    query = np.broadcast_to(data.test.times, data.test.truth.shape[:2])
    name, width = job.model.rsplit(", d = ", 1)
    if name in NEURAL:
        neural = fit_neural(
            name,
            data.train.examples,
            data.val.examples,
            width=int(width),
            seed=job.seed,
            steps=job.steps,
            starts=job.starts,
        )
        answer = np.asarray(predict_neural(neural, data.test.examples.context, query))
        validation_error = neural.validation_error
    else:
        config, loss = mos_configs(job.system, data.test.truth.shape[-1])[job.model]
        found = fit(
            config,
            data.train.examples,
            data.val.examples,
            seed=job.seed,
            steps=job.steps,
            multistart=job.starts,
            loss=loss,
        )
        output = predict(found.model, found.variables, data.test.examples.context, query)
        answer, validation_error = np.asarray(output.mean), found.validation_error
    return errors(answer, data) | {
        "validation_error": validation_error,
        "processor_seconds": _processor_seconds() - start,
    }


def recover(seed: int) -> dict[str, Any]:
    """Frequency and canonical angle of a free 2 x 2 generator on one oscillator, omega = 1.3.

    Observed through a random linear map and through tanh of it, undamped and damped (0.1); the best
    of 3 starts on validation.
    """
    found = {}
    for nonlinear, damping in ((False, 0.0), (True, 0.0), (True, 0.1)):
        begin = _processor_seconds()
        options = {"nonlinear": nonlinear, "damping": damping}
        runs = [oscillators(seed * 2 + part, 64, **options) for part in (0, 1)]
        train, val = (low_resolution(run, seed=seed + part) for part, run in enumerate(runs))
        config = LatentMoSConfig(obs_dim=5, generator="gl", experts=1, gate="fixed")
        result = fit(config, train.examples, val.examples, seed=seed, steps=1000, multistart=3)
        matrix = np.asarray(generator_matrices(result.model, result.variables))[0, 0]
        value = np.asarray(spectrum(result.model, result.variables)).ravel()[0]
        name = f"{'tanh' if nonlinear else 'linear'}, damping {damping}"
        found[name] = {
            "omega": float(abs(value.imag)),
            "sigma": float(value.real),
            "relative_error": float(abs(abs(value.imag) - 1.3) / 1.3),
            "canonical_angle": canonical_angle(matrix),
            "start_errors": list(result.start_errors),
            "processor_seconds": _processor_seconds() - begin,
        }
    return found


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_memory() -> dict[str, Any]:
    """Compiled and resident size of 1,000 rows x 200 observations x 64 queries in one call."""
    rng = np.random.default_rng(0)
    rows, length, queries = 1000, 200, 64
    batch = IrregularBatch(
        times=np.sort(rng.uniform(0, 20, (rows, length)), 1).astype(np.float32),
        values=rng.normal(size=(rows, length, 2)).astype(np.float32),
        mask=np.ones((rows, length, 2), bool),
        lengths=np.full(rows, length, np.int32),
    )
    query = rng.uniform(0, 25, (rows, queries)).astype(np.float32)
    model = LatentMoS(LatentMoSConfig(obs_dim=2))
    variables = jax.jit(model.init)(jax.random.key(0), batch, query)
    compiled = apply_model.lower(model, variables, batch, query).compile()
    analysis = compiled.memory_analysis()
    start = time.perf_counter()
    jax.block_until_ready(apply_model(model, variables, batch, query).mean)
    return {
        "temporary_mib": analysis.temp_size_in_bytes / 2**20,
        "argument_mib": analysis.argument_size_in_bytes / 2**20,
        "output_mib": analysis.output_size_in_bytes / 2**20,
        "peak_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "seconds_with_compilation": time.perf_counter() - start,
    }


def measure_speed() -> dict[str, Any]:
    """Training steps a processor second on the same pendulum batch, in turn, five rounds."""
    steps = speed_steps(splits("pendulum", ROWS, 0))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
        for name, (step, count) in steps.items():
            start = time.process_time()
            for _ in range(count):
                loss = step()
            jax.block_until_ready(loss)
            rates[name].append(count / (time.process_time() - start))
    return {name: {"steps_per_processor_second": values} for name, values in rates.items()}


class Results:
    """Figures by key, written to a JSON file as they come."""

    def __init__(self, path: Path, *, steps: int, starts: int) -> None:
        self._path = path
        self._budget = {"steps": steps, "starts": starts}
        self.figures: dict[str, Any] = {}
        if path.exists():
            self.figures = json.loads(path.read_text())["figures"]

    def has(self, job: Job) -> bool:
        """Whether a job's figures stand here."""
        name = "training mean" if job.model == "untrained" else job.model
        return job._replace(model=name).key in self.figures

    def add(self, job: Job, record: dict[str, Any]) -> None:
        """Keeps a job's figures."""
        named = record if job.model == "untrained" else {job.model: record}
        self.figures |= {job._replace(model=name).key: own for name, own in named.items()}
        self.write()

    def write(self) -> None:
        """Writes all figures."""
        record = {
            "python": platform.python_version(),
            "jax": jax.__version__,
            **self._budget,
            "figures": self.figures,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1) + "\n")


def run_jobs(results: Results, wanted: Sequence[Job], workers: int) -> list[Job]:
    """Measures in processes of one thread each.

    Returns:
        The jobs that failed, whose errors are logged; the others' figures are kept. Where a process
        was killed, all jobs that it left undone.
    """
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    context = multiprocessing.get_context("spawn")
    failed = []
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as pool:
        running = {pool.submit(measure, job): job for job in wanted}
        for count, future in enumerate(as_completed(running), 1):
            job, error = running[future], future.exception()
            if error is None:
                results.add(job, future.result())
            else:
                failed.append(job)
                logging.error("%s failed", job.key, exc_info=error)
            logging.info("%d of %d: %s", count, len(wanted), job.key)
    return failed


def main(argv: Sequence[str]) -> int:
    """Runs what `--parts` names; the exit status is 1 if a job failed."""
    del argv
    results = Results(Path(_OUTPUT.value), steps=_STEPS.value, starts=_STARTS.value)
    seeds = range(FIRST_SEED, FIRST_SEED + _SEEDS.value)
    wanted = jobs(_PARTS.value, seeds, _STEPS.value, _STARTS.value, full=_FULL.value)
    wanted = [job for job in wanted if job.model.startswith(tuple(_MODELS.value))]
    failed = run_jobs(results, [job for job in wanted if not results.has(job)], _WORKERS.value)
    for part, measure_part in (("memory", measure_memory), ("speed", measure_speed)):
        if part in _PARTS.value and part not in results.figures:
            results.figures[part] = measure_part()
            results.write()
    print_tables(results.figures)
    for job in failed:
        print(f"FAILED: {job.key}")
    return int(bool(failed))


_ALL = ["accuracy", "real", "recovery", "memory", "speed", "chaotic", "sample_efficiency"]
_OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/symmetries.json", "JSON to write.", allow_override=True
)
_PARTS = flags.DEFINE_multi_enum("parts", _ALL, _ALL, "What to run.", allow_override=True)
_FULL = flags.DEFINE_bool("full", False, "Also what takes hours.", allow_override=True)
_SEEDS = flags.DEFINE_integer("symmetries_seeds", 3, "Number of seeds.", allow_override=True)
_STEPS = flags.DEFINE_integer(
    "symmetries_steps", 1000, "Optimiser steps of a start.", allow_override=True
)
_STARTS = flags.DEFINE_integer("starts", 1, "Starts of every fit.", allow_override=True)
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes.", allow_override=True)
_MODELS = flags.DEFINE_multi_string(
    "models", [""], "Beginnings of names of models to run.", allow_override=True
)

if __name__ == "__main__":
    app.run(main)
