"""Text corpora: read as UTF-8, split by content, tokenised once."""

import codecs
import dataclasses
import hashlib
import io
import itertools
import json
import os
import pathlib
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt

from moe_jax.language.globs import matching_paths
from moe_jax.language.token_cache import load_or_tokenize
from moe_jax.language.tokenizer import Tokenizer

FORMAT_VERSION = 1
SIDES = ("train", "held_out")
EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)
NUM_EXAMPLES = 3


class Skipped(NamedTuple):
    """How many texts were left out for one reason, and the names of the first few."""

    total: int
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CorpusReport:
    """What was read and what was left out.

    Attributes:
        num_files: files found, skipped ones included.
        num_duplicates: documents dropped because an earlier one has the same content.
        skipped: by reason: `not UTF-8`, `empty`, `unreadable`.
        train_documents, train_bytes, train_tokens: size of the training side; tokens include BOS
            and EOS, bytes are those of the text.
        held_out_documents, held_out_bytes, held_out_tokens: likewise.
    """

    num_files: int
    num_duplicates: int
    skipped: Mapping[str, Skipped]
    train_documents: int
    train_bytes: int
    train_tokens: int
    held_out_documents: int
    held_out_bytes: int
    held_out_tokens: int

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"{self.num_files} files{_left_out(self.num_duplicates, self.skipped)}; "
            f"train {self.train_documents} documents, {self.train_bytes:,} bytes, "
            f"{self.train_tokens:,} tokens; held out {self.held_out_documents} documents, "
            f"{self.held_out_bytes:,} bytes, {self.held_out_tokens:,} tokens"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents one after another, each stored as BOS, its tokens, EOS.

    Attributes:
        tokens: ids, mapped from disk or in memory, read-only; uint32 if 16 bits do not suffice.
        starts: document i is tokens[starts[i]:starts[i + 1]].
        names: path, relative to its root for the standard library; `path:line` from JSONL.
        num_bytes: length of each text in UTF-8.
    """

    tokens: UInt[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " documents_plus_one"]
    names: tuple[str, ...]
    num_bytes: Int64[np.ndarray, " documents"]

    def __len__(self) -> int:
        return len(self.names)


class Corpus(NamedTuple):
    """The two sides of a corpus and how it came about."""

    train: TokenizedDocuments
    held_out: TokenizedDocuments
    report: CorpusReport


def load_corpus(
    source: str | None,
    tokenizer: Tokenizer,
    *,
    held_out_fraction: float,
    cache_dir: str | os.PathLike[str] | None,
    text_key: str = "text",
) -> Corpus:
    """Reads, splits and tokenises a corpus.

    A document is held out if the first 64 bits of the SHA-256 of its text, as a fraction of 2^64,
    are below `held_out_fraction`. So the side depends on nothing but the text: a copy follows its
    original, and new files leave the others where they are. Of equal texts the first is kept.

    Args:
        source: None or "" for the `.py` files of the running interpreter's standard library, tests
            left out; else globs separated by commas (`~` and `**` are known) of UTF-8 texts and of
            `.jsonl` files, whose lines are objects holding one text each. `**` follows links, but
            enters no folder twice.
        tokenizer: see `moe_jax.language.tokenizer`.
        held_out_fraction: expected share of documents held out, between 0 and 1.
        cache_dir: folder for the token arrays, made if missing; None keeps them in memory, as does
            a folder that cannot be written, with a warning.
        text_key: field of a JSONL object that holds the text.

    Raises:
        ValueError: if a glob matches no file, a JSONL line holds no text, no document is left on
            one of the sides, a file changes while it is read, or an argument is out of range.
    """
    _check_fraction(held_out_fraction)
    tally = _Tally()
    index = [
        _Entry(name, digest, len(text), _side(digest, held_out_fraction))
        for name, digest, text in _read(source, text_key, tally)
    ]
    sides = {side: [entry for entry in index if entry.side == side] for side in SIDES}
    for side, entries in sides.items():
        _check_not_empty(side, len(entries), len(index), source, held_out_fraction, tally)

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")

    def tokenize(sinks: Mapping[str, io.BufferedIOBase]) -> dict[str, np.ndarray]:
        return _tokenize(source, text_key, tokenizer, index, dtype, sinks)

    key = _cache_key(tokenizer, held_out_fraction, index)
    arrays = load_or_tokenize(cache_dir, key, SIDES, dtype, tokenize)
    documents = {}
    for side, entries in sides.items():
        tokens, starts = arrays[side]
        names = tuple(entry.name for entry in entries)
        num_bytes = np.array([entry.num_bytes for entry in entries], np.int64)
        documents[side] = TokenizedDocuments(tokens, starts, names, num_bytes)
    train, held_out = documents["train"], documents["held_out"]
    return Corpus(train, held_out, _report(tally, train, held_out))


def held_out_texts(
    source: str | None, *, held_out_fraction: float, text_key: str = "text"
) -> list[tuple[str, bytes]]:
    """Name and text of the held-out documents, in the order of `load_corpus(...).held_out`.

    Raises:
        ValueError: as `load_corpus`.
    """
    _check_fraction(held_out_fraction)
    tally, num_documents, texts = _Tally(), 0, []
    for name, digest, text in _read(source, text_key, tally):
        num_documents += 1
        if _side(digest, held_out_fraction) == "held_out":
            texts.append((name, text))
    _check_not_empty("held_out", len(texts), num_documents, source, held_out_fraction, tally)
    return texts


class _Entry(NamedTuple):
    name: str
    digest: bytes
    num_bytes: int
    side: str


@dataclasses.dataclass
class _Tally:
    num_files: int = 0
    num_duplicates: int = 0
    skipped: dict[str, Skipped] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        total, examples = self.skipped.get(reason, Skipped(0, ()))
        self.skipped[reason] = Skipped(total + 1, (*examples, name)[:NUM_EXAMPLES])


def _read(source: str | None, text_key: str, tally: _Tally) -> Iterator[tuple[str, bytes, bytes]]:
    """Yields name, SHA-256 and text of each document, in order, equal texts once."""
    seen = set()
    files = _matching_files(source) if source else _standard_library()
    for name, text in _texts(files, text_key, tally):
        if not text:
            tally.skip("empty", name)
            continue
        digest = hashlib.sha256(text).digest()
        if digest in seen:
            tally.num_duplicates += 1
            continue
        seen.add(digest)
        yield name, digest, text


def _standard_library() -> list[tuple[str, Any]]:
    """Path relative to the root and file, sorted; the part in a zip archive, if any, included."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    archive = root.parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    files: dict[str, Any] = {}
    if zipfile.is_zipfile(archive):
        zip_root = zipfile.Path(archive)
        files |= {name: zip_root / name for name in zip_root.root.namelist()}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        paths = (pathlib.Path(folder, name) for name in names)
        files |= {path.relative_to(root).as_posix(): path for path in paths}
    return [
        (_printable(name), files[name])
        for name in sorted(files)
        if name.endswith(".py") and EXCLUDED_FOLDERS.isdisjoint(name.split("/"))
    ]


