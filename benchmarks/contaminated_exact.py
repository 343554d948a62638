"""Acceptance figures of contaminated mixtures that need no replicates: T4, T7 and T8.

python -m benchmarks.contaminated_exact

T4: the exponents k of standard deviations that grow as Delta^-k while the experts merge, from the
exact Fisher information by quadrature. T7: score and observed information against autodiff, every
family. T8: the greatest fall of the objective in an EM step, many fits at once against one by one,
and the order of rows. The tests hold each to the same range. About a minute.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moe_jax.contaminated import (
    ConstantGate,
    ContaminatedMoE,
    Custom,
    CustomGate,
    FrozenGaussian,
    GaussianLinear,
    GaussianNonlinear,
    LinearGate,
    Multinomial,
    StudentT,
    likelihood,
    simulate,
)
from moe_jax.contaminated.designs import tanh_mean
from moe_jax.contaminated.exponents import exponents, gauss_hermite
from moe_jax.contaminated.layout import Family

D = 2
ROWS = 64

LINEAR = ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], 1.0), expert=GaussianLinear())
NO_INTERCEPT = ContaminatedMoE(LINEAR.frozen, expert=GaussianLinear(intercept=False))
TANH = ContaminatedMoE(
    FrozenGaussian(lambda x: np.tanh(x[:, 0]), 1.0),
    expert=GaussianNonlinear(tanh_mean, np.zeros(D)),
)
STILL, MOVING = (0.0, 0.0), (1.0, 0.5)
BOTH = {"eta": np.array([0.6, 0.4]), "log_nu": 0.7}
GENERIC = {"eta": np.array([0.6, 0.4]), "intercept": 0.7}
# Model, gate slope, direction of Delta, and the integers of the specification's section 3.2.
EXPONENTS: dict[str, tuple[ContaminatedMoE, Any, Mapping[str, Any], dict[str, int]]] = {
    "tanh, eta": (
        TANH,
        STILL,
        {"eta": np.array([0.8, 0.6])},
        {"beta": 1, "tau": 2, "eta": 1, "log_nu": 0},
    ),
    "tanh, nu": (TANH, STILL, {"log_nu": 1.0}, {"beta": 1, "tau": 2, "eta": 0, "log_nu": 1}),
    "tanh, both": (TANH, STILL, BOTH, {"beta": 1, "tau": 2, "eta": 1, "log_nu": 1}),
    "tanh, both, moving gate": (TANH, MOVING, BOTH, {"beta": 1, "tau": 1, "eta": 0, "log_nu": 0}),
    "no intercept, both": (NO_INTERCEPT, STILL, BOTH, {"beta": 1, "tau": 2, "eta": 1, "log_nu": 1}),
    "no intercept, both, moving gate": (
        NO_INTERCEPT,
        MOVING,
        BOTH,
        {"beta": 1, "tau": 1, "eta": 0, "log_nu": 0},
    ),
    "intercept, generic": (
        LINEAR,
        STILL,
        GENERIC,
        {"beta": 1, "tau": 2, "eta": 1, "intercept": 1, "log_nu": 0},
    ),
    "intercept, generic, moving gate": (
        LINEAR,
        MOVING,
        GENERIC,
        {"beta": 1, "tau": 1, "eta": 0, "intercept": 0, "log_nu": 0},
    ),
    "intercept only": (
        LINEAR,
        STILL,
        {"intercept": 1.0},
        {"beta": 2, "tau": 3, "eta": 1, "intercept": 2, "log_nu": 1},
    ),
}
EXPONENT_TOLERANCE = 0.12


def measure_exponents(name: str) -> dict[str, float]:
    """Exponents of a row of EXPONENTS, nu0 = 1 and tau* = 0, Delta from .08 to .04."""
    model, beta, direction, expected = EXPONENTS[name]
    params = {"beta": beta, "tau": 0.0, "eta": [1.0, 0.0], "intercept": 0.0, "log_nu": 0.0}
    params = {key: np.array(params[key]) for key in expected}
    points, weights = gauss_hermite(D, 16)
    return exponents(model, params, points, direction, weights=weights)


def _folded(params: Mapping[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    # Normal in log(1 + y^2), unnormalised: any function will do for derivatives.
    mean = x @ params["slope"] + params["level"]
    z = (jnp.log1p(jnp.square(y)) - mean) * jnp.exp(-params["log_scale"])
    return -0.5 * jnp.square(z) - params["log_scale"]


def _bent(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
    return params["a"] * jnp.sin(x[:, 0]) + params["b"] * jnp.square(x[:, 1]) * params["a"]


_TANH = GaussianNonlinear(tanh_mean, np.zeros(D))
_BENT = CustomGate(_bent, {"a": 0.0, "b": 0.0})
FAMILIES = {
    "linear": Family(GaussianLinear(), LinearGate()),
    "linear, no intercept": Family(GaussianLinear(intercept=False), LinearGate(features=(1,))),
    "tanh": Family(_TANH, LinearGate()),
    "t": Family(StudentT(), ConstantGate()),
    "t, df free": Family(StudentT(df=None), LinearGate()),
    "t around tanh": Family(StudentT(_TANH), _BENT),
    "multinomial": Family(Multinomial(3), LinearGate()),
    "custom": Family(
        Custom(_folded, {"level": 0.0, "log_scale": 0.0, "slope": np.zeros(D)}), LinearGate()
    ),
    "two linear": Family(GaussianLinear(), LinearGate(), 2),
    "two t, custom gate": Family(StudentT(df=None), _BENT, 2),
    "three multinomial": Family(Multinomial(3), ConstantGate(), 3),
}
DERIVATIVE_TOLERANCE = 1e-10


def make_rows(family: Family, rows: int = 7, seed: int = 0) -> tuple[jax.Array, likelihood.Rows]:
    """Parameters and weighted rows that owe nothing to each other; float64 must be enabled."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D))
    labels = family.expert.labels
    y = rng.integers(labels, size=rows).astype(float) if labels else rng.normal(size=rows)
    log_frozen = -0.5 * (y - x[:, 0]) ** 2
    theta = 0.7 * rng.normal(size=family.size(D))
    weight = rng.uniform(0.5, 2.0, size=rows)
    arrays = map(jnp.asarray, (x, y, log_frozen, weight))
    return jnp.asarray(theta), likelihood.make_rows(family, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _both_ways(family: Family, theta: jax.Array, rows: likelihood.Rows) -> Any:
    """Analytic and autodiff rows' scores, score and information."""
    moments = likelihood.moments(family, theta, rows)
    scores = jax.jacfwd(lambda t: likelihood.row_loglik(family, t, rows))(theta)
    return (
        (likelihood.row_scores(family, theta, rows), moments.score, moments.information),
        (
            scores,
            rows.weight @ scores,
            -jax.hessian(lambda t: likelihood.loglik(family, t, rows))(theta),
        ),
    )


def measure_derivatives(name: str) -> dict[str, float]:
    """Largest difference from autodiff relative to the largest entry."""
    with jax.enable_x64(True):
        by_hand, auto = _both_ways(FAMILIES[name], *make_rows(FAMILIES[name]))
        pairs = zip(("rows' scores", "score", "information"), by_hand, auto, strict=True)
        return {
            what: float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
            for what, ours, theirs in pairs
        }


def measure_invariances() -> dict[str, float]:
    """T8 at four data sets of `LINEAR`: the fall of a step, and relative changes of estimates."""
    truth = {
        "beta": [1.0, 0.0],
        "tau": -0.3,
        "eta": [-1.0, 0.5],
        "intercept": 4.0,
        "log_nu": -0.5,
    }
    x = np.random.default_rng(7).normal(size=(4, ROWS, D))
    keys = jax.random.split(jax.random.key(2), 4)
    y = np.stack([simulate(k, LINEAR, truth, one) for k, one in zip(keys, x, strict=True)])
    many = LINEAR.fit_many(x, y)
    fall, apart, order = 0.0, 0.0, 0.0
    for k, one in enumerate(many.theta):
        single = LINEAR.fit(x[k], y[k])
        steps = LINEAR.fit(x[k], y[k], method="em", max_iter=500).trace
        shuffle = np.random.default_rng(k).permutation(ROWS)
        shuffled = LINEAR.fit(x[k][shuffle], y[k][shuffle])
        size = 1.0 + np.abs(single.theta)
        fall = max(fall, float(np.max(-np.diff(steps) / (1 + np.abs(steps[1:])))))
        apart = max(apart, float(np.max(np.abs(one - single.theta) / size)))
        order = max(order, float(np.max(np.abs(shuffled.theta - single.theta) / size)))
    return {"fall of an EM step": fall, "many at once": apart, "order of rows": order}


INVARIANCE_TOLERANCE = {"fall of an EM step": 1e-10, "many at once": 1e-9, "order of rows": 1e-8}


def t4() -> dict[str, Any]:
    """Measured and expected exponents."""
    rows = {name: measure_exponents(name) for name in EXPONENTS}
    return {
        name: {"measured": found, "expected": EXPONENTS[name][3]} for name, found in rows.items()
    }


def t7() -> dict[str, Any]:
    """Differences from autodiff."""
    return {name: measure_derivatives(name) for name in FAMILIES}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {"T4": t4, "T7": t7, "T8": measure_invariances}


def main(argv: Sequence[str]) -> None:
    """Runs all and writes."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    results = {}
    for name, scenario in SCENARIOS.items():
        began = time.process_time()
        results[name] = {"figures": scenario(), "seconds": round(time.process_time() - began, 1)}
        print(f"{name}: {results[name]}")
    output = Path(flags.FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(output)


def run() -> None:
    """Defines the flag and runs."""
    flags.DEFINE_string("output", "benchmarks/results/contaminated_exact.json", "File to write.")
    app.run(main)


if __name__ == "__main__":
    run()
