"""Acceptance figures of contaminated mixtures that need many fits.

python -m benchmarks.contaminated_rates --scenarios=T1,T2,T3,T5,T6,T9

T1 to T3 measure slopes in the paper's experiments (a), (b-i) and (b-ii) as printed, 40 replicates
of 7 sizes from 10^3 to 10^5; T5 the growth of standard deviations as the experts merge; T6 coverage
of 95% intervals; T9 the size of the Monte-Carlo test of no contamination. SLOW1 to SLOW3 are the
designs whose slow rates an exact fit shows. Each prints its figures beside what is accepted, with
its run time, and is written to the JSON file, where figures of scenarios that are not run stay.
A quarter of an hour at most each on 2 cores; --quick does each in seconds and accepts nothing.
"""

import functools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian, GaussianLinear, LinearGate
from moe_jax.contaminated.designs import DESIGNS, Design
from moe_jax.contaminated.plots import plot_rates
from moe_jax.contaminated.rates import (
    efficiency,
    fit_size,
    format_table,
    rate_study,
    slope_table,
    study_record,
)
from moe_jax.contaminated.simulate import simulate
from moe_jax.training.compilation import keep_compiled_programs
from moe_jax.training.memory import keep_freed_memory

SIZES = (1000, 2154, 4642, 10_000, 21_544, 46_416, 100_000)
# Slope and tolerance by row of `ROWS`.
ACCEPTED = {
    "T1": {
        "beta": (-0.50, 0.04),
        "exp_tau": (-0.50, 0.09),
        "eta": (-0.50, 0.04),
        "nu": (-0.50, 0.09),
    },
    "T2": {
        "beta": (-0.46, 0.04),
        "exp_tau": (-0.44, 0.09),
        "eta": (-0.505, 0.04),
        "nu": (-0.47, 0.09),
    },
    "T3": {
        "beta": (-0.50, 0.04),
        "exp_tau": (-0.50, 0.09),
        "eta": (-0.52, 0.04),
        "nu": (-0.54, 0.09),
    },
}
STUDIES = {
    "T1": ("paper_a", SIZES, 40),
    "T2": ("paper_b1", SIZES, 40),
    "T3": ("paper_b2", SIZES, 40),
    "SLOW1": ("slow_constant_gate", (3162, 7943, 19_953, 50_119, 125_893), 60),
    "SLOW2": ("slow_moving_gate", (3162, 7943, 19_953, 50_119, 125_893), 60),
    "SLOW3": ("slow_low_noise", (1000, 3162, 10_000, 31_623, 100_000), 60),
}
EFFICIENCY = (0.8, 1.35)


class Check(dict):
    """One figure: its value, the range that is accepted, and whether it is inside.

    An end that is open is None, since JSON knows no infinity.
    """

    def __init__(self, value: float, low: float, high: float) -> None:
        accept = [end if math.isfinite(end) else None for end in (low, high)]
        super().__init__(value=float(value), accept=accept, passed=bool(low <= value <= high))


def slopes(name: str, quick: bool, figures: Path) -> dict[str, Any]:
    """T1 to T3 and the slow designs."""
    design, sizes, replicates = STUDIES[name]
    if quick:
        sizes, replicates = (500, 512, 600, 620, 640), 4
    study = rate_study(jax.random.key(0), DESIGNS[design], sizes, replicates)
    table = slope_table(study)
    print(format_table(study, table))
    figures.mkdir(parents=True, exist_ok=True)
    plot_rates(study, table, figures / f"contaminated_{design}.png")
    checks = {
        f"slope {row}": Check(table.ours[row].slope, middle - width, middle + width)
        for row, (middle, width) in ACCEPTED.get(name, {}).items()
    }
    if checks:
        ratios = efficiency(study)
        checks["least RMSE / bound"] = Check(ratios.min(), *EFFICIENCY)
        checks["largest RMSE / bound"] = Check(ratios.max(), *EFFICIENCY)
    return {"study": study_record(study, table), "checks": checks}


def merging_experts(name: str, quick: bool, figures: Path) -> dict[str, Any]:
    """T5: local exponents of the mean error between the last two distances."""
    del name, figures
    size, replicates = (2000, 4) if quick else (40_000, 48)
    distances = (1.0, 0.7, 0.5, 0.35)
    found, checks = {}, {}
    for gate, beta in (("constant gate", (0.0, 0.0)), ("moving gate", (1.0, 0.5))):
        errors = [
            _linear_errors(np.array(beta), distance, size, replicates) for distance in distances
        ]
        step = np.log(distances[-2] / distances[-1])
        found[gate] = {
            "deviation": {row: [error[row] for error in errors] for row in errors[0]},
            "exponent": {
                row: float(np.log(errors[-1][row] / errors[-2][row]) / step) for row in errors[0]
            },
        }
    constant, moving = found["constant gate"]["exponent"], found["moving gate"]["exponent"]
    checks["constant gate, tau"] = Check(constant["tau"], 1.6, np.inf)
    checks["constant gate, eta"] = Check(constant["eta"], 0.6, np.inf)
    checks["moving gate, tau"] = Check(moving["tau"], -np.inf, 1.5)
    checks["moving gate, eta"] = Check(moving["eta"], -np.inf, 0.5)
    for gate, result in found.items():
        print(f"{gate}: exponents {_rounded(result['exponent'])}")
    return {"distances": distances, **found, "checks": checks}


