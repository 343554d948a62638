"""What a program prints for what its user got wrong, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
import ml_collections

def get_config():
    return ml_collections.ConfigDict({"model": {"width": 2}, "rows": 4})
"""
# One process imports the library, and forks one for each command line: importing takes seconds.
SCRIPT = """
import json, os, sys, warnings
from moe_jax.training import run_program

def run(config, workdir):
    if config["rows"] < 0:
        raise ValueError(f"rows={config['rows']} must not be negative")
    print(workdir, config)
    return 3

warnings.simplefilter("ignore")
for name, arguments in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{name}.out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(f"{name}.err", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv[1:] = arguments
        run_program(run, "runs/default")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    open(f"{name}.status", "w").write(str(status))
"""
CONFIGURED = ["--config=config.py"]
COMMANDS = {
    "complete": [*CONFIGURED, "--config.model.width=5"],
    "refused": [*CONFIGURED, "--config.rows=-1"],
    "unknown_key": [*CONFIGURED, "--config.model.widht=5"],
    "wrong_type": [*CONFIGURED, "--config.rows=many"],
    "unknown_flag": [*CONFIGURED, "--wrokdir=runs"],
    "argument": [*CONFIGURED, "extra"],
    "no_configuration": [],
    "missing_file": ["--config=missing.py"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "config.py").write_text(CONFIG)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        check=True,
    )
    return folder


def test_run_gets_configuration_and_workdir_and_gives_the_exit_status(folder):
    assert (folder / "complete.status").read_text() == "3", (folder / "complete.err").read_text()
    printed = (folder / "complete.out").read_text()
    assert printed == "runs/default {'model': {'width': 5}, 'rows': 4}\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("refused", "rows=-1 must not be negative"),
        ("unknown_key", "unknown configuration key: "),
        ("wrong_type", ""),
        ("unknown_flag", "Unknown command line flag 'wrokdir'"),
        ("argument", "unexpected argument 'extra'"),
        ("no_configuration", ""),
        ("missing_file", ""),
    ],
)
def test_a_fault_of_the_user_is_one_line(folder, command, reason):
    assert (folder / f"{command}.status").read_text() == "1"
    printed = (folder / f"{command}.err").read_text()
    assert printed.startswith(f"error: {reason}")
    assert printed.count("\n") == 1
