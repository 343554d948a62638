import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter

from moe_jax.training import metrics as metrics_module
from moe_jax.training.metrics import MetricWriter, read_metrics


def write_steps(workdir, steps, **options) -> None:
    with MetricWriter(workdir, **options) as writer:
        for step in steps:
            writer.write(step, "train", {"loss": 1.0 / step})


def read_events(workdir) -> list[Event]:
    """Every event of the TensorBoard files, which are length, checksum, content and checksum."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            events.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def curves(workdir) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for event in read_events(workdir):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_scalars_and_arrays_come_back_in_order(tmp_path):
    load = np.asarray([[0.25, 0.75], [0.5, 0.5]], np.float32)
    with MetricWriter(tmp_path) as writer:
        writer.write(10, "train", {"loss": jnp.asarray(1.5, jnp.bfloat16), "load": load})
        writer.write(10, "eval", {"bits_per_byte": 2.25, "good": True})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 10, "kind": "train", "loss": 1.5, "load": load.tolist()},
        {"step": 10, "kind": "eval", "bits_per_byte": 2.25, "good": True},
    ]


def test_float32_values_survive_exactly(tmp_path):
    values = jax.random.normal(jax.random.key(0), (100,), jnp.float32)
    with MetricWriter(tmp_path) as writer:
        writer.write(1, "train", {"values": values})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    np.testing.assert_array_equal(np.asarray(record["values"], np.float32), values)


def test_non_finite_numbers_are_valid_json_and_come_back_as_floats(tmp_path):
    values = [math.nan, math.inf, -math.inf, 1.0]
    with MetricWriter(tmp_path) as writer:
        writer.write(1, "train", {"loss": math.nan, "norms": np.asarray(values, np.float32)})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["norms"] == ["NaN", "Infinity", "-Infinity", 1.0]
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["loss"])
    np.testing.assert_array_equal(record["norms"], values)


def test_resume_drops_records_past_the_checkpoint_and_keeps_the_rest(tmp_path):
    write_steps(tmp_path, [10, 20, 30, 40])
    write_steps(tmp_path, [30, 40, 50], resume_step=20)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [10, 20, 30, 40, 50]


def test_a_start_from_nothing_drops_every_record(tmp_path):
    write_steps(tmp_path, [10, 20])
    write_steps(tmp_path, [5])
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [5]


@pytest.mark.parametrize("cut", [1, 20])
def test_cut_last_line_is_left_out_and_does_not_damage_the_next_run(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [10, 20])
    path.write_bytes(path.read_bytes()[:-cut])
    # Without its newline only, the record is whole.
    whole = [10, 20] if cut == 1 else [10]
    assert [record["step"] for record in read_metrics(path)] == whole
    write_steps(tmp_path, [30], resume_step=20)
    assert [record["step"] for record in read_metrics(path)] == [*whole, 30]


def test_damaged_line_in_the_middle_is_named_and_dropped_on_resume_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [10, 20, 30])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], b"\x00\xff{", lines[2], b""]))
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl is not a record"):
        read_metrics(path)
    write_steps(tmp_path, [], resume_step=30)
    assert [record["step"] for record in read_metrics(path)] == [10, 30]
    assert "dropped 1 damaged lines" in caplog.text


def test_rewriting_leaves_the_old_file_if_it_fails(tmp_path, monkeypatch):
    write_steps(tmp_path, [10, 20])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(metrics_module.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        MetricWriter(tmp_path, resume_step=10)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_killed_process_loses_no_record_it_wrote(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from moe_jax.training.metrics import MetricWriter\n"
        "writer = MetricWriter(sys.argv[1])\n"
        "for step in range(1, 4): writer.write(step, 'train', {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_tensorboard_gets_scalars_vectors_and_the_range_of_rows_and_of_larger_arrays(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(
            7,
            "train",
            {
                "loss": 1.5,
                "balance": np.asarray([1.0, 2.0], np.float32),
                "load": np.asarray([[0.0, 1.0], [0.25, 0.75]], np.float32),
                "wide": np.arange(65, dtype=np.int32),
                "empty": np.zeros((0, 2), np.float32),
            },
        )
    assert curves(tmp_path) == {
        "train/loss": [(7, 1.5)],
        "train/balance/00": [(7, 1.0)],
        "train/balance/01": [(7, 2.0)],
        "train/load/00/min": [(7, 0.0)],
        "train/load/00/max": [(7, 1.0)],
        "train/load/01/min": [(7, 0.25)],
        "train/load/01/max": [(7, 0.75)],
        "train/wide/min": [(7, 0.0)],
        "train/wide/mean": [(7, 32.0)],
        "train/wide/max": [(7, 64.0)],
    }


def test_tensorboard_is_told_from_which_step_on_old_events_are_void(tmp_path):
    write_steps(tmp_path, [10, 20, 30])
    write_steps(tmp_path, [30], resume_step=20)
    starts = [event.step for event in read_events(tmp_path) if event.HasField("session_log")]
    assert starts == [0, 21]
    assert curves(tmp_path)["train/loss"] == [(s, pytest.approx(1 / s)) for s in (10, 20, 30, 30)]


@pytest.mark.parametrize("name", ["step", "kind"])
def test_reserved_name_is_refused(tmp_path, name):
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match=f"cannot be named {name}"):
            writer.write(1, "train", {name: 1.0})


def test_metric_that_is_not_numeric_is_named(tmp_path):
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="metric text='hello' is not numeric"):
            writer.write(1, "train", {"text": "hello"})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write_steps(tmp_path, [1])
    assert list(tmp_path.iterdir()) == []


def test_event_files_of_one_second_do_not_overwrite_each_other(tmp_path):
    for step in range(3):
        MetricWriter(tmp_path, resume_step=step).close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_reader_of_events_in_this_file_agrees_with_the_writer(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    record = RecordWriter(str(tmp_path / "tensorboard" / "events"))
    record.write(Event(step=5).SerializeToString())
    record.close()
    assert [event.step for event in read_events(tmp_path)] == [5]


def test_lowest_metric_counts_earlier_processes_but_no_dropped_record(tmp_path):
    with MetricWriter(tmp_path) as writer:
        assert writer.lowest("eval", "error") is None
        for step, error in ((1, 3.0), (2, 2.0), (3, float("nan")), (4, 1.0)):
            writer.write(step, "eval", {"error": error})
        writer.write(4, "train", {"error": 0.5})
        writer.write(5, "eval", {"other": 0.5})
        assert writer.lowest("eval", "error") == (4, 1.0)
    with MetricWriter(tmp_path, resume_step=3) as writer:
        assert writer.lowest("eval", "error") == (2, 2.0)
        writer.write(4, "eval", {"error": 2.0})
        assert writer.lowest("eval", "error") == (4, 2.0)


def test_lowest_metric_is_unknown_to_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with MetricWriter(tmp_path) as writer:
        assert writer.lowest("eval", "error") is None
