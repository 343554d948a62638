"""The program end to end on tiny studies: what it leaves, going on, signals, bad input."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_jax.contaminated.main import run_rate_studies
from moe_jax.contaminated.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs/contaminated").glob("*.py"))

# Runs the program; sends itself SIGNAL after the fits of the first size are stored.
CHILD = """
import os, signal
from moe_jax.contaminated import main

write = main._write

def write_and_strike(path, text):
    write(path, text)
    if os.environ["SIGNAL"] != "0" and path.parent.name == "fits":
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))

main._write = write_and_strike
main.run()
"""
# All sizes are padded to 320 rows: one compiled shape.
SIZES = (300, 304, 308, 312, 316)
TINY = {"study.designs": "('paper_a',)", "study.sizes": str(SIZES), "study.replicates": 3}


def run_program(workdir, number=0, **overrides):
    values = TINY | {name.replace("__", "."): value for name, value in overrides.items()}
    command = [sys.executable, "-c", CHILD, "--config=configs/contaminated/rates.py"]
    command += [f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in values.items()]
    return subprocess.run(
        command,
        cwd=ROOT,
        # What one child compiles, however short, the next ones find.
        env=os.environ
        | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        | {"JAX_PLATFORMS": "cpu", "SIGNAL": str(int(number))},
        capture_output=True,
        text=True,
        timeout=600,
    )


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config().to_dict()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    process = run_program(workdir)
    assert process.returncode == 0, process.stderr
    return workdir, process


def test_run_leaves_table_record_and_figure(finished):
    workdir, process = finished
    table = (workdir / "paper_a.txt").read_text()
    assert table.strip() in process.stdout + process.stderr
    record = json.loads((workdir / "paper_a.json").read_text())
    assert record["sizes"] == list(SIZES) and record["replicates"] == 3
    assert record["slopes"]["beta"]["paper"] == -0.45
    assert (workdir / "figures/paper_a.png").read_bytes().startswith(b"\x89PNG")
    assert not list(workdir.glob("**/*.partial")) and not list(workdir.glob("**/.*.png"))
    assert "100%" in process.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_signal_keeps_the_fits_and_the_same_command_goes_on(finished, tmp_path, number, status):
    stopped = run_program(tmp_path, number)
    assert stopped.returncode == status, stopped.stderr
    assert "run the same command again" in stopped.stdout
    assert [path.name for path in tmp_path.glob("fits/*")] == ["paper_a_300.json"]
    assert not (tmp_path / "paper_a.json").exists()
    kept = (tmp_path / "fits/paper_a_300.json").read_bytes()
    config = load(ROOT / "configs/contaminated/rates.py")
    config["study"] |= {"designs": ("paper_a",), "sizes": SIZES, "replicates": 3}
    assert run_rate_studies(config, tmp_path) == 0
    assert (tmp_path / "fits/paper_a_300.json").read_bytes() == kept
    first, second = (
        json.loads((folder / "paper_a.json").read_text()) for folder in (finished[0], tmp_path)
    )
    for row, errors in first["mean_error"].items():
        # This process compiles less well than the program: rounding errors.
        np.testing.assert_allclose(second["mean_error"][row], errors, rtol=1e-6)


def test_other_data_are_refused_in_the_same_folder(finished):
    config = load(ROOT / "configs/contaminated/rates.py")
    before = (finished[0] / "config.json").read_bytes()
    config["study"] |= {"designs": ("paper_a",), "sizes": SIZES, "replicates": 3, "seed": 1}
    with pytest.raises(ValueError, match=r"config.study.seed=1 differs from the 0"):
        run_rate_studies(config, finished[0])
    assert (finished[0] / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("designs", ("paper_c",), "designs='paper_c' is not one of paper_a, paper_b1"),
        ("sizes", (2000, 1000), "ascending integers"),
        ("replicates", 1, "replicates=1 must be at least 2"),
        ("start", "guess", "start='guess' must be one of truth, tail"),
        ("level", 1.0, "level=1.0 must be in"),
        ("sizez", (1,), "did you mean sizes"),
    ],
)
def test_bad_configuration_is_refused_before_anything_is_written(tmp_path, key, value, message):
    config = load(ROOT / "configs/contaminated/rates.py")
    config["study"][key] = value
    with pytest.raises(ValueError, match=message) as error:
        run_rate_studies(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_error_of_the_program_is_one_line(tmp_path):
    process = run_program(tmp_path, study__replicates=1)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("error: config.study: replicates=1")
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_sound(path):
    assert read_settings(load(path)).replicates >= 40
