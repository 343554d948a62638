"""Metrics of a run as JSON lines, which figures read, and as TensorBoard events."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
_MAX_CURVES = 64
# JSON has no numbers for these; Python's spelling is the one its own `float` reads back.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricWriter:
    """Appends records to `metrics.jsonl` and to TensorBoard events; only process 0 writes.

    A record is one line, {"step": 40, "kind": "train", "loss": 1.9, "load": [[0.1, 0.9]]}. Arrays
    are nested lists; nan and infinities are the strings "NaN", "Infinity" and "-Infinity". A line
    is handed to the system before `write` returns, so a killed process loses none that returned;
    TensorBoard's events follow within seconds.

    TensorBoard gets each scalar as kind/name and each vector of up to 64 numbers as kind/name/00,
    kind/name/01 and so on; of a matrix of up to 64 rows, such as the load by layer and expert, it
    gets each row's minimum and maximum, and of larger arrays minimum, mean and maximum.

    Args:
        workdir: directory of the run.
        resume_step: step of the checkpoint the run starts from. Records past it were left by a
            process that died after its last checkpoint, and are dropped. None is a start from
            nothing, which drops them all.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self._lines = None
        if jax.process_index() != 0:
            return
        Path(workdir).mkdir(parents=True, exist_ok=True)
        path = Path(workdir) / METRICS_FILE
        first_step = 0 if resume_step is None else resume_step + 1
        _drop_records_from(path, first_step)
        self._lines = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(
            str(Path(workdir) / TENSORBOARD_DIRECTORY),
            purge_step=first_step,
            flush_secs=5,
            # Its file names otherwise differ only by the second, and it overwrites.
            filename_suffix=f".{time.time_ns()}",
        )

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Appends one record.

        Args:
            step: step the numbers belong to.
            kind: what they describe, such as train or eval.
            metrics: numbers and arrays of numbers by name, in the memory of host or device.

        Raises:
            ValueError: if a metric is named step or kind, or is not numeric.
        """
        if self._lines is None:
            return
        arrays = {name: _numeric(name, value) for name, value in metrics.items()}
        record = {"step": step, "kind": kind}
        record |= {name: _spell_non_finite(array.tolist()) for name, array in arrays.items()}
        self._lines.write(json.dumps(record, allow_nan=False) + "\n")
        self._lines.flush()
        curves = {
            f"{kind}/{name}{suffix}": number
            for name, array in arrays.items()
            for suffix, number in _curves(array)
        }
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in curves.items()]
        self._events.file_writer.add_summary(Summary(value=values), step)

    def lowest(self, kind: str, name: str) -> tuple[int, float] | None:
        """Step and value of the lowest finite scalar metric of a kind, of equal ones the newest.

        Records of earlier processes count. None if there is none, or on a process but the first.
        """
        if self._lines is None:
            return None
        found = [
            (record[name], -record["step"])
            for record in read_metrics(self._lines.name)
            if record["kind"] == kind and math.isfinite(record.get(name, math.nan))
        ]
        if not found:
            return None
        value, step = min(found)
        return -step, value

    def close(self) -> None:
        """Writes out everything and closes the files."""
        if self._lines is not None:
            self._lines.close()
            self._events.close()
            self._lines = None


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a `metrics.jsonl`, in order, nan and infinities as floats.

    A last line that was cut short by a killed process is left out.

    Raises:
        ValueError: if another line is damaged.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, (_, record) in enumerate(_parse(lines), start=1):
        if record is not None:
            records.append({name: _read_non_finite(value) for name, value in record.items()})
        elif number < len(lines):
            raise ValueError(f"line {number} of {path} is not a record of metrics")
    return records


def _parse(lines: list[bytes]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line with its record, None where there is none."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
        yield line, record if is_record else None


def _drop_records_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    parsed = list(_parse(lines))
    damaged = sum(record is None for _, record in parsed[:-1])
    if damaged:
        logging.warning("dropped %d damaged lines of %s", damaged, path)
    kept = [line for line, record in parsed if record is not None and record["step"] < first_step]
    rewritten = path.with_suffix(".tmp")
    with rewritten.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)


def _numeric(name: str, value: Any) -> np.ndarray:
    if name in ("step", "kind"):
        raise ValueError(f"a metric cannot be named {name}")
    array = np.asarray(value)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise ValueError(f"metric {name}={value!r} is not numeric")
    return array


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_spell_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _read_non_finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_read_non_finite(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _curves(array: np.ndarray) -> Iterator[tuple[str, float]]:
    numbers = array.astype(np.float64)
    if array.ndim == 0:
        yield "", float(numbers)
    elif array.ndim == 1 and array.size <= _MAX_CURVES:
        yield from ((f"/{index:02d}", float(number)) for index, number in enumerate(numbers))
    elif array.ndim == 2 and array.shape[0] <= _MAX_CURVES and array.size:
        for index, row in enumerate(numbers):
            yield f"/{index:02d}/min", float(row.min())
            yield f"/{index:02d}/max", float(row.max())
    elif array.size:
        yield "/min", float(numbers.min())
        yield "/mean", float(numbers.mean())
        yield "/max", float(numbers.max())
