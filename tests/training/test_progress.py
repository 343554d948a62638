import io
import os
import pty
import re
import sys

import jax
import pytest

from moe_jax.training import progress as progress_module
from moe_jax.training.progress import Progress


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress_module, "_now", clock)
    return clock


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def lines(stream) -> list[str]:
    return stream.getvalue().splitlines()


def test_log_gets_first_and_last_line_and_one_per_interval(clock):
    stream = io.StringIO()
    with Progress(100, interval=20.0, stream=stream) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(step, loss=2.0)
    shown = [int(re.match(r"step (\d+)/100", line)[1]) for line in lines(stream)]
    assert shown == [1, 21, 41, 61, 81, 100]


def test_line_states_loss_bits_per_byte_rate_and_time_left(clock):
    stream = io.StringIO()
    scalars = {"loss": 1.25, "bits_per_byte": 1.803, "tokens_per_second": 20480.0, "other": 3.0}
    with Progress(400, interval=0.0, stream=stream) as progress:
        progress.update(99, **scalars)
        clock.now += 2.0
        progress.update(100, **scalars)
    # 300 steps left at 2 s each.
    expected = "step 100/400  25%  loss 1.250  bits/byte 1.803  20.5k tokens/s  10:00 left"
    assert lines(stream)[-1] == expected


def test_time_left_counts_neither_the_first_update_nor_steps_of_an_earlier_process(clock):
    stream = io.StringIO()
    with Progress(1100, first_step=1000, interval=0.0, stream=stream) as progress:
        clock.now += 500.0  # compilation
        progress.update(1001)
        clock.now += 10.0
        progress.update(1011)
    # 89 steps left at 1 s each.
    assert lines(stream) == ["step 1001/1100  91%", "step 1011/1100  91%  1:29 left"]


def test_last_update_is_not_lost_when_the_run_ends_early(clock):
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        with Progress(100, stream=stream) as progress:
            for step in (1, 2, 3):
                progress.update(step)
            raise KeyboardInterrupt
    assert [line.split()[1] for line in lines(stream)] == ["1/100", "3/100"]


@pytest.mark.parametrize(("total", "first"), [(0, 0), (5, 5)])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_without_steps_left_is_shown_without_error(total, first, terminal):
    stream = Terminal("utf-8") if terminal else io.StringIO()
    with Progress(total, first, stream=stream):
        pass
    with Progress(total, first, stream=stream) as progress:
        progress.update(total, loss=float("nan"))
    assert "nan" in (stream.text() if terminal else stream.getvalue())


@pytest.mark.parametrize(("encoding", "block"), [("utf-8", "█"), ("ascii", "#")])
def test_terminal_gets_a_bar_its_encoding_can_show(encoding, block):
    stream = Terminal(encoding)
    with Progress(4, 1, stream=stream) as progress:
        for step in (2, 3, 4):
            progress.update(step, loss=0.5, bits_per_byte=1.5, tokens_per_second=999.0)
    last = stream.text().rstrip().split("\r")[-1]
    assert last.startswith("100%|") and block in last and "4/4" in last
    assert "loss 0.500  bits/byte 1.500  999 tokens/s" in last


def test_printed_line_stands_alone_on_a_terminal_and_in_a_log():
    for stream in (Terminal("utf-8"), io.StringIO()):
        with Progress(4, stream=stream) as progress:
            progress.update(1)
            progress.print("saved")
        text = stream.text() if isinstance(stream, Terminal) else stream.getvalue()
        assert "saved" in re.split(r"[\r\n]", text)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_pseudo_terminal_without_a_window_still_gets_a_bar():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        with Progress(4, stream=stream) as progress:
            progress.update(2, loss=0.5)
        shown = os.read(leader, 4096).decode()
    os.close(leader)
    assert "2/4, loss 0.500" in shown


def test_only_the_chosen_scalars_are_shown_in_their_order():
    stream = io.StringIO()
    with Progress(2, show=("paths_per_second", "mse"), stream=stream) as progress:
        progress.update(1, loss=1.0, mse=0.5, paths_per_second=3e6)
    assert lines(stream) == ["step 1/2  50%  3M paths/s  mse 0.500"]


def test_other_processes_show_nothing(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.update(1)
        progress.print("saved")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999.4, "999"), (999.6, "1k"), (12345, "12.3k"), (2.5e6, "2.5M"), (4e15, "4e+03T")],
)
def test_magnitudes_keep_three_digits(number, text):
    assert progress_module._magnitude(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.0, "59:59"), (3600.0, "1:00:00")]
)
def test_clock_rolls_over(seconds, text):
    assert progress_module._clock(seconds) == text
