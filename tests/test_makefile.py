"""The Makefile, run on a copy in a folder of its own with an interpreter that only logs."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
PYTEST = "-m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile"
TARGETS = ("train", "test", "lint", "bench", "colabs", "clean")

# Logs its arguments, makes .venv when asked to, and fails where FAIL, a shell pattern, matches.
FAKE_PYTHON = """#!/bin/sh
case "$*" in $FAIL) exit 1 ;; esac
case "$*" in
  "-c print"*) echo yes; exit ;;
  "-c "*) exit ;;
esac
echo "$*" >> "$LOG"
case "$*" in
  "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m moe_jax.language.main"*)
    trap 'echo stopped >> "$LOG"; exit' TERM
    echo running >> "$LOG"
    i=0; while [ $i -lt 600 ]; do sleep 0.05; i=$((i + 1)); done ;;
esac
"""

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


class Project:
    """A copy of the Makefile and the files its stamps depend on, and a way to run make there."""

    def __init__(self, folder: Path):
        self.folder = folder / "a project's folder"
        self.folder.mkdir()
        for name in ("Makefile", "constraints.txt", "setup.cfg"):
            shutil.copy(ROOT / name, self.folder)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "log"
        self.elsewhere = folder / "elsewhere"
        (self.elsewhere / "test").mkdir(parents=True)
        self.ready = self.folder / ".venv" / "ready"

    def add_python(self, name: str) -> Path:
        path = self.bin / name
        path.write_text(FAKE_PYTHON)
        path.chmod(0o755)
        return path

    def environment(self, fail: str = "", path: str | None = None) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}" if path is None else path,
            "LOG": str(self.log),
            "FAIL": fail,
        }

    def make(self, *arguments: str, cwd: Path | None = None, **environment: str):
        """Runs make; returns its exit code, both outputs, and what the interpreter was asked."""
        self.log.write_text("")
        done = subprocess.run(
            [MAKE, *arguments],
            cwd=cwd or self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr, self.log.read_text().splitlines()

    def age(self, path: Path) -> None:
        """Sets a file's time an hour back, past the resolution of any file system."""
        then = path.stat().st_mtime - 3600
        os.utime(path, (then, then))


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.add_python("python3")
    # Stamps are compared with these, so a stamp written now must be newer beyond doubt.
    for name in ("constraints.txt", "setup.cfg"):
        project.age(project.folder / name)
    return project


def test_help_is_the_default_and_names_every_target(project):
    code, output, _, asked = project.make()
    assert code == 0 and asked == []
    assert all(f"make {target} " in output for target in TARGETS)


@pytest.mark.parametrize("how", ["-C", "-f"])
def test_runs_from_another_folder_whatever_that_folder_holds(how, project):
    target = project.folder if how == "-C" else project.folder / "Makefile"
    code, _, errors, asked = project.make(
        how, str(target), "test", "TESTS=tests/core -k 'a or b'", cwd=project.elsewhere
    )
    assert code == 0, errors
    assert asked[-1] == f"{PYTEST} tests/core -k a or b"
    assert project.ready.exists()
    assert not (project.elsewhere / ".venv").exists()


def test_dry_run_from_another_folder_shows_the_command_and_makes_nothing(project):
    makefile = str(project.folder / "Makefile")
    code, output, _, asked = project.make(
        "-n", "-f", makefile, "train", "ARGS=--config.seed=1", cwd=project.elsewhere
    )
    assert code == 0 and asked == []
    assert "-m moe_jax.language.main --config=configs/language/stdlib_moe.py" in output
    assert '--workdir="runs/stdlib_moe" --config.seed=1' in output
    assert not (project.folder / ".venv").exists()


@pytest.mark.parametrize(("target", "extra"), [("test", "test"), ("lint", "lint")])
def test_a_target_installs_its_own_extra_only(target, extra, project):
    _, _, errors, asked = project.make(target)
    install = "-m pip install --quiet --constraint constraints.txt --editable ."
    assert [line for line in asked if "pip" in line] == [install, f"{install}[{extra}]"], errors


def test_nothing_is_installed_twice(project):
    project.make("test")
    code, _, _, asked = project.make("test")
    assert code == 0
    assert asked == [PYTEST]


