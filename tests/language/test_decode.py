"""The decoding program on a small untrained checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.language.decode import decode, texts
from moe_jax.language.tokenizer import ByteTokenizer
from tests.language.test_load import workdir  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments, **options):
    command = [sys.executable, "-m", "moe_jax.language.decode", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command, **(pipes | options))


def test_text_comes_in_whole_characters():
    tokenizer = ByteTokenizer()
    pieces = list(texts(tokenizer, tokenizer.encode("aé\N{EURO SIGN}b").tolist()))
    assert [piece for piece in pieces if piece] == ["a", "é", "\N{EURO SIGN}", "b"]
    broken = [0x61, 0xFF, 0x62, 0xE2]
    assert "".join(texts(tokenizer, broken)) == tokenizer.decode(broken)
    assert list(texts(tokenizer, [])) == [""]


def test_program_prints_the_prompt_and_what_follows_and_stops_quietly(workdir):  # noqa: F811
    flags = [f"--checkpoint={workdir}", "--prompt=ab", "--seed=3"]
    expected = "".join(decode(str(workdir), "ab", 5, seed=3))
    finished = start(*flags, "--max_new_tokens=5")
    # More than anyone waits for: one reader leaves, one is interrupted.
    closed, interrupted = (start(*flags, "--max_new_tokens=200000") for _ in range(2))
    assert finished.communicate() == (expected + "\n", "") and finished.returncode == 0
    for process in (closed, interrupted):
        assert process.stdout.read(2) == "ab"
    closed.stdout.close()
    interrupted.send_signal(signal.SIGINT)
    assert closed.wait(120) == 0 and closed.stderr.read() == ""
    assert interrupted.wait(120) in (130, -signal.SIGINT) and interrupted.stderr.read() == ""
    for stream in (closed.stderr, interrupted.stderr, interrupted.stdout):
        stream.close()


def test_faults_are_one_line(workdir):  # noqa: F811
    wrong = [
        (["--checkpoint=/nowhere"], "holds no run"),
        ([f"--checkpoint={workdir}", "--top_p=0"], "top_p=0.0 is not in (0, 1]"),
    ]
    processes = [(start(*flags), message) for flags, message in wrong]
    for process, message in processes:
        out, error = process.communicate()
        assert process.returncode == 1 and error.startswith("error: ") and message in error
        assert error.count("\n") == 1 and os.linesep not in out


@pytest.mark.parametrize("prompt", ["", "a" * 40])
def test_any_prompt_is_continued(workdir, prompt):  # noqa: F811
    pieces = list(decode(str(workdir), prompt, 3))
    assert pieces[0] == prompt
