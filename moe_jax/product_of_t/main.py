"""Fits a product of t-experts to a target and compares it with a Gaussian and the truth.

python -m moe_jax.product_of_t.main --config=configs/product_of_t/garch11.py --workdir=runs/garch11

Any entry of the configuration can be set on the command line: --config.fit.rounds=3.
"""

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_jax.product_of_t.fit import FitResult, fit_product_of_t
from moe_jax.product_of_t.gaussian import fit_gaussian
from moe_jax.product_of_t.plots import (
    plot_contours,
    plot_experts,
    plot_history,
    plot_marginals,
)
from moe_jax.product_of_t.posteriordb import POSTERIORS, load_posterior
from moe_jax.product_of_t.settings import FitSettings
from moe_jax.product_of_t.simulate import SYNTHETIC
from moe_jax.training.configs import check_known, from_mapping
from moe_jax.training.metrics import MetricWriter
from moe_jax.training.program import run_program
from moe_jax.training.progress import Progress
from moe_jax.training.workdir import lock_workdir, prepare_workdir

NUM_REFERENCE = 4000


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """What to fit.

    Attributes:
        name: of a target of `simulate.SYNTHETIC` or of `posteriordb.POSTERIORS`.
        dim: coordinates of a synthetic target; 0 for a posterior, which has its own.

    Raises:
        ValueError: for an unknown name, or a dim that does not fit.
    """

    name: str
    dim: int = 0

    def __post_init__(self) -> None:
        if self.name in POSTERIORS:
            if self.dim != 0:
                raise ValueError(f"dim={self.dim} must be 0: {self.name} has its own")
        elif self.name not in SYNTHETIC:
            raise ValueError(
                f"name={self.name!r} must be one of {', '.join([*SYNTHETIC, *POSTERIORS])}"
            )
        elif self.dim < 2:
            raise ValueError(f"dim={self.dim} of {self.name} must be at least 2")


@dataclasses.dataclass(frozen=True)
class _Target:
    log_density: Callable[[Any], Any]
    dim: int
    names: tuple[str, ...]
    reference: np.ndarray
    constrain: Callable[[np.ndarray], dict[str, np.ndarray]]


def fit_target(config: Mapping[str, Any], workdir: str | Path) -> int:
    """Fits, compares with reference draws and a Gaussian of as many scores, and draws.

    Writes to the workdir: `config.json`; `metrics.jsonl` with the diagnostics of every iteration
    and TensorBoard events; `draws.npz`, the product's draws by site, [1, draws, ...] each, which
    `arviz.from_dict({"posterior": dict(numpy.load(...))})` takes; `experts.npz` with exponents,
    centres and precisions; `result.json`; and `figures/`.

    Returns:
        The exit status: 0.

    Raises:
        ValueError: for a configuration or workdir that cannot be used, or a hopeless target.
    """
    check_known(config, dict.fromkeys(("seed", "target", "fit", "compare")), "")
    target_config = from_mapping(TargetConfig, config["target"], "target")
    settings = from_mapping(FitSettings, config.get("fit", {}), "fit")
    folder = prepare_workdir(workdir)
    target = _load_target(target_config)
    fit_key, gaussian_key, draw_key = jax.random.split(jax.random.key(config.get("seed", 0)), 3)
    with lock_workdir(folder):
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        result = _fit(fit_key, target, settings, folder)
        gaussian = None
        if config.get("compare", True):
            num_scores = int(result.evaluations.total_scores)
            print(f"fitting a Gaussian with as many scores, {num_scores:,}", file=sys.stderr)
            gaussian = fit_gaussian(gaussian_key, target.log_density, target.dim, num_scores)
        others = {} if gaussian is None else {"Gaussian": _draw_gaussian(draw_key, *gaussian)}
        _write(folder, target, result, others)
        _draw(folder, target, result, gaussian, others)
    return 0


def _load_target(config: TargetConfig) -> _Target:
    if config.name in POSTERIORS:
        posterior = load_posterior(config.name)
        return _Target(
            posterior.log_density,
            posterior.dim,
            posterior.parameters,
            posterior.draws,
            posterior.constrain,
        )
    synthetic = SYNTHETIC[config.name](config.dim)
    with jax.enable_x64(True):
        reference = np.asarray(synthetic.sample(jax.random.key(20_000), NUM_REFERENCE))
    names = tuple(f"z[{index + 1}]" for index in range(config.dim))
    return _Target(synthetic.log_density, config.dim, names, reference, lambda draws: {"z": draws})


