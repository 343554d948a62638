"""Latent mixtures of symmetries against interpolation, linear latents and neural ODEs.

python -m benchmarks.symmetries --output=benchmarks/results/symmetries.json

Every fit of a part is kept in the JSON by system, rows, seed and model, and is not repeated: the
command goes on where it was stopped. `--parts` names what to run: `accuracy` (integrable systems
and the 9-bus grid), `chaotic` (where no gain is expected), `sample_efficiency`, `recovery` (of a
known generator), `speed` and `memory`.

All learned models see the same observations, have the same number of starts and of steps, and keep
what is best on validation trajectories. Errors are on noise-free truth, in variances.
"""

import dataclasses
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from moe_jax.symmetries import LatentMoSConfig, predict
from moe_jax.symmetries.baselines import linear_latent, single_expert
from moe_jax.symmetries.data import IrregularBatch
from moe_jax.symmetries.fit import fit
from moe_jax.symmetries.main import Data, errors, simulate_splits, untrained_baselines
from moe_jax.symmetries.model import LatentMoS, apply_model
from moe_jax.symmetries.sample import low_resolution
from moe_jax.symmetries.settings import read_settings
from moe_jax.symmetries.simulate import oscillators
from moe_jax.symmetries.spectrum import canonical_angle, generator_matrices, spectrum

SYSTEMS: dict[str, dict[str, Any]] = {
    "pendulum": {"name": "pendulum"},
    "lotka_volterra": {"name": "lotka_volterra"},
    "swing_wscc9": {"name": "swing"},
    "damped_pendulum": {"name": "damped_pendulum"},
    "double_pendulum_large": {"name": "double_pendulum", "options": {"large": True}},
    "lorenz": {"name": "lorenz"},
}
PARTS: dict[str, tuple[str, ...]] = {
    "accuracy": ("pendulum", "lotka_volterra", "swing_wscc9"),
    "chaotic": ("damped_pendulum", "double_pendulum_large", "lorenz"),
    "sample_efficiency": ("pendulum", "lotka_volterra"),
}
SAMPLE_SIZES = (8, 16, 32, 64, 128)
NEURAL = ("anchored neural ODE", "Latent ODE", "ODE-RNN")
CHOSEN = "algebra, size by validation"
# interpolation, extrapolation; required of the median over seeds.
BARS = {"pendulum": (0.004, 0.05), "lotka_volterra": (0.004, 0.015), "swing_wscc9": (0.006, 0.02)}


def mos_configs(obs_dim: int, sizes: Sequence[int]) -> dict[str, LatentMoSConfig]:
    """The compared mixtures, by name; d is the width of the latent."""
    found = {}
    for planes in sizes:
        base = LatentMoSConfig(obs_dim=obs_dim, planes=planes)
        found[f"algebra, d = {2 * planes}"] = base
        found[f"output, d = {2 * planes}"] = dataclasses.replace(base, mixing="output")
        found[f"one expert, d = {2 * planes}"] = single_expert(base)
    found["linear latent, d = 8"] = linear_latent(LatentMoSConfig(obs_dim=obs_dim))
    return found


def splits(system: str, rows: int, seed: int) -> Data:
    """The observations of one system; 64 validation and 200 test trajectories."""
    config = {"seed": seed, "system": SYSTEMS[system] | {"rows": rows}}
    return simulate_splits(read_settings(config))


def run_fit(config: LatentMoSConfig, data: Data, seed: int) -> dict[str, Any]:
    """Errors and times of one fit."""
    start = time.perf_counter()
    found = fit(
        config,
        data.train.examples,
        data.val.examples,
        seed=seed,
        steps=_STEPS.value,
        multistart=_STARTS.value,
    )
    seconds = time.perf_counter() - start
    query = np.broadcast_to(data.test.times, data.test.truth.shape[:2])
    output = predict(found.model, found.variables, data.test.examples.context, query)
    return errors(np.asarray(output.mean), data) | {
        "validation_error": found.validation_error,
        "start_errors": list(found.start_errors),
        "seconds": seconds,
    }


def run_neural(name: str, data: Data, seed: int) -> dict[str, Any]:
    """The same of a model with a neural vector field, at the width that validates best."""
    from benchmarks.symmetries_neural import fit_neural

    start = time.perf_counter()
    found = fit_neural(
        name, data, seed=seed, steps=_NEURAL_STEPS.value, starts=_STARTS.value, widths=(2, 8)
    )
    return errors(found.answer, data) | {
        "validation_error": found.validation_error,
        "width": found.width,
        "seconds": time.perf_counter() - start,
    }


