"""The loop every family trains with: step, log, evaluate, checkpoint, stop in good order."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from absl import logging
from jaxtyping import Array, PyTree

from moe_jax.training.checkpoints import Checkpoints
from moe_jax.training.interrupts import Interrupts
from moe_jax.training.metrics import MetricWriter
from moe_jax.training.progress import Progress
from moe_jax.training.state import TrainState


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite."""


@runtime_checkable
class Batches(Protocol):
    """Endless iterator whose position can be saved; grain's dataset iterators are such."""

    def __next__(self) -> PyTree:
        """The next batch."""

    def get_state(self) -> dict[str, Any]:
        """Position, of values JSON can hold."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Returns to a position."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long to train and how often to look; validates itself.

    Attributes:
        num_steps: optimiser steps of the whole run.
        log_every: steps between records of the training metrics, each their mean since the last.
        eval_every: steps between evaluations; the last step is always evaluated.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep: newest checkpoints kept, besides the best.
        max_skipped_in_row: non-finite steps in a row that end the run.

    Raises:
        ValueError: if a value is not a positive integer.
    """

    num_steps: int
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    keep: int = 3
    max_skipped_in_row: int = 10

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def restore_or_init(
    checkpoints: Checkpoints,
    init: Callable[[], TrainState],
    batches: Batches,
    shardings: PyTree | None = None,
) -> TrainState:
    """The newest good checkpoint's state, with `batches` moved to its position, or a fresh state.

    Either way it is made on `shardings`, one for each leaf, whatever those it was saved from; on
    the default device if None.

    Raises:
        CheckpointMismatchError, CheckpointCorruptError: see `Checkpoints.restore`.
    """
    wanted = jax.eval_shape(init)
    if shardings is not None:
        wanted = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), wanted, shardings
        )
    restored = checkpoints.restore(wanted)
    if restored is None:
        return jax.jit(init, out_shardings=shardings)()
    batches.set_state(restored.data_state)
    logging.info("resuming from %s", checkpoints.path(restored.step))
    return restored.state


def train(
    state: TrainState,
    batches: Batches,
    train_step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]],
    evaluate: Callable[[TrainState], Mapping[str, float]],
    config: LoopConfig,
    *,
    checkpoints: Checkpoints,
    writer: MetricWriter,
    progress: Progress,
    interrupts: Interrupts,
    per_step: Mapping[str, float],
) -> tuple[TrainState, signal.Signals | None]:
    """Trains from `state.step` to `config.num_steps`, or until a signal asks to stop.

    Records of kind `train` hold the mean of every metric over the applied steps since the last
    record, and the `seconds` all steps took, without evaluations and saving. Records of kind `eval`
    hold what `evaluate(state)` returns; a checkpoint saved at an evaluated step carries those
    figures. A step that was skipped has a record of kind `skipped`. On a signal
    to any of a run's processes the state is saved at once. Each evaluation is shown in a line with
    the best so far, earlier processes' included.

    Args:
        state: donated.
        batches: at the position that belongs to `state`.
        train_step: see `make_train_step`.
        evaluate: scores the state on held-out data.
        config: lengths and intervals.
        checkpoints: where the state is saved.
        writer: takes the records.
        progress: shows the metrics of every step.
        interrupts: says when to stop.
        per_step: amounts of work in one step by unit, such as tokens; recorded as rates a second.

    Returns:
        The last state, and the signal that ended the run early, if any.

    Raises:
        TrainingDivergedError: after `max_skipped_in_row` non-finite steps; parameters of the last
            checkpoint are finite and named in the message.
    """
    step = int(state.step)
    if step < config.num_steps:
        progress.print("compiling the training step")
    window = _Window(per_step)
    while step < config.num_steps and interrupts.agreed() is None:
        state, metrics = train_step(state, next(batches))
        step += 1
        host_metrics = jax.device_get(metrics)
        window.add(host_metrics)
        if not host_metrics["update_applied"]:
            _report_skipped(step, host_metrics, config.max_skipped_in_row, checkpoints, writer)
        progress.update(step, **window.latest())
        last = step == config.num_steps
        if step % config.log_every == 0 or last:
            writer.write(step, "train", window.summary())
            window.restart()
        evaluation = None
        if step % config.eval_every == 0 or last:
            with window.paused():
                evaluation = evaluate(state)
            writer.write(step, "eval", evaluation)
            best = writer.lowest("eval", checkpoints.best_metric)
            progress.print(_evaluation_line(step, evaluation, best))
        if step % config.checkpoint_every == 0 or last:
            with window.paused():
                checkpoints.save(step, state, batches.get_state(), evaluation)
    if checkpoints.latest_step() != step:
        checkpoints.save(step, state, batches.get_state())
    checkpoints.wait()
    return state, interrupts.agreed()


def _evaluation_line(
    step: int, evaluation: Mapping[str, float], best: tuple[int, float] | None
) -> str:
    scores = [f"{name.replace('_', ' ')} {score:.4f}" for name, score in evaluation.items()]
    if best is not None:
        scores.append(f"best {best[1]:.4f} at step {best[0]}")
    return f"step {step}, held out: {', '.join(scores)}"


class _Window:
    """Metrics and time since the last record."""

    def __init__(self, per_step: Mapping[str, float]) -> None:
        self._per_step = per_step
        self._is_compiling = True
        self.restart()

    def restart(self) -> None:
        self._applied: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._num_timed = 0
        self._start = time.perf_counter()

    def add(self, metrics: dict[str, Any]) -> None:
        self._last = metrics
        if metrics["update_applied"]:
            self._applied.append(metrics)
        self._num_timed += 1
        if self._is_compiling:
            # The first step of a process compiles, which says nothing of the rate.
            self._is_compiling = False
            self._num_timed = 0
            self._start = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps the time spent inside out of the rates."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def latest(self) -> dict[str, float]:
        scalars = {name: value for name, value in self._last.items() if np.ndim(value) == 0}
        return {name: float(value) for name, value in scalars.items()} | self._rates()

    def summary(self) -> dict[str, Any]:
        """Means over applied steps; the last step's own values if none was applied."""
        counters = ("skipped", "skipped_in_row")
        metrics = {
            name: np.mean([step[name] for step in self._applied or [self._last]], axis=0)
            for name in self._last
            if name not in ("update_applied", *counters)
        }
        counts = {name: int(self._last[name]) for name in counters}
        return metrics | counts | self._rates() | {"seconds": time.perf_counter() - self._start}

    def _rates(self) -> dict[str, float]:
        if self._num_timed == 0:
            return {}
        rate = self._num_timed / max(time.perf_counter() - self._start, 1e-9)
        return {f"{unit}_per_second": amount * rate for unit, amount in self._per_step.items()}


def _report_skipped(
    step: int,
    metrics: Mapping[str, Any],
    max_in_row: int,
    checkpoints: Checkpoints,
    writer: MetricWriter,
) -> None:
    statistics = {
        name: np.round(value, 4).tolist()
        for name, value in metrics.items()
        if name not in ("update_applied", "skipped")
    }
    writer.write(step, "skipped", dict(metrics))
    logging.warning("step %d skipped: loss or gradient is not finite; %s", step, statistics)
    if metrics["skipped_in_row"] < max_in_row:
        return
    latest = checkpoints.latest_step()
    last_good = "no checkpoint yet"
    if latest is not None:
        last_good = f"last good checkpoint {checkpoints.path(latest)}"
    raise TrainingDivergedError(
        f"step {step}: loss or gradient not finite {max_in_row} times in a row; {last_good}; "
        f"statistics of the step: {statistics}"
    )