def _matching_files(source: str) -> list[tuple[str, Any]]:
    """Path and file, sorted."""
    patterns = [pattern for pattern in map(str.strip, source.split(",")) if pattern]
    if not patterns:
        raise ValueError(f"source={source!r} holds no glob")
    paths = set()
    for pattern in patterns:
        matches = matching_paths(os.path.expanduser(pattern))
        files = [path for path in matches if not os.path.isdir(path)]
        if not files:
            hint = (
                f"; for all files below a folder write {pattern.rstrip('/')}/**/*"
                if matches
                else ""
            )
            raise ValueError(f"source={pattern!r} matches no file{hint}")
        paths.update(files)
    return [(_printable(path), pathlib.Path(path)) for path in sorted(paths)]


def _texts(
    files: list[tuple[str, Any]], text_key: str, tally: _Tally
) -> Iterator[tuple[str, bytes]]:
    for name, file in files:
        tally.num_files += 1
        try:
            # Opening a named pipe would wait for a writer for ever.
            if not file.is_file():
                tally.skip("unreadable", name)
            elif name.endswith(".jsonl"):
                _check_utf8(file)
                yield from _json_texts(name, file, text_key)
            else:
                text = file.read_bytes()
                text.decode("utf-8")
                yield name, text
        except OSError:
            tally.skip("unreadable", name)
        except UnicodeDecodeError:
            tally.skip("not UTF-8", name)


def _check_utf8(file: Any) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            decoder.decode(chunk)
    decoder.decode(b"", final=True)


def _json_texts(name: str, file: Any, text_key: str) -> Iterator[tuple[str, bytes]]:
    is_empty = True
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            is_empty = False
            try:
                record = json.loads(line.decode("utf-8-sig"))
                text = record[text_key].encode("utf-8")
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
                raise ValueError(f"{name}, line {number}: not JSON text: {reason}") from error
            except (TypeError, LookupError, AttributeError) as error:
                raise ValueError(
                    f"{name}, line {number}: not an object with a string {text_key!r}; "
                    "text_key names the field that holds the text"
                ) from error
            yield f"{name}:{number}", text
    if is_empty:
        yield name, b""


def _printable(path: str) -> str:
    """The path with undecodable bytes of its name spelled out, so that it can be written."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def _check_fraction(held_out_fraction: float) -> None:
    if not 0.0 < held_out_fraction < 1.0:
        raise ValueError(f"held_out_fraction={held_out_fraction} is not between 0 and 1")


def _side(digest: bytes, held_out_fraction: float) -> str:
    is_held_out = int.from_bytes(digest[:8], "big") < held_out_fraction * 2.0**64
    return "held_out" if is_held_out else "train"


def _check_not_empty(
    side: str,
    count: int,
    num_documents: int,
    source: str | None,
    held_out_fraction: float,
    tally: _Tally,
) -> None:
    if count:
        return
    where = f"source={source!r}" if source else "the standard library"
    if not num_documents:
        left_out = _left_out(tally.num_duplicates, tally.skipped)
        raise ValueError(f"{where} holds no document: {tally.num_files} files{left_out}")
    raise ValueError(
        f"held_out_fraction={held_out_fraction} leaves no {side} document among the "
        f"{num_documents} of {where}"
    )


def _left_out(num_duplicates: int, skipped: Mapping[str, Skipped]) -> str:
    parts = [
        f"{total} {reason} ({', '.join(examples)}{', ...' if total > len(examples) else ''})"
        for reason, (total, examples) in skipped.items()
    ]
    if num_duplicates:
        parts.append(f"{num_duplicates} duplicates")
    return "".join(f", {part}" for part in parts)


def _report(tally: _Tally, train: TokenizedDocuments, held_out: TokenizedDocuments) -> CorpusReport:
    return CorpusReport(
        num_files=tally.num_files,
        num_duplicates=tally.num_duplicates,
        skipped=tally.skipped,
        train_documents=len(train),
        train_bytes=int(train.num_bytes.sum()),
        train_tokens=len(train.tokens),
        held_out_documents=len(held_out),
        held_out_bytes=int(held_out.num_bytes.sum()),
        held_out_tokens=len(held_out.tokens),
    )


def _tokenize(
    source: str | None,
    text_key: str,
    tokenizer: Tokenizer,
    index: list[_Entry],
    dtype: np.dtype,
    sinks: Mapping[str, io.BufferedIOBase],
) -> dict[str, np.ndarray]:
    """Reads the corpus again, writes the ids of each side to its sink, and returns the starts."""
    bos, eos = np.array([tokenizer.bos_id], dtype), np.array([tokenizer.eos_id], dtype)
    starts = {side: [0] for side in SIDES}
    documents = _read(source, text_key, _Tally())
    for entry, document in itertools.zip_longest(index, documents):
        if entry is None or document is None or entry.digest != document[1]:
            name = entry.name if entry else document[0]
            raise ValueError(f"{name} changed while the corpus was being read")
        tokens = np.concatenate([bos, tokenizer.encode(document[2]).astype(dtype), eos])
        sinks[entry.side].write(tokens.tobytes())
        starts[entry.side].append(starts[entry.side][-1] + len(tokens))
    return {side: np.array(values, "<i8") for side, values in starts.items()}


def _cache_key(tokenizer: Tokenizer, held_out_fraction: float, index: list[_Entry]) -> str:
    settings = [FORMAT_VERSION, tokenizer.fingerprint, tokenizer.bos_id, tokenizer.eos_id]
    hasher = hashlib.sha256(json.dumps([*settings, held_out_fraction]).encode())
    for entry in index:
        hasher.update(entry.digest)
    return hasher.hexdigest()