def run_system(results: "Results", system: str, rows: int, seed: int) -> None:
    """Every model of one system, number of rows and seed that is not yet in the results."""
    data = splits(system, rows, seed)
    prefix = f"{system}/{rows}/{seed}"
    for name, answer in untrained_baselines(data).items():
        results.once(f"{prefix}/{name}", lambda answer=answer: errors(answer, data))
    sizes = [int(size) for size in _PLANES.value]
    for name, config in mos_configs(data.test.truth.shape[-1], sizes).items():
        if _wanted(name):
            results.once(f"{prefix}/{name}", lambda config=config: run_fit(config, data, seed))
    for name in NEURAL:
        if _wanted(name):
            results.once(f"{prefix}/{name}", lambda name=name: run_neural(name, data, seed))


def run_recovery(seed: int) -> dict[str, Any]:
    """Frequency and canonical angle of a free 2 x 2 generator on one oscillator, omega = 1.3.

    Both observed through a random linear map and through tanh of it; best of 3 starts.
    """
    found = {}
    for nonlinear in (False, True):
        runs = [oscillators(seed * 2 + part, 64, nonlinear=nonlinear) for part in (0, 1)]
        train, val = (low_resolution(run, seed=seed + part) for part, run in enumerate(runs))
        config = LatentMoSConfig(obs_dim=5, generator="gl", experts=1, gate="fixed")
        result = fit(config, train.examples, val.examples, seed=seed, steps=1000, multistart=3)
        matrix = np.asarray(generator_matrices(result.model, result.variables))[0, 0]
        omega = float(np.abs(np.asarray(spectrum(result.model, result.variables)).imag).max())
        found["tanh" if nonlinear else "linear"] = {
            "omega": omega,
            "relative_error": abs(omega - 1.3) / 1.3,
            "canonical_angle": canonical_angle(matrix),
            "start_errors": list(result.start_errors),
        }
    return found


def run_memory() -> dict[str, Any]:
    """Compiled and resident size of 1,000 rows x 200 observations x 64 queries in one call."""
    import resource

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


def run_speed() -> dict[str, Any]:
    """Training steps a second of each model on the same pendulum batch, in turn, five rounds."""
    from benchmarks.symmetries_neural import speed_steps

    steps = speed_steps(splits("pendulum", 64, 0))
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
        for name, (step, count) in steps.items():
            start = time.perf_counter()
            for _ in range(count):
                loss = step()
            jax.block_until_ready(loss)
            rates[name].append(count / (time.perf_counter() - start))
    return {name: {"steps_per_second": values} for name, values in rates.items()}