def _fit(key: jax.Array, target: _Target, settings: FitSettings, folder: Path) -> FitResult:
    total = settings.rounds * settings.iterations
    shown = ("fisher_divergence", "ess", "num_active")
    with (
        MetricWriter(folder) as writer,
        Progress(total, show=shown) as progress,
        # Printed at the end, with the other results.
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)

        def report(iteration: int, record: Mapping[str, Any]) -> None:
            writer.write(iteration + 1, "fit", record)
            progress.update(iteration + 1, **record)

        return fit_product_of_t(
            key, target.log_density, target.dim, settings=settings, callback=report
        )


def _draw_gaussian(key: jax.Array, loc: np.ndarray, scale: np.ndarray) -> np.ndarray:
    normals = np.asarray(jax.random.normal(key, (NUM_REFERENCE, len(loc))), np.float64)
    return loc + normals @ scale.T


def _write(
    folder: Path, target: _Target, result: FitResult, others: Mapping[str, np.ndarray]
) -> None:
    sites = target.constrain(np.asarray(result.draws))
    draws: dict[str, Any] = {name: site[None] for name, site in sites.items()}
    np.savez(folder / "draws.npz", **draws)
    distribution = result.distribution
    exponents = np.asarray(distribution.exponents)
    experts: dict[str, Any] = {
        name: np.asarray(getattr(distribution.experts, name))
        for name in ("full_loc", "full_precision", "factored_loc", "factored_factor",
                     "factored_diagonal")
    }  # fmt: skip
    np.savez(folder / "experts.npz", exponents=exponents, **experts)
    pool = result.pool
    moments = {"product": result.draws, **others}
    errors = {
        label: _errors(draws.mean(axis=0), draws.std(axis=0), target.reference)
        for label, draws in moments.items()
    }
    errors["pool"] = _errors(pool.mean, pool.standard_deviation, target.reference)
    evaluations = result.evaluations
    record = {
        "pareto_k": float(result.pareto_k),
        "pool_pareto_k": pool.pareto_k,
        "pool_ess": pool.ess,
        "trusted": bool(result.trusted),
        "warnings": list(result.warnings),
        "scores": int(evaluations.total_scores),
        "log_densities": int(evaluations.log_density),
        "degrees_of_freedom": float(distribution.degrees_of_freedom),
        "log_evidence": float(result.log_evidence),
        "normalizer_ess": float(result.normalizer_ess),
        "active_experts": int(np.sum(exponents > 1e-6 * np.sum(exponents))),
        "errors": errors,
    }
    (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"k-hat {record['pareto_k']:.2f}, {record['active_experts']} experts active, "
        f"{record['degrees_of_freedom']:.1f} degrees of freedom, {record['scores']:,} scores"
    )
    for label, error in errors.items():
        print(
            f"{label}: means within {max(error['mean']):.3f} reference standard deviations, "
            f"standard deviations within {max(error['sd']):.1%}"
        )
    for warning in result.warnings:
        print(f"warning: {warning}")


def _errors(
    mean: np.ndarray, deviation: np.ndarray, reference: np.ndarray
) -> dict[str, list[float]]:
    """Errors of means, in reference standard deviations, and relative ones of deviations."""
    sd = reference.std(axis=0)
    return {
        "mean": (np.abs(mean - reference.mean(axis=0)) / sd).tolist(),
        "sd": np.abs(deviation / sd - 1.0).tolist(),
    }


def _draw(
    folder: Path,
    target: _Target,
    result: FitResult,
    gaussian: tuple[np.ndarray, np.ndarray] | None,
    others: Mapping[str, np.ndarray],
) -> None:
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    draws = np.asarray(result.draws)
    distribution = result.distribution
    marginals = {"reference": target.reference, "product of t-experts": draws, **others}
    plot_marginals(marginals, target.names, figures / "marginals.png")
    if target.dim == 2:
        densities = {
            "target": target.log_density,
            "product of t-experts": distribution.unnormalized_log_prob,
        }
        if gaussian is not None:
            loc, scale = gaussian

            def log_normal(z: jax.Array) -> jax.Array:
                centred = jax.numpy.linalg.solve(jax.numpy.asarray(scale, z.dtype), z - loc)
                return -0.5 * (centred @ centred)

            densities["Gaussian (AutoMultivariateNormal)"] = log_normal
        plot_contours(densities, target.reference, figures / "contours.png")
    plot_history(result.history, figures / "history.png")
    exponents = np.asarray(distribution.exponents)
    plot_experts(
        distribution.experts, exponents, target.reference, target.names, figures / "experts.png"
    )
    print(f"figures in {figures}")


def run() -> None:
    """Entry point of the program."""
    run_program(fit_target, "runs/product_of_t")


if __name__ == "__main__":
    run()
