"""Measures how fast the estimates of contaminated mixtures of experts approach the truth.

python -m moe_jax.contaminated.main --config=configs/contaminated/rates.py --workdir=runs/rates

Fits many simulated data sets of every size of every design that the configuration names, and writes
tables and figures. Started again with the same command, it goes on where it stopped. Any entry of
the configuration can be set on the command line: --config.study.replicates=100.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from moe_jax.contaminated.designs import DESIGNS
from moe_jax.contaminated.plots import plot_rates
from moe_jax.contaminated.rates import (
    RateStudy,
    SizeFits,
    assemble_study,
    fit_size,
    format_table,
    slope_table,
    study_record,
)
from moe_jax.contaminated.settings import RateSettings, check_same_study, read_settings
from moe_jax.training.interrupts import Interrupts, exit_code
from moe_jax.training.program import run_program
from moe_jax.training.progress import Progress
from moe_jax.training.workdir import lock_workdir, prepare_workdir


def run_rate_studies(config: Mapping[str, Any], workdir: str | Path) -> int:
    """Runs the studies of a configuration, from where an earlier run of it stopped.

    Writes to the workdir, each file whole or not at all: `config.json`; `fits/DESIGN_SIZE.json`
    with the estimates of every replicate so far; and of every design that is complete
    `DESIGN.json`, `DESIGN.txt` and `figures/DESIGN.png`.

    Returns:
        The exit status: 0 when all is complete, and also after SIGTERM, which leaves the rest to
        the next run; 130 after Ctrl-C.

    Raises:
        ValueError: for a configuration or workdir that cannot be used.
    """
    settings = read_settings(config)
    folder = prepare_workdir(workdir)
    with Interrupts() as interrupts, lock_workdir(folder):
        check_same_study(folder, config)
        _write(folder / "config.json", json.dumps(dict(config), indent=1) + "\n")
        (folder / "fits").mkdir(exist_ok=True)
        (folder / "figures").mkdir(exist_ok=True)
        total = len(settings.designs) * settings.replicates * sum(settings.sizes)
        with Progress(total, show=("replicates_per_second",)) as progress:
            before = 0
            for name in settings.designs:
                study = _run_design(name, settings, folder, progress, before, interrupts)
                if study is None:
                    break
                before += settings.replicates * sum(settings.sizes)
                progress.print(_write_results(study, settings, folder))
        if interrupts.requested is not None:
            print(f"the fits so far are saved in {folder}; to go on, run the same command again")
            return exit_code(interrupts.requested)
    return 0


def _run_design(
    name: str,
    settings: RateSettings,
    folder: Path,
    progress: Progress,
    before: int,
    interrupts: Interrupts,
) -> RateStudy | None:
    """All fits of one design; None if a signal stopped them."""
    design = DESIGNS[name]
    fits = []
    for size in settings.sizes:
        path = folder / "fits" / f"{name}_{size}.json"
        fit = SizeFits.from_json(path.read_text()) if path.exists() else SizeFits(size)
        for more in fit_size(
            jax.random.key(settings.seed),
            design,
            size,
            settings.replicates,
            start=settings.start,
            chunk_rows=settings.chunk_rows,
            done=fit,
        ):
            fit = more
            _write(path, fit.to_json())
            progress.update(before + size * fit.count)
            if interrupts.requested is not None:
                return None
        before += size * settings.replicates
        progress.update(before)
        # A run with more replicates may have left some.
        fits.append(fit.first(settings.replicates))
    return assemble_study(design, fits)


def _write_results(study: RateStudy, settings: RateSettings, folder: Path) -> str:
    slopes = slope_table(study, level=settings.level, num_draws=settings.bootstrap)
    text = format_table(study, slopes)
    figure = folder / "figures" / f"{study.design}.png"
    partial = figure.with_name(f".{figure.name}")
    plot_rates(study, slopes, partial)
    partial.replace(figure)
    _write(folder / f"{study.design}.txt", text + "\n")
    record = study_record(study, slopes)
    _write(folder / f"{study.design}.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return f"{text}\nfigure: {figure}\n"


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def run() -> None:
    """Entry point of the program."""
    run_program(run_rate_studies, "runs/rates")


if __name__ == "__main__":
    run()
