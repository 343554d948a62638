import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.training.checkpoints import CheckpointMismatchError, Checkpoints
from moe_jax.training.interrupts import Interrupts
from moe_jax.training.loop import LoopConfig, TrainingDivergedError, restore_or_init, train
from moe_jax.training.metrics import MetricWriter, read_metrics
from moe_jax.training.progress import Progress
from moe_jax.training.state import init_state
from moe_jax.training.step import make_train_step

OPTIMIZER = optax.adam(0.1)
CONFIG = LoopConfig(num_steps=10, log_every=2, eval_every=4, checkpoint_every=3, keep=2)


class Counter:
    """Batches 0, 1, 2, ... as float32[2]; `bad` ones are not finite."""

    def __init__(self, bad=()):
        self.position, self.bad = 0, bad

    def __next__(self):
        value = np.nan if self.position in self.bad else float(self.position)
        self.position += 1
        return jnp.full((2,), value, jnp.float32)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def loss_function(params, model_state, batch, share, key):
    loss = jnp.sum(jnp.square(params["w"] - batch)) + 0.01 * jnp.sum(
        jax.random.normal(key, (2,), jnp.float32) * params["w"]
    )
    return loss * share, ({"first": batch[0], "pair": jnp.stack([loss, loss * 2])}, {})


TRAIN_STEP = make_train_step(
    loss_function, OPTIMIZER, batch_weight=lambda batch: jnp.float32(batch.shape[0])
)


def init():
    return init_state(jax.random.key(1), {"w": jnp.zeros((2,), jnp.float32)}, OPTIMIZER)


def evaluate(state):
    return {"bits_per_byte": float(jnp.sum(state.params["w"]))}


def run(
    folder,
    batches=None,
    config=CONFIG,
    step=TRAIN_STEP,
    interrupts=None,
    score=evaluate,
    make_state=init,
):
    """Trains in `folder`, from its newest checkpoint if it has one."""
    folder.mkdir(exist_ok=True)
    batches = batches or Counter()
    with Checkpoints(folder / "checkpoints", keep=config.keep) as checkpoints:
        state = restore_or_init(checkpoints, make_state, batches)
        first = int(state.step)
        with (
            MetricWriter(folder, resume_step=first or None) as writer,
            Progress(config.num_steps, first) as progress,
        ):
            return train(
                state,
                batches,
                step,
                score,
                config,
                checkpoints=checkpoints,
                writer=writer,
                progress=progress,
                interrupts=interrupts or Interrupts(),
                per_step={"rows": 2.0},
            )


