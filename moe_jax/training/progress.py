"""How far a run is: a bar on a terminal, a line now and then in a log."""

import io
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

_now = time.monotonic


class Progress:
    """Shows the step, some scalars and the time left, on process 0.

    A terminal gets a bar. Anything else, such as a file or the log of a build, gets the same facts
    as plain lines: the first and the last update and in between one every `interval` seconds. The
    time left is reckoned from the updates given to this object after the first, so that neither
    the compilation of the first step nor the steps of an earlier process enter.

    Args:
        total_steps: number of the last step.
        first_step: step the process starts from, more than 0 when it resumes.
        show: names of the scalars to show, in order; `update` may be given others, or fewer.
        interval: seconds between lines.
        stream: where to write, stderr by default.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        show: Sequence[str] = ("loss", "bits_per_byte", "tokens_per_second"),
        interval: float = 20.0,
        stream: io.TextIOBase | None = None,
    ) -> None:
        self._total = total_steps
        self._show = tuple(show)
        self._interval = interval
        self._stream: Any = sys.stderr if stream is None else stream
        self._is_shown = jax.process_index() == 0
        self._first: tuple[int, float] | None = None
        self._printed_at = -math.inf
        self._unprinted: str | None = None
        self._bar: Any = None
        if self._is_shown and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                # A pseudo-terminal without a window has 0 columns.
                dynamic_ncols=_columns(self._stream) > 0,
                ncols=100,
                nrows=20,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, step: int, **scalars: Any) -> None:
        """Shows that `step` is done, with those of `scalars`, numbers, that are to be shown."""
        if not self._is_shown:
            return
        now = _now()
        facts = [_fact(name, scalars[name]) for name in self._show if name in scalars]
        facts += self._time_left(step, now)
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(facts), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        percent = 100 * step // self._total if self._total else 100
        self._unprinted = "  ".join([f"step {step}/{self._total}  {percent}%", *facts])
        if step >= self._total or now - self._printed_at >= self._interval:
            self._printed_at = now
            self._print_rest()

    def print(self, line: str) -> None:
        """Writes a line of its own without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        elif self._is_shown:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the last state on the screen or in the log; later calls show nothing."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None
        else:
            self._print_rest()
        self._is_shown = False

    def _print_rest(self) -> None:
        if self._unprinted is not None:
            self.print(self._unprinted)
            self._unprinted = None

    def _time_left(self, step: int, now: float) -> list[str]:
        """Empty as long as it is not known."""
        if self._first is None:
            self._first = (step, now)
        steps, seconds = step - self._first[0], now - self._first[1]
        if steps <= 0:
            return []
        return [f"{_clock(max(self._total - step, 0) * seconds / steps)} left"]


def _columns(stream: Any) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def _fact(name: str, value: Any) -> str:
    if name.endswith("_per_second"):
        return f"{_magnitude(value)} {name.removesuffix('_per_second')}/s"
    return f"{name.replace('_per_', '/').replace('_', ' ')} {value:.3f}"


def _magnitude(number: Any) -> str:
    """Three digits and a magnitude, such as 12.3k."""
    for letter in ("", "k", "M", "G"):
        if not abs(number) >= 999.5:
            return f"{number:.3g}{letter}"
        number /= 1000
    return f"{number:.3g}T"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