@pytest.mark.parametrize("name", ["constraints.txt", "setup.cfg"])
def test_newer_pins_bring_the_environment_up_to_date_in_place(name, project):
    project.make("test")
    for stamp in (project.ready, project.ready.with_name("ready-test")):
        project.age(stamp)
    (project.folder / name).touch()
    assert project.make("-q", ".venv/ready")[0] == 1
    _, _, _, asked = project.make("test")
    assert [line.split()[1] for line in asked] == ["pip", "pip", "pytest"]
    assert project.make("-q", ".venv/ready-test")[0] == 0


def test_an_interrupted_install_does_not_count_and_is_made_anew(project):
    code, _, _, _ = project.make("test", fail="*--editable .")
    assert code != 0 and not project.ready.exists()
    _, _, _, asked = project.make("test")
    assert asked[0] == "-m venv --clear .venv"
    assert project.ready.exists()


def test_a_failed_update_does_not_count_and_is_made_anew(project):
    project.make("test")
    project.age(project.ready)
    (project.folder / "constraints.txt").touch()
    assert project.make("test", fail="*--editable .")[0] != 0
    _, _, _, asked = project.make("test")
    assert asked[0] == "-m venv --clear .venv"


def test_a_failed_extra_leaves_the_environment_and_is_tried_again(project):
    assert project.make("test", fail="*--editable .[[]test]")[0] != 0
    _, _, _, asked = project.make("test")
    assert [line.split()[1] for line in asked] == ["pip", "pytest"]


def test_an_environment_whose_interpreter_is_gone_is_made_anew(project):
    project.make("test")
    (project.folder / ".venv/bin/python").unlink()
    code, _, _, asked = project.make("test")
    assert code == 0
    assert asked[0] == "-m venv --clear .venv"


def test_an_interpreter_too_old_is_refused_by_name(project):
    old = project.add_python("old-python")
    code, _, errors, asked = project.make("test", f"PYTHON={old}", fail="-c import sys*")
    assert code != 0 and asked == []
    assert errors.splitlines()[0] == f"PYTHON={old} does not run as Python 3.11 or newer"
    assert not (project.folder / ".venv").exists()


def test_without_any_interpreter_the_error_says_what_was_looked_for(project, tmp_path):
    code, _, errors, _ = project.make("test", path=str(tmp_path / "empty"))
    assert code != 0
    assert errors.splitlines()[0] == (
        "found no Python 3.11 or newer as python3 python3.13 python3.12 python3.11: "
        "install one, or name it: PYTHON=/path/to/python3.11"
    )


def test_the_first_interpreter_that_is_new_enough_is_taken(project):
    (project.bin / "python3").write_text("#!/bin/sh\nexit 1\n")
    (project.bin / "python3.13").write_text("#!/bin/sh\nexit 1\n")
    (project.bin / "python3.13").chmod(0o755)
    project.add_python("python3.12")
    code, output, errors, _ = project.make("test")
    assert code == 0, errors
    assert "making .venv with python3.12" in output


def test_without_ensurepip_an_outer_pip_fills_the_environment(project):
    code, _, errors, asked = project.make("test", fail="-m venv --clear .venv")
    assert code == 0, errors
    assert asked[:3] == [
        "-m pip --version",
        "-m venv --clear --without-pip .venv",
        "-m pip --python .venv/bin/python install --quiet pip",
    ]
    assert project.ready.exists()


def test_without_ensurepip_and_pip_the_error_says_what_to_install(project):
    (project.bin / "pip3").write_text("#!/bin/sh\nexit 1\n")
    (project.bin / "pip3").chmod(0o755)
    code, _, errors, _ = project.make("test", fail="-m [vp]*")
    assert code != 0
    assert errors.splitlines()[0] == (
        "python3 cannot make a virtual environment: "
        "install its venv module and pip (Debian: apt install python3-venv)"
    )
    assert not project.ready.exists()


def test_a_read_only_folder_is_refused_by_name(project):
    project.folder.chmod(0o555)
    if os.access(project.folder, os.W_OK):
        pytest.skip("this user may write anywhere")
    code, _, errors, asked = project.make("test")
    project.folder.chmod(0o755)
    assert code != 0 and asked == []
    assert errors.splitlines()[0] == (
        f"cannot write to {project.folder}: copy it to a folder of your own"
    )


def test_terminating_make_terminates_the_program_and_waits_for_it(project):
    project.make(".venv/ready")
    command = [MAKE, "-f", str(project.folder / "Makefile"), "train"]
    project.log.write_text("")
    with subprocess.Popen(
        command, cwd=project.elsewhere, env=project.environment(), stderr=subprocess.DEVNULL
    ) as process:
        while "running" not in project.log.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait()
        assert project.log.read_text().splitlines()[-1] == "stopped"
