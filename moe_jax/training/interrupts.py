"""SIGTERM and Ctrl-C as a request to stop, so that a run can save before it ends."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, turns the first SIGINT or SIGTERM into `requested` instead of dying of it.

    A second signal of either kind kills the process at once, even inside a long computation.
    Outside the main thread, where Python allows no handlers, nothing is installed.

    Attributes:
        requested: the signal that asked the run to stop, or None.

    Example:
        >>> with Interrupts() as interrupts:
        ...     for step in range(3):
        ...         if interrupts.requested:
        ...             break
        >>> exit_code(interrupts.requested)
        0
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def agreed(self) -> signal.Signals | None:
        """`requested`, of any process of a run: all of them ask at the same time, and get the same.

        A request that comes later counts at the next call, on every process.
        """
        if jax.process_count() == 1:
            return self.requested
        mine = np.int32(0 if self.requested is None else self.requested)
        number = int(np.max(multihost_utils.process_allgather(mine)))
        return signal.Signals(number) if number else None

    def _request(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = signal.Signals(number)
        # The system's own action needs no Python code to run, so it also ends a process that is
        # busy in compiled code.
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)


def exit_code(requested: signal.Signals | None) -> int:
    """Exit code of a run that stopped as asked: 130 after SIGINT, by convention, otherwise 0."""
    return 130 if requested == signal.SIGINT else 0