class Results:
    """Figures by key, written to a JSON file as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, Any] = {}
        if path.exists():
            self.figures = json.loads(path.read_text())["figures"]

    def once(self, key: str, measure: Callable[[], Any]) -> None:
        """Measures what is not there yet."""
        if key in self.figures:
            return
        logging.info("%s", key)
        self.figures[key] = measure()
        self.write()

    def write(self) -> None:
        """Writes all figures."""
        record = {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "steps": _STEPS.value,
            "neural_steps": _NEURAL_STEPS.value,
            "starts": _STARTS.value,
            "figures": self.figures,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1) + "\n")


def summarize(figures: dict[str, Any], system: str, rows: int) -> dict[str, dict[str, Any]]:
    """Medians over seeds by model, and the algebra model whose size validates best seed by seed."""
    by_seed: dict[str, dict[str, Any]] = {}
    for key, record in figures.items():
        parts = key.split("/")
        if parts[:2] == [system, str(rows)] and len(parts) == 4:
            by_seed.setdefault(parts[2], {})[parts[3]] = record
    for models in by_seed.values():
        sizes = [record for name, record in models.items() if name.startswith("algebra, d")]
        if sizes:
            models[CHOSEN] = min(sizes, key=lambda record: record["validation_error"])
    names = list(dict.fromkeys(name for models in by_seed.values() for name in models))
    summary = {}
    for name in names:
        runs = [models[name] for models in by_seed.values() if name in models]
        summary[name] = {"seeds": len(runs)} | {
            kind: float(np.median([run[kind] for run in runs]))
            for kind in ("interpolation", "extrapolation")
        }
    return summary


def verdicts(system: str, summary: dict[str, dict[str, Any]]) -> list[str]:
    """What was required of a system, and whether it was met."""
    if CHOSEN not in summary or system not in BARS:
        return []
    own, cubic = summary[CHOSEN], summary["cubic spline, then persistence"]
    lines = []
    for kind, bar in zip(("interpolation", "extrapolation"), BARS[system], strict=True):
        lines.append(_verdict(f"{system} {kind} {own[kind]:.4f} <= {bar}", own[kind] <= bar))
    gain = cubic["interpolation"] / own["interpolation"]
    lines.append(_verdict(f"{system} {gain:.1f} times better than the spline >= 4", gain >= 4))
    both = [summary.get(f"{mixing}, d = 2") for mixing in ("algebra", "output")]
    if all(both) and system != "swing_wscc9":
        ratio = both[0]["extrapolation"] / both[1]["extrapolation"]
        text = f"{system} algebra / output in extrapolation at d = 2, {ratio:.2f} <= 0.6"
        lines.append(_verdict(text, ratio <= 0.6))
    return lines


def _verdict(text: str, is_met: bool) -> str:
    return f"{'met' if is_met else 'MISSED'}: {text}"


def print_tables(figures: dict[str, Any]) -> None:
    """Prints what there is as Markdown tables, and the verdicts."""
    cases = dict.fromkeys(tuple(key.split("/")[:2]) for key in figures if key.count("/") == 3)
    for system, rows in cases:
        summary = summarize(figures, system, int(rows))
        print(f"\n{system}, {rows} training trajectories; medians over seeds\n")
        print("| model | interpolation | extrapolation | seeds |\n| --- | --- | --- | --- |")
        for name, row in summary.items():
            print(
                f"| {name} | {row['interpolation']:.4f} | {row['extrapolation']:.4f} "
                f"| {row['seeds']} |"
            )
        if rows == "64":
            print("\n".join(["", *verdicts(system, summary)]))
    for key, record in figures.items():
        if key.count("/") != 3:
            print(f"\n{key}: {json.dumps(record, indent=1)}")


def _wanted(name: str) -> bool:
    return any(name.startswith(wanted) for wanted in _MODELS.value)


def main(argv: Sequence[str]) -> None:
    """Runs what `--parts` names."""
    del argv
    results = Results(Path(_OUTPUT.value))
    seeds = range(_SEEDS.value)
    for part in _PARTS.value:
        sizes = SAMPLE_SIZES if part == "sample_efficiency" else (64,)
        for seed in seeds if part in PARTS else ():
            for rows in sizes:
                for system in [name for name in PARTS[part] if name in _SYSTEMS.value]:
                    run_system(results, system, rows, seed)
        if part == "recovery":
            for seed in seeds:
                results.once(f"recovery/{seed}", lambda seed=seed: run_recovery(seed))
        if part == "memory":
            results.once("memory", run_memory)
        if part == "speed":
            results.once("speed", run_speed)
    print_tables(results.figures)


_ALL = ["accuracy", "recovery", "memory", "speed", "chaotic", "sample_efficiency"]
_OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/symmetries.json", "JSON to write.", allow_override=True
)
_PARTS = flags.DEFINE_multi_enum("parts", _ALL, _ALL, "What to run.", allow_override=True)
_SEEDS = flags.DEFINE_integer("symmetries_seeds", 3, "Number of seeds.", allow_override=True)
_SYSTEMS = flags.DEFINE_list("systems", list(SYSTEMS), "Systems to run.", allow_override=True)
_STEPS = flags.DEFINE_integer(
    "symmetries_steps", 1500, "Optimiser steps of a start.", allow_override=True
)
_NEURAL_STEPS = flags.DEFINE_integer(
    "neural_steps", 1500, "The same for neural ODEs.", allow_override=True
)
_STARTS = flags.DEFINE_integer("starts", 2, "Starts of every fit.", allow_override=True)
_PLANES = flags.DEFINE_list(
    "planes", ["1", "2"], "Numbers of latent planes compared.", allow_override=True
)
_MODELS = flags.DEFINE_multi_string(
    "models",
    ["algebra", "output", "one expert", "linear", *NEURAL],
    "Beginnings of names to run.",
    allow_override=True,
)

if __name__ == "__main__":
    app.run(main)
