import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from moe_jax.training.workdir import WorkdirError, lock_workdir, prepare_workdir


def test_directory_is_created_with_its_parents_and_left_empty(tmp_path):
    workdir = prepare_workdir(tmp_path / "runs" / "first")
    assert workdir == tmp_path / "runs" / "first"
    assert list(workdir.iterdir()) == []
    assert prepare_workdir(workdir) == workdir


def test_home_is_expanded_and_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert prepare_workdir("~/run") == tmp_path / "home" / "run"
    assert prepare_workdir("run") == tmp_path / "run"


def message_of(path) -> str:
    with pytest.raises(WorkdirError) as error:
        prepare_workdir(path)
    assert isinstance(error.value, ValueError) and "\n" not in str(error.value)
    return str(error.value)


def test_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    assert message_of(tmp_path / "run") == f"workdir={tmp_path}/run is a file, not a directory"


def test_file_in_place_of_a_parent_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    expected = f"workdir={tmp_path}/file/run is not writable: Not a directory"
    assert message_of(tmp_path / "file" / "run") == expected


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system nobody may write")
@pytest.mark.parametrize("path", ["/proc/run", "/proc/self"])
def test_directory_that_even_root_cannot_write_is_named(path):
    assert message_of(path).startswith(f"workdir={path} is not writable: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_write_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        expected = f"workdir={tmp_path} is not writable: Permission denied"
        assert message_of(tmp_path) == expected
    finally:
        tmp_path.chmod(0o700)


def test_full_disk_is_named(tmp_path, monkeypatch):
    def fail(descriptor, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moe_jax.training.workdir.os.write", fail)
    assert message_of(tmp_path) == f"workdir={tmp_path} is not writable: No space left on device"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "must name a directory"),
        ("gs://bucket/run", "must be a local directory"),
        ("~nobody-of-that-name/run", "is not writable"),
        ("a\0b", "is not writable"),
    ],
)
def test_path_that_names_no_local_directory_is_refused(path, reason):
    assert reason in message_of(path)


def test_second_holder_is_refused_and_told_who_holds_it(tmp_path):
    with lock_workdir(tmp_path):
        with pytest.raises(
            WorkdirError, match=f"workdir={tmp_path} is in use by pid {os.getpid()}"
        ):
            with lock_workdir(tmp_path):
                pass
    with lock_workdir(tmp_path):
        pass


def test_lock_is_released_when_the_run_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with lock_workdir(tmp_path):
            raise ZeroDivisionError
    with lock_workdir(tmp_path):
        pass


CHILD = """
import sys
import time
from pathlib import Path
from moe_jax.training.workdir import lock_workdir

with lock_workdir(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_killed_process_gives_up_the_lock(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    with child:
        try:
            assert child.stdout.readline() == "locked\n"
            with pytest.raises(WorkdirError, match=f"in use by pid {child.pid} on "):
                with lock_workdir(tmp_path):
                    pass
        finally:
            child.send_signal(signal.SIGKILL)
    with lock_workdir(tmp_path):
        assert f"pid {os.getpid()} on " in (tmp_path / ".lock").read_text()


def test_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_workdir(tmp_path), lock_workdir(tmp_path):
        pass
    assert f"workdir={tmp_path} cannot be locked: No locks available" in caplog.text


def test_only_process_0_takes_the_lock(tmp_path, monkeypatch):
    with lock_workdir(tmp_path):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with lock_workdir(tmp_path):
            pass