def _linear_errors(
    beta: np.ndarray, distance: float, size: int, replicates: int
) -> dict[str, float]:
    """Root mean square errors of linear experts without intercept, d = 2, nu0 = 1, tau* = 0.

    The slope moves and the variance does not. Where both move by half of the squared distance, the
    exact information has the exponent 0.50 for eta between the last two distances, not 0.73.
    """
    truth = {
        "beta": beta,
        "tau": np.asarray(0.0),
        "eta": np.array([1.0 + distance, 0.0]),
        "log_nu": np.asarray(0.0),
    }
    design = Design("merging", "linear experts", _linear_model(), lambda n: truth, dim=2)
    *_, fits = fit_size(jax.random.key(1), design, size, replicates)
    # The errors are of e^tau = 1 and of nu; the first is |tau| to first order.
    roots = np.sqrt(np.mean(np.square(fits.errors), axis=0))
    return dict(zip(("beta", "tau", "eta", "nu"), map(float, roots), strict=True))


@functools.cache
def _linear_model() -> ContaminatedMoE:
    return ContaminatedMoE(
        FrozenGaussian(lambda x: x[:, 0], 1.0), expert=GaussianLinear(intercept=False)
    )


def coverage(name: str, quick: bool, figures: Path) -> dict[str, Any]:
    """T6: 95% intervals of experiment (a), n = 1000, and likelihood ratios against the truth."""
    del name, figures
    size, replicates = 1000, 20 if quick else 400
    design = DESIGNS["paper_a"]
    truth = design.truth(size)
    x, y = zip(*(_data(design, truth, size, index) for index in range(replicates)), strict=True)
    many = design.model.fit_many(np.stack(x), np.stack(y), starts=truth)
    at_truth = np.array(
        [np.sum(design.model.log_prob(truth, *data)) for data in zip(x, y, strict=True)]
    )
    statistic = 2.0 * (many.loglik - at_truth)
    half = 1.959964 * np.sqrt(np.diagonal(many.cov, axis1=1, axis2=2))
    target = np.concatenate([np.ravel(truth[row]) for row in ("beta", "tau", "eta", "log_nu")])
    inside = np.abs(many.theta - target) <= half
    parts = {
        "beta": inside[:, :8],
        "tau": inside[:, 8],
        "eta": inside[:, 9:17],
        "log nu": inside[:, 17],
    }
    checks = {f"coverage {row}": Check(part.mean(), 0.92, 0.975) for row, part in parts.items()}
    checks["mean likelihood ratio, 18 parameters"] = Check(statistic.mean(), 17.1, 18.9)
    statuses = {status: many.status.count(status) for status in set(many.status)}
    return {"replicates": replicates, "n": size, "statuses": statuses, "checks": checks}


def _data(design: Design, truth: Mapping[str, Any], size: int, index: int) -> Any:
    x_key, y_key = jax.random.split(jax.random.fold_in(jax.random.key(2), index))
    x = design.draw_x(x_key, size)
    return x, simulate(y_key, design.model, truth, x)


def test_size(name: str, quick: bool, figures: Path) -> dict[str, Any]:
    """T9: how often a true null is rejected at 5%, d = 1, n = 100, 99 draws a test."""
    del name, figures
    num_tests, num_draws = (4, 19) if quick else (200, 99)
    model = ContaminatedMoE(
        FrozenGaussian(lambda x: jnp.zeros(x.shape[0]), 1.0),
        expert=GaussianLinear(),
        gate=LinearGate(),
        nu_bounds=(1 / 25, 25.0),
    )
    p_values = []
    for index in range(num_tests):
        x_key, y_key, test_key = jax.random.split(jax.random.fold_in(jax.random.key(3), index), 3)
        x = np.asarray(jax.random.normal(x_key, (100, 1)), np.float64)
        y = np.asarray(jax.random.normal(y_key, (100,)), np.float64)
        p_values.append(model.test_no_contamination(x, y, key=test_key, n_boot=num_draws).p_value)
    rejected = float(np.mean(np.array(p_values) <= 0.05))
    return {
        "tests": num_tests,
        "draws": num_draws,
        "p_values": list(map(float, p_values)),
        "checks": {"rejected at 5%": Check(rejected, 0.02, 0.09)},
    }


SCENARIOS: dict[str, Callable[[str, bool, Path], dict[str, Any]]] = {
    **{name: slopes for name in STUDIES},
    "T5": merging_experts,
    "T6": coverage,
    "T9": test_size,
}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def main(argv: Sequence[str]) -> None:
    """Runs the scenarios, one after another."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    keep_freed_memory()
    keep_compiled_programs()
    output = Path(flags.FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(output.read_text()) if output.exists() else {}
    for name in flags.FLAGS.scenarios:
        began = time.monotonic()
        result = SCENARIOS[name](name, flags.FLAGS.quick, output.parent)
        result["seconds"] = round(time.monotonic() - began, 1)
        result["machine"] = f"{os.cpu_count()} cores, Python {platform.python_version()}"
        results[name] = result
        print(f"\n{name}: {result['seconds']} s")
        for label, check in result["checks"].items():
            verdict = "accepted" if check["passed"] else "NOT ACCEPTED"
            print(f"  {label:40} {check['value']:8.3f}  in {check['accept']}  {verdict}")
        partial = output.with_name(f"{output.name}.partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(output)


def run() -> None:
    """Defines the flags and runs."""
    flags.DEFINE_list("scenarios", ["T1", "T2", "T3", "T5", "T6", "T9"], "Which to run.")
    flags.DEFINE_bool("quick", False, "Tiny sizes: a check of the program, no measurement.")
    flags.DEFINE_string("output", "benchmarks/results/contaminated_rates.json", "File to write.")
    app.run(main)


if __name__ == "__main__":
    run()
