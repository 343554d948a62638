"""One program in several processes: how they find each other, and what ends them together.

JAX's own heartbeats end a process within a minute of the death of another, by an abort that does
not say which. So each process also holds a connection to process 0: a dead process closes its own
at once, a dead machine goes silent, and process 0 tells the others the name.
"""

import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

INTERVAL = 2.0
SILENCE = 40.0
"""Seconds between signs of life, and without any until a process counts as gone."""
JAX_TIMEOUT = 50
PORT = 8476


class Address(NamedTuple):
    """Where this process finds the others.

    Attributes:
        coordinator: host and port of process 0.
        num_processes: of the run.
        process_id: of this process, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int


def given_address(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Address | None:
    """The address that flags give; None if they give none.

    Raises:
        ValueError: if they give a part of it, or a number is out of range.
    """
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if coordinator is None or num_processes is None or process_id is None:
        if len(missing) < len(given):
            raise ValueError(
                f"{', '.join(missing)} missing: give all of coordinator, "
                "num_processes and process_id, or none"
            )
        return None
    if not coordinator.rpartition(":")[2].isdigit() or ":" not in coordinator:
        raise ValueError(f"--coordinator={coordinator} is not host:port")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process_id={process_id} is not in [0, {num_processes})")
    return Address(coordinator, num_processes, process_id)


def jobset_address(environment: Mapping[str, str]) -> Address | None:
    """The address in a Kubernetes JobSet without TPUs, from variables that its manifest sets.

    `JOBSET_NAME` and `REPLICATED_JOB_NAME` from the pod's annotations, `NUM_PROCESSES` by hand;
    Kubernetes itself sets `JOB_COMPLETION_INDEX`. None without the first.

    Raises:
        ValueError: if the others are missing.
    """
    if "JOBSET_NAME" not in environment:
        return None
    names = ("REPLICATED_JOB_NAME", "NUM_PROCESSES", "JOB_COMPLETION_INDEX")
    if missing := [name for name in names if name not in environment]:
        raise ValueError(f"JOBSET_NAME is set in the environment, {', '.join(missing)} missing")
    jobset, job = environment["JOBSET_NAME"], environment["REPLICATED_JOB_NAME"]
    return given_address(
        f"{jobset}-{job}-0-0.{jobset}:{PORT}",
        int(environment["NUM_PROCESSES"]),
        int(environment["JOB_COMPLETION_INDEX"]),
    )


def run_joined(attempt: Callable[[], int], address: Address | None) -> int:
    """Runs `attempt()` as one of several processes, before anything has used a device.

    Args:
        attempt: the program; returns the exit status, 1 for a failure.
        address: where the others are; None for what the environment says: of a JobSet, or of TPU
            pods, SLURM or MPI as JAX reads it.

    Returns:
        The exit status, if it is not that of a failure: then the process ends here, and so do the
        others, each with a line on standard error that names this one. The same happens when one
        is killed.

    Raises:
        ValueError: if the environment says nothing.
    """
    address = address or jobset_address(os.environ)
    try:
        coordinator, num_processes, process_id = address or (None, None, None)
        jax.distributed.initialize(
            coordinator, num_processes, process_id, heartbeat_timeout_seconds=JAX_TIMEOUT
        )
    except ValueError as error:
        raise ValueError(
            "--multihost finds no TPU pod, SLURM job or JobSet in the environment; give "
            f"--coordinator=host:port, --num_processes and --process_id ({error})"
        ) from error
    host = None if address is None else address.coordinator.rpartition(":")[0]
    watch = _Watch(host)
    try:
        status = attempt()
    except Exception:
        traceback.print_exc()
        status = 1
    if status == 1:
        # What failed may be a collective whose peer has died; the watch then ends the process.
        time.sleep(INTERVAL)
        watch.end("failed, see its log")
    watch.leave()
    return status


class _Peer:
    """The other end of a connection, and what is known of it."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection = connection
        self.name = name
        self.heard = time.monotonic()
        self.has_left = False
        self._rest = b""

    def lines(self) -> list[str] | None:
        """What has arrived; None once it is closed."""
        try:
            received = self.connection.recv(4096)
        except OSError:
            return None
        if not received:
            return None
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line.decode() for line in lines]

    def send(self, line: str) -> None:
        try:
            self.connection.sendall(f"{line}\n".encode())
        except OSError:
            pass  # Reading from it tells why.


class _Watch:
    """A star of connections around process 0, watched by a thread.

    Lines: `hello NAME`, `alive`, `done` of a process that ends in good order, and `gone REASON`.
    """

    def __init__(self, host: str | None) -> None:
        self._name = f"process {jax.process_index()} on {socket.gethostname()}"
        self._peers: list[_Peer] = []
        self._has_left = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        port = 0
        if jax.process_index() == 0:
            self._listener = socket.create_server(("", 0), backlog=jax.process_count())
            self._selector.register(self._listener, selectors.EVENT_READ)
            port = self._listener.getsockname()[1]
        host, port, name = _from_process_0(f"{host or _own_host()} {port} {self._name}")
        if self._listener is None:
            try:
                self._add(socket.create_connection((host, port), timeout=20.0), name)
                self._peers[0].send(f"hello {self._name}")
            except OSError as error:
                logging.warning(
                    "no connection to %s: %s; if a process dies, none says which", name, error
                )
        threading.Thread(target=self._run, daemon=True).start()

    def leave(self) -> None:
        """Says that this process ends in good order."""
        self._has_left.set()
        for peer in self._peers:
            peer.send("done")

    def end(self, reason: str) -> None:
        """Ends all processes, this one without a word of its own."""
        for peer in self._peers:
            peer.send(f"gone {self._name} {reason}")
        _exit()

    def _add(self, connection: socket.socket, name: str) -> None:
        connection.settimeout(INTERVAL)
        peer = _Peer(connection, name)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _run(self) -> None:
        beaten = time.monotonic()
        while not self._has_left.is_set():
            for key, _ in self._selector.select(INTERVAL):
                if key.data is None:
                    self._add(key.fileobj.accept()[0], "a process")  # type: ignore[union-attr]
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now - beaten >= INTERVAL:
                beaten = now
                for peer in self._peers:
                    peer.send("alive")
            for peer in list(self._peers):
                if now - peer.heard > SILENCE:
                    self._lose(peer, f"{peer.name} is gone: silent for {SILENCE:.0f} seconds")

    def _read(self, peer: _Peer) -> None:
        lines = peer.lines()
        if lines is None:
            self._lose(peer, f"{peer.name} is gone: its connection closed")
            return
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "hello":
                peer.name = rest
            elif word == "done":
                peer.has_left = True
            elif word == "gone":
                self._lose(peer, rest)

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        if peer.has_left or self._has_left.is_set():
            return
        for other in self._peers:
            other.send(f"gone {reason}")
        print(f"error: {reason}; the same command resumes the run", file=sys.stderr)
        _exit()


def _exit() -> None:
    """Ends the process at once: at exit JAX would wait for those that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        # With it ends JAX's coordinator, at which the others abort: first they hear why.
        time.sleep(1.0)
    os._exit(1)


def _from_process_0(text: str) -> tuple[str, int, str]:
    """Host, port and name that process 0 gives, on every process."""
    sent = np.frombuffer(text.encode()[:256].ljust(256), np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8)
    host, port, name = received.tobytes().decode().strip().split(" ", 2)
    return host, int(port), name


def _own_host() -> str:
    """This machine's address on the network that leads out; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
