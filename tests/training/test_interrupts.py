import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_jax.training.interrupts import Interrupts, exit_code

BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def known_handlers():
    """Handlers these tests can tell apart, whatever the session was started under."""
    before = {number: signal.getsignal(number) for number in BOTH}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_first_signal_only_sets_the_request(number):
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        os.kill(os.getpid(), number)
        assert interrupts.requested is number
    assert interrupts.requested is number


@pytest.mark.parametrize("requested", [False, True])
def test_previous_handlers_come_back_on_exit(requested):
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    with Interrupts():
        if requested:
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM]


def test_previous_handlers_come_back_after_an_exception():
    with pytest.raises(ZeroDivisionError):
        with Interrupts():
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handler_that_python_did_not_install_gives_way_to_the_default(monkeypatch):
    install = signal.signal
    monkeypatch.setattr(signal, "signal", lambda *args: install(*args) and None)
    with Interrupts():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_is_inactive_outside_the_main_thread():
    outcome = []

    def run():
        with Interrupts() as interrupts:
            outcome.append((interrupts.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcome == [(None, signal.SIG_DFL)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_exit_codes():
    assert [exit_code(number) for number in (None, *BOTH)] == [0, 0, 130]


CHILD = """
import ctypes
import signal
import sys
from moe_jax.training.interrupts import Interrupts

with Interrupts() as interrupts:
    print("ready", flush=True)
    while interrupts.requested is None:
        signal.pause()
    print(interrupts.requested.name, flush=True)
    # Holds the interpreter, as a long computation may: no Python handler can run.
    ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_second_signal_kills_at_once(first, second):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(first)
        assert child.stdout.readline() == f"{first.name}\n"
        child.send_signal(second)
        assert child.wait(timeout=300) == -second
