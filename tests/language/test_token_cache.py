import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from moe_jax.language import token_cache
from moe_jax.language.token_cache import load_or_tokenize

KEY = "0123456789abcdef" * 4
DTYPE = np.dtype("<u2")
EXPECTED = {"train": ([1, 2, 3, 4], [0, 3, 4]), "held_out": ([5, 6], [0, 2])}


class Counted:
    """Writes EXPECTED; counts its calls; runs `meanwhile` while the streams are open."""

    def __init__(self, meanwhile=None):
        self.calls = 0
        self.meanwhile = meanwhile

    def __call__(self, sinks):
        self.calls += 1
        for part, (tokens, _) in EXPECTED.items():
            sinks[part].write(np.array(tokens, DTYPE).tobytes())
        if self.meanwhile:
            self.meanwhile()
        return {part: np.array(starts, np.int64) for part, (_, starts) in EXPECTED.items()}


def load(cache_dir, tokenize):
    arrays = load_or_tokenize(cache_dir, KEY, tuple(EXPECTED), DTYPE, tokenize)
    for part, (tokens, starts) in EXPECTED.items():
        assert arrays[part][0].tolist() == tokens
        assert arrays[part][1].tolist() == starts
        assert not arrays[part][0].flags.writeable
    return arrays


def cache_of(cache_dir):
    (directory,) = cache_dir.glob("tokens-*")
    return directory


def test_second_load_maps_the_files_of_the_first(tmp_path):
    tokenize = Counted()
    load(tmp_path / "new" / "folder", tokenize)
    arrays = load(tmp_path / "new" / "folder", tokenize)
    assert tokenize.calls == 1
    assert isinstance(arrays["train"][0], np.memmap)


def test_nothing_but_the_cache_is_left(tmp_path):
    load(tmp_path, Counted())
    assert list(tmp_path.iterdir()) == [cache_of(tmp_path)]


def test_no_folder_keeps_tokens_in_memory():
    tokenize = Counted()
    load(None, tokenize)
    load(None, tokenize)
    assert tokenize.calls == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, remove])
@pytest.mark.parametrize("name", ["train.tokens", "held_out.starts", "record.json"])
def test_damaged_cache_is_made_anew_once(tmp_path, caplog, name, damage):
    load(tmp_path, Counted())
    damage(cache_of(tmp_path) / name)
    tokenize = Counted()
    load(tmp_path, tokenize)
    assert "is damaged and is made anew" in caplog.text
    load(tmp_path, tokenize)
    assert tokenize.calls == 1


@pytest.mark.parametrize("record", ["null", "[]", "{}", "3", '{"train.tokens": 1}'])
def test_record_of_another_kind_is_damage(tmp_path, record):
    load(tmp_path, Counted())
    (cache_of(tmp_path) / "record.json").write_text(record)
    tokenize = Counted()
    load(tmp_path, tokenize)
    assert tokenize.calls == 1


def test_folder_that_cannot_be_made_falls_back_to_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    load(tmp_path / "file" / "cache", Counted())
    assert "Tokens stay in memory" in caplog.text


def test_full_disk_falls_back_to_memory_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(token_cache.os, "fsync", full)
    load(tmp_path, Counted())
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_cache_both_succeed(tmp_path):
    inner = Counted()
    outer = Counted(meanwhile=lambda: load(tmp_path, inner))
    load(tmp_path, outer)
    assert (inner.calls, outer.calls) == (1, 1)
    assert list(tmp_path.iterdir()) == [cache_of(tmp_path)]
    load(tmp_path, outer)
    assert outer.calls == 1


def test_failure_of_the_tokenizer_is_raised_and_leaves_nothing(tmp_path):
    def fail():
        raise ValueError("cannot encode")

    with pytest.raises(ValueError, match="cannot encode"):
        load(tmp_path, Counted(meanwhile=fail))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_when_old_and_kept_when_young(tmp_path):
    young, old = tmp_path / ".tokens-a.1", tmp_path / ".tokens-b.2"
    for path in (young, old):
        path.mkdir()
    os.utime(old, (0, 0))
    load(tmp_path, Counted())
    assert young.exists()
    assert not old.exists()


KILLED = textwrap.dedent("""
    import os, pathlib, signal, sys
    import numpy as np
    from moe_jax.language import token_cache

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    def tokenize(sinks):
        for part, sink in sinks.items():
            sink.write(b"\\1\\0" * 100_000)
            if stage == "tokenize":
                die()
        return {part: np.array([0, 100_000]) for part in sinks}

    for stage in sys.argv[2:]:
        child = os.fork()
        if not child:
            if stage == "sync":
                os.fsync = die
            if stage == "rename":
                pathlib.Path.rename = die
            token_cache.load_or_tokenize(
                sys.argv[1], "KEY", ("train", "held_out"), np.dtype("<u2"), tokenize
            )
            os._exit(0)
        print(stage, os.WTERMSIG(os.waitpid(child, 0)[1]))
""").replace("KEY", KEY)


def test_no_kill_leaves_a_readable_half(tmp_path):
    stages = ["tokenize", "sync", "rename"]
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *stages],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.stdout.split("\n")[:-1] == [f"{stage} {int(signal.SIGKILL)}" for stage in stages], (
        run.stderr
    )
    assert len(list(tmp_path.glob(".tokens-*"))) == len(stages)
    assert list(tmp_path.glob("tokens-*")) == []
    tokenize = Counted()
    load(tmp_path, tokenize)
    assert tokenize.calls == 1


def test_arrays_outlive_the_removal_of_the_cache(tmp_path):
    arrays = load(tmp_path, Counted())
    with contextlib.suppress(FileNotFoundError):
        for path in cache_of(tmp_path).iterdir():
            path.unlink()
    assert arrays["train"][0].tolist() == EXPECTED["train"][0]
