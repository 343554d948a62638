"""Checkpoints of a run: written in the background, verified on reading, newest and best kept.

A checkpoint is one directory, named by its step, that is renamed into place when all of it is
written. A process killed at any moment leaves the earlier ones whole.
"""

import contextlib
import logging as python_logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jaxtyping import PyTree

from moe_jax.training import checkpoint_files
from moe_jax.training.checkpoint_files import CheckpointMismatchError as CheckpointMismatchError


class CheckpointCorruptError(ValueError):
    """Checkpoints exist and none of them can be read."""


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written."""


class Restored(NamedTuple):
    """What `Checkpoints.restore` found.

    Attributes:
        step: the step the checkpoint was saved under.
        state: the saved pytree, in the structure and on the shardings that were asked for.
        data_state: position in the data, as JSON gives it back: tuples are lists, keys strings.
    """

    step: int
    state: Any
    data_state: dict[str, Any]


class Checkpoints:
    """The checkpoints under one directory. Every process of a run makes the same calls.

    Nothing is created, changed or removed before the first `save`, so that a second program may
    read the checkpoints of a live run.

    Args:
        directory: local path, or a URL that orbax and etils know, such as gs://bucket/run.
        keep: number of newest checkpoints kept, at least 1.
        keep_best: number of checkpoints kept for having the lowest `best_metric`, whatever their
            age. Checkpoints saved without that metric, or with a non-finite one, never count.
        best_metric: name of a metric, lower is better.
        asynchronous: whether `save` returns once the arrays are copied, and writes behind.

    Raises:
        ValueError: if `keep` or `keep_best` is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 1,
        best_metric: str = "bits_per_byte",
        asynchronous: bool = True,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best} must be at least 0")
        self._directory = _absolute(directory)
        self._policy = _NewestAndBest(keep, keep_best, best_metric)
        self._asynchronous = asynchronous
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None
        self._unreadable: tuple[int, ...] = ()
        _quieten_orbax()

    @property
    def best_metric(self) -> str:
        """Name of the metric that decides which checkpoint is best."""
        return self._policy.metric

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def path(self, step: int) -> epath.Path:
        """Directory of the checkpoint of `step`."""
        return self._directory / str(step)

    def latest_step(self) -> int | None:
        """Newest step saved or being saved; those that `restore` found unreadable do not count."""
        return max(set(self._steps()) - set(self._unreadable), default=None)

    def best_step(self) -> int | None:
        """Step of the lowest `best_metric`, the newest of equal ones; None if none records it."""
        steps = self._steps()
        self._note_recorded(steps)
        return self._policy.best(steps)

    def save(
        self,
        step: int,
        state: PyTree,
        data_state: dict[str, Any],
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves `state`, whose buffers may be donated as soon as this returns.

        Waits for the save before it. Checkpoints that `restore` found unreadable are removed first.

        Args:
            step: number of the checkpoint, past that of every readable one.
            state: pytree of arrays; typed random keys are allowed.
            data_state: position in the data, in values that JSON can hold. Process 0's is kept.
            metrics: scalars; all are recorded, `best_metric` decides which checkpoint is best.

        Raises:
            CheckpointSaveError: if this save fails at once, or the one before failed behind.
            ValueError: if `step` is not past the newest checkpoint, or `data_state` is not JSON.
        """
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(f"step={step} is not past {latest}, the newest in {self._directory}")
        leaves = checkpoint_files.named_leaves(state)
        args = checkpoint_files.save_args(leaves, data_state, metrics)
        self._saving = step
        try:
            manager = self._open_for_writing()
            for unreadable in self._unreadable:
                manager.delete(unreadable)
            self._unreadable = ()
            self._policy.note(step, metrics)
            manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Returns once the save under way, if any, is on disk.

        Raises:
            CheckpointSaveError: if it failed.
        """
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed_save(error) from error
        self._saving = None

    def close(self) -> None:
        """Waits for the save under way and releases the threads; raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def restore(
        self, abstract_state: PyTree, *, step: int | None = None, partial: bool = False
    ) -> Restored | None:
        """Restores the newest checkpoint that reads back as it was written, or that of `step`.

        Of the newest ones, those with missing, cut or altered files are passed over with a warning.
        Digests cover every leaf that one process saw whole when it was saved; shards of leaves that
        no process sees whole have only tensorstore's checks.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct`, or of anything with shape, dtype and
                perhaps sharding. Leaves without sharding come back uncommitted, on the default
                device.
            step: the checkpoint to take, and no other.
            partial: leave unread what `abstract_state` lacks, such as the optimiser's state. Leaves
                go by their names: {"params": ...} takes the parameters of a `TrainState`.

        Returns:
            None if the directory holds no checkpoint.

        Raises:
            ValueError: if there are checkpoints, but none of `step`.
            CheckpointMismatchError: if the newest readable one holds another pytree.
            CheckpointCorruptError: if none of those that may be taken is readable.
            CheckpointSaveError: if a save under way failed.
        """
        self.wait()
        steps = sorted(self._steps(), reverse=True)
        if step is not None and steps:
            if step not in steps:
                raise ValueError(
                    f"step={step} is not among the checkpoints in {self._directory}: "
                    f"{', '.join(map(str, steps[::-1]))}"
                )
            steps = [step]
        with checkpoint_files.no_stray_reads():
            return self._first_readable(steps, abstract_state, partial)

    def _first_readable(
        self, steps: Sequence[int], abstract_state: PyTree, partial: bool
    ) -> Restored | None:
        wanted = checkpoint_files.named_leaves(abstract_state)
        reasons: dict[int, str] = {}
        for step in steps:
            path = self.path(step)
            try:
                record = checkpoint_files.read_record(path)
                checkpoint_files.check_match(path, record["leaves"], wanted, partial=partial)
                leaves = checkpoint_files.read_leaves(path, record["leaves"], wanted)
            except CheckpointMismatchError:
                raise
            except Exception as error:
                reasons[step] = _one_line(error)
                logging.warning("checkpoint %s passed over: %s", path, reasons[step])
                continue
            self._unreadable = tuple(reasons)
            structure = jax.tree.structure(abstract_state)
            state = jax.tree.unflatten(structure, [leaves[name] for name in wanted])
            return Restored(step, state, record["data_state"])
        if reasons:
            listed = "; ".join(f"step {step}: {reason}" for step, reason in reasons.items())
            if len(reasons) < len(self._steps()):
                raise CheckpointCorruptError(
                    f"a checkpoint in {self._directory} cannot be read, others may be ({listed})"
                )
            raise CheckpointCorruptError(
                f"no checkpoint in {self._directory} can be read, move it away to start afresh"
                f" ({listed})"
            )
        return None

    def _steps(self) -> Sequence[int]:
        if self._manager is not None:
            return self._manager.all_steps()
        found = ocp.path.step.standard_name_format().find_all(self._directory)
        return [metadata.step for metadata in found]

    def _open_for_writing(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._note_recorded(self._steps())
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._policy,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=self._asynchronous,
                # Made at once, so that an unwritable directory fails the call that names it.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            )
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        return self._manager

    def _note_recorded(self, steps: Sequence[int]) -> None:
        """Reads the scores of earlier processes; those of this one may still be in the writing."""
        for step in steps:
            if not self._policy.knows(step):
                self._policy.note(step, _recorded_metrics(self.path(step)))

    def _failed_save(self, error: Exception) -> CheckpointSaveError:
        step, self._saving = self._saving, None
        manager, self._manager = self._manager, None
        if manager is not None:
            # Orbax has already struck the checkpoints this save would have replaced off its list,
            # and holds on to the broken one; a new manager, at the next save, clears that up.
            with contextlib.suppress(Exception):
                manager.close()
        path = self._directory / str(step)
        return CheckpointSaveError(f"checkpoint {path} was not written: {_one_line(error)}")


class _NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Which checkpoints orbax keeps: the `keep` newest and the `keep_best` of lowest `metric`."""

    def __init__(self, keep: int, keep_best: int, metric: str) -> None:
        self._keep = keep
        self._keep_best = keep_best
        self.metric = metric
        self._scores: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        self._scores[step] = math.inf
        if metrics is not None and math.isfinite(metrics.get(self.metric, math.inf)):
            self._scores[step] = float(metrics[self.metric])

    def knows(self, step: int) -> bool:
        return step in self._scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        kept = {*steps[-self._keep :], *self._by_score(steps)[: self._keep_best]}
        return [checkpoint.step in kept for checkpoint in checkpoints]

    def best(self, steps: Sequence[int]) -> int | None:
        return next(iter(self._by_score(steps)), None)

    def _by_score(self, steps: Sequence[int]) -> list[int]:
        scored = [step for step in steps if self._scores[step] < math.inf]
        return sorted(scored, key=lambda step: (self._scores[step], -step))


def _recorded_metrics(path: epath.Path) -> dict[str, float] | None:
    try:
        return checkpoint_files.read_record(path)["metrics"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _absolute(directory: str | os.PathLike[str]) -> epath.Path:
    path = epath.Path(directory)
    return path if "://" in os.fspath(directory) else path.expanduser().absolute()


def _one_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    first = next(iter(str(error).strip().splitlines()), "no reason given")
    # Tensorstore puts the cause last, behind several long paths, and then repeats its settings.
    first = first.split(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {first if len(first) <= 240 else '...' + first[-240:]}"


def _quieten_orbax() -> None:
    """Drops orbax's progress reports, and its tracebacks of errors that are raised here anyway."""
    logger = logging.get_absl_logger()
    if _keep_log_record not in logger.filters:
        logger.addFilter(_keep_log_record)


def _keep_log_record(record: python_logging.LogRecord) -> bool:
    if f"{os.sep}orbax{os.sep}" not in record.pathname:
        return True
    return record.levelno >= python_logging.WARNING and not record.exc_info
