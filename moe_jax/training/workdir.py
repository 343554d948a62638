"""The directory of a run: created, checked for writing, and held by one run at a time."""

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import logging

_LOCK_FILE = ".lock"
_HELD = {errno.EWOULDBLOCK, errno.EACCES}


class WorkdirError(ValueError):
    """A run cannot use the directory it was given."""


def prepare_workdir(path: str | os.PathLike[str]) -> Path:
    """Creates a run's directory and proves that files can be written to it.

    Args:
        path: local path; ~ stands for the home directory, missing parents are created.

    Returns:
        The absolute path.

    Raises:
        WorkdirError: if it is empty, a URL, a file, or cannot be written.
    """
    text = os.fspath(path)
    if not text:
        raise WorkdirError("workdir='' must name a directory")
    if "://" in text:
        raise WorkdirError(f"workdir={text} must be a local directory, not a URL")
    try:
        workdir = Path(text).expanduser().absolute()
        if workdir.exists() and not workdir.is_dir():
            raise WorkdirError(f"workdir={text} is a file, not a directory")
        workdir.mkdir(parents=True, exist_ok=True)
        # Permissions say too little: root passes every check, and a disk may be full or read-only.
        with tempfile.NamedTemporaryFile(dir=workdir, prefix=".probe") as probe:
            os.write(probe.fileno(), b"probe")
    except WorkdirError:
        raise
    # Python itself refuses unknown home directories (RuntimeError) and NUL characters (ValueError).
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WorkdirError(f"workdir={text} is not writable: {reason}") from error
    return workdir


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Holds the directory for this process; a second live run is refused.

    The system releases the lock when the process ends, however it ends. Of a run with several
    processes only process 0 takes it. Where the file system has no locks, warns and goes on.

    Raises:
        WorkdirError: if another process holds it, naming that process.
    """
    if jax.process_index() != 0:
        yield
        return
    with open(workdir / _LOCK_FILE, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                lock.seek(0)
                holder = lock.read().strip() or "unknown process"
                raise WorkdirError(f"workdir={workdir} is in use by {holder}") from None
            logging.warning("workdir=%s cannot be locked: %s", workdir, error.strerror)
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield
