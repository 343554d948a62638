"""What one checkpoint holds, and how it is read back and verified.

`state/` holds the arrays, written by orbax under the names of their leaves. `record/` holds one
JSON file, under a checksum of its own: the shape, dtype and digest of every leaf, the position in
the data and the metrics. The digests are there because orbax and tensorstore check their indices
but not the numbers: an array with a flipped bit reads back as another array.
"""

import contextlib
import gc
import json
import logging
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jaxtyping import PyTree


class CheckpointMismatchError(ValueError):
    """A checkpoint is sound but holds leaves of another name, shape or dtype."""


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by name, such as params/decoder/w, in the order of the flattened tree.

    Raises:
        ValueError: if two leaves have the same name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves of the state are named {name}")
        named[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return named


def save_args(
    leaves: dict[str, Any], data_state: dict[str, Any], metrics: Mapping[str, Any] | None
) -> ocp.args.Composite:
    """What orbax is to write.

    Raises:
        ValueError: if `data_state` cannot be written as JSON.
    """
    described = {}
    for name, leaf in leaves.items():
        described[name] = {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "key": str(jax.random.key_impl(leaf)) if _is_key(leaf) else None,
            "digest": _digest(_numbers(leaf)),
        }
    values = None if metrics is None else {name: float(value) for name, value in metrics.items()}
    record = {"leaves": described, "data_state": data_state, "metrics": values}
    try:
        sealed = {"checksum": _checksum(record), "record": record}
    except (TypeError, ValueError) as error:
        raise ValueError(f"data_state cannot be written as JSON: {error}") from error
    # Orbax refuses arrays without elements; the record alone describes them.
    arrays = {name: _numbers(leaf) for name, leaf in leaves.items() if leaf.size}
    return ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(sealed))


def read_record(path: epath.Path) -> dict[str, Any]:
    """Record of the checkpoint at `path`; damage raises OSError, ValueError or LookupError."""
    sealed = json.loads((path / "record" / "metadata").read_text())
    if _checksum(sealed["record"]) != sealed["checksum"]:
        raise ValueError("record/metadata does not match its checksum")
    return sealed["record"]


def check_match(
    path: epath.Path, saved: dict[str, Any], wanted: dict[str, Any], *, partial: bool = False
) -> None:
    """Compares the leaves a record describes with those a run needs.

    With `partial` the record may describe others besides.

    Raises:
        CheckpointMismatchError: naming the first few leaves that differ.
    """
    differences = []
    for name, leaf in wanted.items():
        if name not in saved:
            differences.append(f"{name} is missing, this run needs it")
            continue
        shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
        if shape != tuple(leaf.shape):
            differences.append(f"{name} has shape {shape}, this run needs {tuple(leaf.shape)}")
        if dtype != str(leaf.dtype):
            differences.append(f"{name} has dtype {dtype}, this run needs {leaf.dtype}")
    if not partial:
        differences += [f"{name} is unknown to this run" for name in saved if name not in wanted]
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointMismatchError(f"checkpoint {path}: {'; '.join(differences[:3])}{more}")


def read_leaves(
    path: epath.Path, saved: dict[str, Any], wanted: dict[str, Any]
) -> dict[str, jax.Array]:
    """Reads and verifies the leaves `wanted`, which must match the record's, and no others.

    Args:
        path: the checkpoint.
        saved: the record's description of every leaf.
        wanted: leaves with shape, dtype and perhaps sharding.

    Returns:
        Arrays on the wanted shardings; uncommitted, on the default device, where there is none.

    Raises:
        Exception: damage shows as almost any, from tensorstore, the file system, JSON or orbax.
    """
    stored = {name: leaf for name, leaf in wanted.items() if leaf.size}
    restore_args = {name: _restore_args(leaf) for name, leaf in stored.items()}
    try:
        part: dict[str, Any] = {}
        if wanted.keys() != saved.keys():
            part = {"item": dict.fromkeys(stored, 0), "partial_restore": True}
        restore = ocp.args.PyTreeRestore(restore_args=restore_args, **part)
        arrays = ocp.PyTreeCheckpointHandler().restore(path / "state", args=restore)
        for name in stored:
            if saved[name]["digest"] not in (None, _digest(arrays[name])):
                raise ValueError(f"{name} does not match its digest")
    except Exception:
        _every_process(False)
        raise
    if not _every_process(True):
        raise ValueError("another process could not read its part")
    for name in wanted.keys() - stored.keys():
        empty = jax.eval_shape(_numbers, wanted[name])
        arrays[name] = np.zeros(empty.shape, empty.dtype)
    return {name: _place(arrays[name], saved[name], leaf) for name, leaf in wanted.items()}


@contextlib.contextmanager
def no_stray_reads() -> Iterator[None]:
    """Keeps off the terminal what orbax leaves behind when one of several reads fails.

    It closes its event loop at once; the other reads then end in it, and say so.
    """
    leftovers = ("Event loop is closed", "Encountered error while reading array index")

    def keep_log_record(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    def report(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(leftovers):
            previous(unraisable)

    previous, sys.unraisablehook = sys.unraisablehook, report
    logger = logging.getLogger("asyncio")
    logger.addFilter(keep_log_record)
    try:
        yield
    finally:
        # Abandoned reads sit in reference cycles and report when these are collected.
        gc.collect()
        sys.unraisablehook = previous
        logger.removeFilter(keep_log_record)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    """The array itself, or the words of a typed random key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _digest(array: Any) -> str | None:
    """Checksum of the bytes in row-major order; None if this process sees only a part of them."""
    partial = isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    )
    if partial:
        return None
    flat = np.ascontiguousarray(np.asarray(array)).reshape(-1)
    return f"{zlib.crc32(flat.view(np.uint8).data):08x}"


def _checksum(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or _is_key(leaf):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape)


def _place(array: Any, saved: dict[str, Any], wanted: Any) -> jax.Array:
    if isinstance(array, jax.Array):
        return array

    def finish(numbers: Any) -> jax.Array:
        return jax.random.wrap_key_data(numbers, impl=saved["key"]) if saved["key"] else numbers

    sharding = getattr(wanted, "sharding", None)
    if sharding is None:
        return finish(jnp.asarray(array))
    # Unlike device_put, a jitted function may put keys on devices of other processes.
    return jax.jit(finish, out_shardings=sharding)(array)


def _every_process(ok: bool) -> bool:
    """Whether every process is content; without this they would restore different steps."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))
