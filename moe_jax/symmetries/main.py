"""Fits a latent mixture of symmetries to few and noisy observations of a simulated system.

python -m moe_jax.symmetries.main --config=configs/symmetries/pendulum.py --workdir=runs/pendulum

Ends with a table against baselines and a figure. Started again with the same command, it goes on
from the newest checkpoint in the workdir.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from moe_jax.symmetries.baselines import interpolate, linear_latent, training_mean
from moe_jax.symmetries.fit import FitResult, fit
from moe_jax.symmetries.model import predict
from moe_jax.symmetries.neural import fit_neural, predict_neural
from moe_jax.symmetries.plots import Portrait, plot_portrait
from moe_jax.symmetries.sample import Split, low_resolution
from moe_jax.symmetries.settings import SYSTEMS, Settings, model_config, read_settings
from moe_jax.symmetries.spectrum import anchor_spectrum, spectrum
from moe_jax.training import (
    Interrupts,
    exit_code,
    lock_workdir,
    prepare_workdir,
    run_program,
)

PORTRAIT_ROWS = 24


class Data(NamedTuple):
    """Few observations of three independent sets of trajectories of one system."""

    train: Split
    val: Split
    test: Split
    std: np.ndarray


def fit_system(config: Mapping[str, Any], workdir: str | Path) -> int:
    """Simulates, fits, compares and draws; resumes if the workdir holds checkpoints.

    Writes to the workdir: `config.json`, a folder of checkpoints and metrics for each model,
    `evaluation.json` and `portrait.png`.

    Returns:
        The exit status: 0 when the run is complete and after SIGTERM, 130 after Ctrl-C.

    Raises:
        ValueError: for a configuration or workdir that cannot be used.
        TrainingDivergedError: see `moe_jax.training.train`.
    """
    settings = read_settings(config)
    folder = prepare_workdir(workdir)
    with Interrupts() as interrupts, lock_workdir(folder):
        _keep_configuration(folder, config)
        data = simulate_splits(settings)
        fits: dict[int, FitResult] = {}
        for planes in settings.train.planes:
            logging.info("fitting with %d latent planes", planes)
            name = f"planes_{planes}"
            fits[planes] = _fit(settings, data, planes, folder / name, interrupts)
            if interrupts.requested is not None:
                return _stopped(interrupts)
        chosen = min(fits, key=lambda planes: fits[planes].validation_error)
        best = fits[chosen]
        answers = {"latent mixture of symmetries": _predictions(best, data.test)}
        answers |= untrained_baselines(data)
        if settings.train.linear_latent:
            logging.info("fitting the linear latent model")
            linear = _fit(settings, data, 4, folder / "linear_latent", interrupts, is_linear=True)
            if interrupts.requested is not None:
                return _stopped(interrupts)
            answers["linear latent"] = _predictions(linear, data.test)
        for name in settings.train.neural:
            logging.info("fitting the %s", name)
            neural = fit_neural(
                name,
                data.train.examples,
                data.val.examples,
                seed=settings.seed,
                steps=settings.train.steps,
                batch_size=settings.train.batch_size,
                starts=settings.train.multistart,
                interrupts=interrupts,
            )
            if interrupts.requested is not None:
                return _stopped(interrupts)
            context = data.test.examples.context
            answers[name] = np.asarray(predict_neural(neural, context, _grid(data.test)))
        table = {name: errors(answer, data) for name, answer in answers.items()}
        record = {
            "system": settings.system.name,
            "planes": chosen,
            "validation_error": {str(p): found.validation_error for p, found in fits.items()},
            "errors": table,
        }
        (folder / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n")
        plot_portrait(make_portrait(best, data.test), folder / "portrait.png")
        print_table(table, settings.system.name, chosen)
        print(f"figure in {folder / 'portrait.png'}")
    return 0


def simulate_splits(settings: Settings) -> Data:
    """Training, validation and test sets, whose trajectories have seeds of their own."""
    system = settings.system
    rows = (system.rows, system.val_rows, system.test_rows)
    simulator, options = SYSTEMS[system.name], dict(system.options)
    runs = [
        simulator(3 * settings.seed + part, count, **options) for part, count in enumerate(rows)
    ]
    std = runs[0].values.std((0, 1))
    splits = [
        low_resolution(
            run,
            seed=3 * settings.seed + part + 10_000,
            fraction=system.fraction,
            noise=system.noise,
            std=std,
        )
        for part, run in enumerate(runs)
    ]
    train, val, test = splits
    return Data(train=train, val=val, test=test, std=std)


def untrained_baselines(data: Data) -> dict[str, np.ndarray]:
    """Answers [rows, times, channels] of the baselines that need no training."""
    context = data.test.examples.context
    query = _grid(data.test)
    mean = training_mean(data.train.examples.context)
    return {
        "cubic spline, then persistence": interpolate(context, query, kind="cubic"),
        "linear interpolation, then persistence": interpolate(context, query, kind="linear"),
        "persistence": interpolate(context, query, kind="persistence"),
        "training mean": np.broadcast_to(mean, data.test.truth.shape),
    }


def errors(answer: np.ndarray, data: Data) -> dict[str, float]:
    """Mean squared error on the noise-free truth, in variances of the training trajectories."""
    square = np.square((np.asarray(answer, np.float64) - data.test.truth) / data.std)
    return {
        "interpolation": float(square[data.test.is_interpolation].mean()),
        "extrapolation": float(square[data.test.is_extrapolation].mean()),
    }


def make_portrait(result: FitResult, test: Split) -> Portrait:
    """What the figure shows, of the first rows of the test set."""
    context, query = test.examples.context, _grid(test)
    output = predict(result.model, result.variables, context, query)
    rows = min(PORTRAIT_ROWS, len(query))
    before = np.sum(context.times[:, None, :] <= query[:, :, None], axis=-1) - 1
    gate = np.asarray(output.gates)[0, ..., 0]
    gate = np.take_along_axis(gate, np.maximum(before, 0), axis=1)
    config = result.model.config
    acting = np.zeros(0, complex)
    if config.generator == "rst" and config.mixing == "algebra":
        acting = anchor_spectrum(result.model, result.variables, output)[:rows].ravel()
    return Portrait(
        times=test.times,
        truth=test.truth[:rows],
        predicted=np.asarray(output.mean)[:rows],
        given_times=list(context.times[:rows]),
        given_values=list(context.values[:rows]),
        latent=np.asarray(output.latent)[:rows],
        gate=gate[:rows],
        spectrum=np.asarray(spectrum(result.model, result.variables))[0],
        acting=acting,
    )


def print_table(table: Mapping[str, Mapping[str, float]], system: str, planes: int) -> None:
    """Prints the errors as a Markdown table."""
    print(f"\n{system}, {planes} latent planes chosen on validation; mean squared error on the")
    print("noise-free truth, in variances of the training trajectories\n")
    print("| model | interpolation | extrapolation |")
    print("| --- | --- | --- |")
    for name, error in table.items():
        print(f"| {name} | {error['interpolation']:.4f} | {error['extrapolation']:.4f} |")


def _fit(
    settings: Settings,
    data: Data,
    planes: int,
    folder: Path,
    interrupts: Interrupts,
    *,
    is_linear: bool = False,
) -> FitResult:
    config = model_config(settings, data.train.truth.shape[-1], planes)
    return fit(
        linear_latent(config) if is_linear else config,
        data.train.examples,
        data.val.examples,
        seed=settings.seed,
        steps=settings.train.steps,
        batch_size=settings.train.batch_size,
        drop=settings.train.drop,
        multistart=settings.train.multistart,
        loss=settings.loss,
        optimizer=settings.optimizer,
        workdir=folder,
        interrupts=interrupts,
        show=True,
    )


def _predictions(result: FitResult, test: Split) -> np.ndarray:
    output = predict(result.model, result.variables, test.examples.context, _grid(test))
    return np.asarray(output.mean)


def _grid(test: Split) -> np.ndarray:
    return np.broadcast_to(test.times, test.truth.shape[:2])


def _keep_configuration(folder: Path, config: Mapping[str, Any]) -> None:
    """Checkpoints belong to one configuration: another one needs another folder."""
    path = folder / "config.json"
    text = json.dumps(config, indent=1) + "\n"
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{path} holds another configuration than this run's; use another workdir")
    path.write_text(text)


def _stopped(interrupts: Interrupts) -> int:
    print("stopped; to resume, run the same command again")
    return exit_code(interrupts.requested)


def run() -> None:
    """Entry point of the program."""
    run_program(fit_system, "runs/symmetries")


if __name__ == "__main__":
    run()
