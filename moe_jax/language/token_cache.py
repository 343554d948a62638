"""Token arrays kept on disk between runs, whole or not at all."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import logging

ABANDONED_SECONDS = 86_400

Tokenize = Callable[[Mapping[str, io.BufferedIOBase]], Mapping[str, np.ndarray]]
"""Writes the tokens of each part to its stream and returns where the part's documents start."""

Arrays = dict[str, tuple[np.ndarray, np.ndarray]]
"""By part: tokens, and int64 starts of its documents with the end of the last."""


def load_or_tokenize(
    cache_dir: str | os.PathLike[str] | None,
    key: str,
    parts: Sequence[str],
    dtype: np.dtype,
    tokenize: Tokenize,
) -> Arrays:
    """Arrays from the cache, or from `tokenize` and then the cache.

    A cache whose files differ from what was written in size or SHA-256 is made anew. If the folder
    cannot be written, the arrays stay in memory. Both leave a warning in the log.

    Args:
        cache_dir: folder of the caches, made if missing; None for none.
        key: hexadecimal; equal only for equal arrays.
        parts: names of the parts, fit for file names.
        dtype: of the tokens that `tokenize` writes.
        tokenize: called once or, if the folder fills up meanwhile, twice.
    """
    if cache_dir is not None:
        directory = pathlib.Path(cache_dir).expanduser() / f"tokens-{key[:32]}"
        try:
            if directory.exists():
                return _read(directory, parts, dtype)
        except (OSError, ValueError, TypeError, LookupError) as error:
            logging.warning("Token cache %s is damaged and is made anew: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
        try:
            return _write(directory, parts, dtype, tokenize)
        except OSError as error:
            logging.warning("Tokens stay in memory: %s cannot be written: %s", cache_dir, error)
    sinks = {part: io.BytesIO() for part in parts}
    starts = tokenize(sinks)
    tokens = {part: np.frombuffer(sinks[part].getbuffer().toreadonly(), dtype) for part in parts}
    return {part: (tokens[part], starts[part]) for part in parts}


def _read(directory: pathlib.Path, parts: Sequence[str], dtype: np.dtype) -> Arrays:
    record = json.loads((directory / "record.json").read_bytes())
    for name in _array_files(parts):
        if record[name] != _size_and_digest(directory / name):
            raise ValueError(f"{name} is not what was written")
    return {
        part: (
            np.memmap(directory / f"{part}.tokens", dtype, mode="r"),
            np.fromfile(directory / f"{part}.starts", "<i8"),
        )
        for part in parts
    }


def _write(
    directory: pathlib.Path, parts: Sequence[str], dtype: np.dtype, tokenize: Tokenize
) -> Arrays:
    """Writes under a temporary name and renames, so that a reader sees all of a cache or none."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory.parent)
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    temporary.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            sinks: dict[str, io.BufferedIOBase] = {
                part: stack.enter_context(open(temporary / f"{part}.tokens", "wb"))
                for part in parts
            }
            starts = tokenize(sinks)
        for part in parts:
            (temporary / f"{part}.starts").write_bytes(starts[part].tobytes())
        record = {name: _size_and_digest(temporary / name) for name in _array_files(parts)}
        (temporary / "record.json").write_text(json.dumps(record))
        for path in temporary.iterdir():
            with open(path, "rb+") as stream:
                os.fsync(stream.fileno())
        # Mapped before the renaming: what another process does to the directory then is harmless.
        arrays = _read(temporary, parts, dtype)
        try:
            temporary.rename(directory)
        except OSError:
            # Another process may have been faster with the same cache.
            if not directory.exists():
                raise
        return arrays
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(cache_dir: pathlib.Path) -> None:
    """Removes what killed processes left, once it is too old to be in the making."""
    for path in cache_dir.glob(".tokens-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)


def _array_files(parts: Sequence[str]) -> list[str]:
    return [f"{part}.{kind}" for part in parts for kind in ("tokens", "starts")]


def _size_and_digest(path: pathlib.Path) -> list[int | str]:
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return [os.fstat(stream.fileno()).st_size, digest]