def records(folder, kind):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def saved_steps(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_records_and_checkpoints_come_at_their_intervals_and_at_the_end(tmp_path):
    state, stopped = run(tmp_path)
    assert int(state.step) == 10 and stopped is None
    assert [record["step"] for record in records(tmp_path, "train")] == [2, 4, 6, 8, 10]
    assert [record["step"] for record in records(tmp_path, "eval")] == [4, 8, 10]
    assert saved_steps(tmp_path) == [9, 10]


def test_training_records_are_means_since_the_last_record(tmp_path):
    run(tmp_path)
    # Batches 0 and 1 end at step 2, 2 and 3 at step 4, and so on.
    assert [record["first"] for record in records(tmp_path, "train")] == [0.5, 2.5, 4.5, 6.5, 8.5]
    last = records(tmp_path, "train")[-1]
    assert np.shape(last["pair"]) == (2,)
    assert last["rows_per_second"] > 0 and last["seconds"] > 0


def test_resuming_from_any_checkpoint_gives_the_same_state(tmp_path):
    whole, _ = run(tmp_path / "whole")
    for steps in (1, 3, 7):
        folder = tmp_path / str(steps)
        run(folder, config=dataclasses.replace(CONFIG, num_steps=steps))
        resumed, _ = run(folder)
        for first, second in zip(
            jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True
        ):
            np.testing.assert_array_equal(first, second)
        # A run of 7 steps ends with a record of its own at step 7.
        steps = [record["step"] for record in records(folder, "train")]
        assert [step for step in steps if step % 2 == 0] == [2, 4, 6, 8, 10]


def with_model_state():
    """A state whose model counts what it has seen, and a step that lets it."""

    def loss(params, model_state, batch, share, key):
        value, (metrics, _) = loss_function(params, model_state, batch, share, key)
        return value + model_state["total"] * 0.01, (metrics, {"total": jnp.sum(batch)})

    step = make_train_step(
        loss,
        OPTIMIZER,
        batch_weight=lambda batch: jnp.float32(batch.shape[0]),
        accumulate=2,
        update_model_state=lambda model_state, totals: {
            "total": model_state["total"] + totals["total"]
        },
    )
    make_state = lambda: init_state(  # noqa: E731
        jax.random.key(1),
        {"w": jnp.zeros((2,), jnp.float32)},
        OPTIMIZER,
        {"total": jnp.zeros((), jnp.float32)},
    )
    return make_state, step


def test_model_state_is_resumed_bit_for_bit(tmp_path):
    make_state, step = with_model_state()
    whole, _ = run(tmp_path / "whole", step=step, make_state=make_state)
    assert whole.model_state["total"] == 2 * sum(range(10))
    config = dataclasses.replace(CONFIG, num_steps=7)
    run(tmp_path / "parts", config=config, step=step, make_state=make_state)
    resumed, _ = run(tmp_path / "parts", step=step, make_state=make_state)
    for name in ("params", "model_state", "opt_state"):
        first, second = jax.tree.leaves(whole[name]), jax.tree.leaves(resumed[name])
        for left, right in zip(first, second, strict=True):
            np.testing.assert_array_equal(left, right)


def test_checkpoint_without_the_model_state_is_refused_in_one_line(tmp_path):
    run(tmp_path, config=dataclasses.replace(CONFIG, num_steps=1))
    make_state, step = with_model_state()
    with pytest.raises(CheckpointMismatchError) as error:
        run(tmp_path, step=step, make_state=make_state)
    assert "checkpoints/1: model_state/total is missing, this run needs it" in str(error.value)
    assert "\n" not in str(error.value)


def test_finished_run_does_nothing_more(tmp_path):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    batches = Counter()
    state, _ = run(tmp_path, batches)
    assert int(state.step) == 10 and batches.position == 10
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_signal_saves_the_step_it_finds(tmp_path):
    with Interrupts() as interrupts:

        def step(state, batch):
            if int(state.step) == 4:
                signal.raise_signal(signal.SIGTERM)
            return TRAIN_STEP(state, batch)

        state, stopped = run(tmp_path, step=step, interrupts=interrupts)
    assert stopped == signal.SIGTERM and int(state.step) == 5
    assert saved_steps(tmp_path) == [3, 5]


def test_signal_before_the_first_step_saves_step_0(tmp_path):
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        _, stopped = run(tmp_path, interrupts=interrupts)
    assert stopped == signal.SIGINT
    assert saved_steps(tmp_path) == [0]
    state, _ = run(tmp_path)
    assert int(state.step) == 10


def test_non_finite_steps_are_left_out_of_the_means_and_counted(tmp_path):
    state, _ = run(tmp_path, Counter(bad=(2, 6, 7)))
    assert int(state.skipped) == 3 and int(state.skipped_in_row) == 0
    train_records = records(tmp_path, "train")
    assert [record["skipped"] for record in train_records] == [0, 1, 1, 3, 3]
    assert train_records[1]["first"] == 3.0
    assert np.isnan(train_records[3]["first"])
    assert [record["step"] for record in records(tmp_path, "skipped")] == [3, 7, 8]
    assert np.isfinite(state.params["w"]).all()


def test_too_many_non_finite_steps_in_a_row_end_the_run(tmp_path):
    config = dataclasses.replace(CONFIG, max_skipped_in_row=3)
    with pytest.raises(TrainingDivergedError) as error:
        run(tmp_path, Counter(bad=(1, 4, 5, 6)), config)
    assert "step 7: loss or gradient not finite 3 times in a row" in str(error.value)
    assert f"last good checkpoint {tmp_path}/checkpoints/6" in str(error.value)
    assert "pair" in str(error.value)
    assert "\n" not in str(error.value)


def test_divergence_before_any_checkpoint_says_so(tmp_path):
    config = dataclasses.replace(CONFIG, max_skipped_in_row=1)
    with pytest.raises(TrainingDivergedError, match="step 1: .* 1 times in a row; no checkpoint"):
        run(tmp_path, Counter(bad=(0,)), config)


def test_each_evaluation_has_a_line_with_the_best_so_far(tmp_path, capsys):
    scores = {4: 2.5, 8: 2.0, 9: 2.5, 10: 2.25}

    def lines(num_steps):
        config = dataclasses.replace(CONFIG, num_steps=num_steps)
        run(tmp_path, config=config, score=lambda state: {"bits_per_byte": scores[int(state.step)]})
        shown = capsys.readouterr().err.splitlines()
        assert sum("compiling" in line for line in shown) == 1
        return [line for line in shown if "held out" in line]

    assert lines(9) == [
        "step 4, held out: bits per byte 2.5000, best 2.5000 at step 4",
        "step 8, held out: bits per byte 2.0000, best 2.0000 at step 8",
        "step 9, held out: bits per byte 2.5000, best 2.0000 at step 8",
    ]
    assert lines(10) == ["step 10, held out: bits per byte 2.2500, best 2.0000 at step 8"]


@pytest.mark.parametrize("value", [0, -1, True])
def test_intervals_must_be_positive_integers(value):
    with pytest.raises(ValueError, match="log_every=.* must be an integer of at least 1"):
        LoopConfig(num_steps=1, log_every=value)
