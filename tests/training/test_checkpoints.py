import asyncio
import gc
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging as absl_logging
from etils import epath

from moe_jax.training import checkpoint_files
from moe_jax.training.checkpoints import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    Checkpoints,
    CheckpointSaveError,
)


@chex.dataclass(frozen=True)
class State:
    """Stands for a training state, with every kind of leaf one may hold."""

    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(step: int) -> State:
    keys = jax.random.split(jax.random.key(step), 3)
    params = {
        "w": jax.random.normal(keys[0], (40, 60), jnp.float32),
        "half": jax.random.normal(keys[1], (7,), jnp.bfloat16),
        "none": jnp.zeros((0, 3), jnp.float32),
    }
    opt_state = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)
    return State(step=jnp.asarray(step, jnp.int32), params=params, opt_state=opt_state, key=keys[2])


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


ABSTRACT = abstract(make_state(0))


def numbers(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(numbers(a), numbers(b))


def write(directory, steps, **options) -> None:
    with Checkpoints(directory, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"position": step})


def steps_on_disk(directory) -> list[int]:
    return sorted(int(path.name) for path in Path(directory).iterdir())


def data_file(checkpoint: Path) -> Path:
    """The file with the numbers of the largest leaf: the biggest one."""
    files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def warnings_of(caplog) -> list[str]:
    """Ours: on a busy machine orbax warns of slow saves too."""
    ours = [r for r in caplog.records if r.filename == "checkpoints.py"]
    return [r.getMessage() for r in ours if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_state_and_data_state_come_back_identical(tmp_path, asynchronous):
    write(tmp_path, [3], asynchronous=asynchronous)
    restored = Checkpoints(tmp_path).restore(ABSTRACT)
    assert restored.step == 3
    assert restored.data_state == {"position": 3}
    assert_identical(restored.state, make_state(3))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys_draw_the_same_numbers_after_restore(tmp_path, implementation):
    keys = jax.random.split(jax.random.key(7, impl=implementation), 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"keys": keys}, {})
        restored = checkpoints.restore(abstract({"keys": keys})).state["keys"]
    assert restored.dtype == keys.dtype
    draws = [jax.random.uniform(k[2], (5,), jnp.float32) for k in (restored, keys)]
    np.testing.assert_array_equal(*draws)


def test_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    zero = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    state = {"w": jnp.ones((300, 300), jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        zero(state)
        checkpoints.wait()
        restored = checkpoints.restore(abstract({"w": jnp.ones((300, 300), jnp.float32)}))
    np.testing.assert_array_equal(restored.state["w"], np.ones((300, 300), np.float32))


def test_restored_state_may_be_donated(tmp_path):
    write(tmp_path, [1])
    state = Checkpoints(tmp_path).restore(ABSTRACT).state
    increment = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    params = increment(state.params)
    assert state.params["w"].is_deleted()
    np.testing.assert_array_equal(params["w"], 2 * np.asarray(make_state(1).params["w"]))


def test_nothing_is_restored_or_created_where_there_is_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.restore(ABSTRACT) is None
    assert checkpoints.latest_step() is None
    assert not (tmp_path / "checkpoints").exists()


def test_latest_step_counts_a_save_under_way(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, make_state(4), {})
        assert checkpoints.latest_step() == 4
        assert str(checkpoints.path(4)) == str(tmp_path / "4")
    assert Checkpoints(tmp_path).latest_step() == 4


def save_scores(checkpoints, scores: dict[int, float | None]) -> None:
    state = {"w": jnp.ones((2,), jnp.float32)}
    for step, score in scores.items():
        checkpoints.save(step, state, {}, None if score is None else {"bits_per_byte": score})


def test_newest_and_best_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_best=1) as checkpoints:
        save_scores(checkpoints, {1: 2.0, 2: 1.5, 3: 1.9, 4: 1.8, 5: 3.0})
    assert steps_on_disk(tmp_path) == [2, 4, 5]


def test_no_metric_and_non_finite_metric_never_count_as_best(tmp_path):
    with Checkpoints(tmp_path, keep=1, keep_best=2) as checkpoints:
        save_scores(checkpoints, {1: None, 2: math.nan, 3: -math.inf, 4: 2.0, 5: 1.0, 6: None})
        checkpoints.save(7, {"w": jnp.ones((2,), jnp.float32)}, {}, {"loss": 0.5})
    assert steps_on_disk(tmp_path) == [4, 5, 7]


def test_best_is_remembered_by_the_next_run_even_beside_a_damaged_record(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save_scores(checkpoints, {1: 1.0, 2: 2.0, 3: 3.0})
    (tmp_path / "2" / "record" / "metadata").write_bytes(b"\xff\x00garbage")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save_scores(checkpoints, {4: 4.0, 5: 5.0})
    assert steps_on_disk(tmp_path) == [1, 4, 5]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffgarbage" * 20)


DAMAGE = {
    "data flipped": lambda step: flip(data_file(step)),
    "data cut": lambda step: cut(data_file(step)),
    "data missing": lambda step: data_file(step).unlink(),
    "index garbage": lambda step: garbage(step / "state" / "manifest.ocdbt"),
    "metadata garbage": lambda step: garbage(step / "state" / "_METADATA"),
    "metadata missing": lambda step: (step / "state" / "_METADATA").unlink(),
    "record flipped": lambda step: flip(step / "record" / "metadata"),
    "record cut": lambda step: cut(step / "record" / "metadata"),
    "record missing": lambda step: (step / "record" / "metadata").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_is_passed_over_with_one_warning(tmp_path, caplog, capfd, damage):
    write(tmp_path, [10, 20])
    DAMAGE[damage](tmp_path / "20")
    checkpoints = Checkpoints(tmp_path)
    restored = checkpoints.restore(ABSTRACT)
    assert restored.step == 10 == checkpoints.latest_step()
    assert_identical(restored.state, make_state(10))
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"checkpoint {tmp_path}/20 passed over: ")
    assert "\n" not in warning and len(warning) < 400
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["data cut", "index garbage"])
def test_reads_abandoned_after_a_failure_stay_silent(tmp_path, capfd, caplog, damage):
    state = {f"w{i}": jax.random.normal(jax.random.key(i), (200, 200)) for i in range(30)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state, {})
    DAMAGE[damage](tmp_path / "2")
    for _ in range(5):
        assert Checkpoints(tmp_path).restore(abstract(state)).step == 1
    assert capfd.readouterr().err == ""
    assert len(warnings_of(caplog)) == 5


def test_failures_nobody_collected_are_silenced_only_while_reading(caplog):
    def abandon_failure():
        loop = asyncio.new_event_loop()
        future = loop.create_future()
        future.set_exception(ValueError("lost"))
        loop.close()
        cycle = [future]
        cycle.append(cycle)

    with checkpoint_files.no_stray_reads():
        abandon_failure()
    assert not caplog.records
    abandon_failure()
    gc.collect()
    assert caplog.text.count("exception was never retrieved") == 1


def test_errors_in_finalizers_are_still_reported_while_reading(monkeypatch):
    class Broken:
        def __del__(self):
            raise ZeroDivisionError

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: reported.append(event.exc_type))
    with checkpoint_files.no_stray_reads():
        Broken()
    Broken()
    assert reported == [ZeroDivisionError, ZeroDivisionError]


def test_every_flipped_bit_of_the_record_is_noticed(tmp_path):
    write(tmp_path, [10])
    checkpoint = epath.Path(tmp_path) / "10"
    path = checkpoint / "record" / "metadata"
    sound = path.read_bytes()
    for position in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises((ValueError, LookupError)):
            checkpoint_files.read_record(checkpoint)


def test_a_checkpoint_another_process_cannot_read_is_passed_over(tmp_path, monkeypatch, caplog):
    write(tmp_path, [10, 20])
    answers = iter([False, True])
    monkeypatch.setattr(checkpoint_files, "_every_process", lambda ok: ok and next(answers))
    assert Checkpoints(tmp_path).restore(ABSTRACT).step == 10
    assert "another process" in warnings_of(caplog)[0]


def test_only_damaged_checkpoints_is_an_error_that_names_the_directory(tmp_path, caplog):
    write(tmp_path, [10, 20])
    for step in (10, 20):
        cut(data_file(tmp_path / str(step)))
    with pytest.raises(CheckpointCorruptError, match=f"no checkpoint in {tmp_path} .*20.*10"):
        Checkpoints(tmp_path).restore(ABSTRACT)
    assert len(warnings_of(caplog)) == 2
    assert steps_on_disk(tmp_path) == [10, 20]


@pytest.mark.parametrize("next_step", [15, 20, 25])
def test_run_that_fell_back_saves_over_the_damaged_step(tmp_path, next_step):
    write(tmp_path, [10, 20])
    cut(data_file(tmp_path / "20"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(ABSTRACT)
        checkpoints.save(next_step, make_state(next_step), {"position": next_step})
    assert steps_on_disk(tmp_path) == [10, next_step]
    restored = Checkpoints(tmp_path).restore(ABSTRACT)
    assert restored.step == next_step
    assert_identical(restored.state, make_state(next_step))


def changed(**params):
    return ABSTRACT.replace(params={**ABSTRACT.params, **params})


def test_other_shape_and_dtype_are_named_with_both_sides(tmp_path):
    write(tmp_path, [120])
    other = changed(
        w=jax.ShapeDtypeStruct((40, 16), jnp.float32), half=jax.ShapeDtypeStruct((7,), jnp.float32)
    )
    with pytest.raises(CheckpointMismatchError) as error:
        Checkpoints(tmp_path).restore(other)
    message = str(error.value)
    assert message.startswith(f"checkpoint {tmp_path}/120: ")
    assert "params/w has shape (40, 60), this run needs (40, 16)" in message
    assert "params/half has dtype bfloat16, this run needs float32" in message


def test_missing_and_unknown_leaves_are_named(tmp_path):
    write(tmp_path, [1])
    other = changed(extra=jax.ShapeDtypeStruct((1,), jnp.float32))
    del other.params["half"]
    with pytest.raises(CheckpointMismatchError) as error:
        Checkpoints(tmp_path).restore(other)
    assert "params/extra is missing, this run needs it" in str(error.value)
    assert "params/half is unknown to this run" in str(error.value)


def test_many_mismatches_are_counted_in_one_line(tmp_path):
    leaf = jax.ShapeDtypeStruct((1,), jnp.float32)
    write(tmp_path, [1])
    with pytest.raises(CheckpointMismatchError, match="; and 7 more$") as error:
        Checkpoints(tmp_path).restore(changed(**{f"extra{i}": leaf for i in range(10)}))
    assert "\n" not in str(error.value)


def test_mismatch_is_found_before_data_is_read_and_is_not_passed_over(tmp_path, caplog):
    write(tmp_path, [1, 2])
    cut(data_file(tmp_path / "2"))
    with pytest.raises(CheckpointMismatchError, match=f"{tmp_path}/2"):
        Checkpoints(tmp_path).restore(changed(w=jax.ShapeDtypeStruct((1,), jnp.float32)))
    assert not warnings_of(caplog)


@pytest.fixture
def full_disk():
    """Writing past 1 MB of a file fails; a function lifts the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def big_state():
    words = np.random.default_rng(0).integers(0, 2**32, 1 << 19, np.uint32)
    return {"w": jnp.asarray(words)}


SMALL = {"w": np.arange(3, dtype=np.uint32)}


@pytest.mark.parametrize("noticed_by", ["wait", "save", "close", "restore"])
def test_failed_write_is_a_one_line_error_at_the_next_call(tmp_path, full_disk, caplog, noticed_by):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, SMALL, {})
    checkpoints.save(2, big_state(), {})
    calls = {
        "wait": checkpoints.wait,
        "save": lambda: checkpoints.save(3, SMALL, {}),
        "close": checkpoints.close,
        "restore": lambda: checkpoints.restore(abstract(SMALL)),
    }
    with pytest.raises(CheckpointSaveError) as error:
        calls[noticed_by]()
    assert str(error.value).startswith(f"checkpoint {tmp_path}/2 was not written: ")
    assert "File too large" in str(error.value) and "\n" not in str(error.value)
    checkpoints.close()
    assert not caplog.records


@pytest.mark.parametrize("asynchronous", [True, False])
def test_run_can_save_again_once_there_is_room(tmp_path, full_disk, asynchronous):
    with Checkpoints(tmp_path, keep=1, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, SMALL, {"position": 1})
        with pytest.raises(CheckpointSaveError):
            checkpoints.save(2, big_state(), {"position": 2})
            checkpoints.wait()
        assert checkpoints.latest_step() == 1
        assert checkpoints.restore(abstract(SMALL)).data_state == {"position": 1}
        full_disk()
        checkpoints.save(2, big_state(), {"position": 2})
        checkpoints.wait()
        assert checkpoints.restore(abstract(big_state())).data_state == {"position": 2}
    assert steps_on_disk(tmp_path) == [2]


def test_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointSaveError, match=f"{tmp_path}/file/checkpoints/1 was not written"):
        checkpoints.save(1, SMALL, {})


def test_directory_removed_during_the_run_does_not_stop_the_next_save(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, SMALL, {})
        checkpoints.wait()
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
        checkpoints.save(2, SMALL, {})
    assert steps_on_disk(tmp_path / "checkpoints") == [2]


@pytest.mark.parametrize("step", [4, 5])
def test_step_that_is_not_past_the_newest_is_refused(tmp_path, step):
    write(tmp_path, [5])
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=f"step={step} is not past 5"):
            checkpoints.save(step, make_state(step), {})
    assert steps_on_disk(tmp_path) == [5]


def test_data_state_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data_state cannot be written as JSON"):
        Checkpoints(tmp_path).save(1, SMALL, {"position": np.int64(3)})


def test_leaves_of_one_name_are_refused(tmp_path):
    state = {"a": {"b": jnp.ones((1,), jnp.float32)}, "a/b": jnp.ones((1,), jnp.float32)}
    with pytest.raises(ValueError, match="two leaves of the state are named a/b"):
        Checkpoints(tmp_path).save(1, state, {})


@pytest.mark.parametrize("option", [{"keep": 0}, {"keep_best": -1}])
def test_option_out_of_range_is_named(tmp_path, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
        Checkpoints(tmp_path, **option)


def test_a_reader_leaves_the_unfinished_save_of_a_live_run_alone(tmp_path):
    write(tmp_path, [1])
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with Checkpoints(tmp_path) as reader:
        assert reader.restore(ABSTRACT).step == 1
    assert unfinished.exists()


def test_orbax_does_not_report_progress(tmp_path, caplog):
    absl_logging.set_verbosity(absl_logging.INFO)
    try:
        write(tmp_path, [1])
        Checkpoints(tmp_path).restore(ABSTRACT)
        absl_logging.info("others still may")
    finally:
        absl_logging.set_verbosity(absl_logging.WARNING)
    assert [record.getMessage() for record in caplog.records] == ["others still may"]


CHILD = """
import os, signal, sys
import jax
import jax.numpy as jnp
from etils import epath
from moe_jax.training.checkpoints import Checkpoints

directory, kill_in = sys.argv[1:]

def state(step):
    return {"w": jnp.full((50,), step, jnp.float32), "key": jax.random.key(step)}

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def delete_half_and_die(self, path, **kwargs):
    os.remove(path / "record" / "metadata")
    die()

checkpoints = Checkpoints(directory, keep=1)
checkpoints.save(1, state(1), {"position": 1})
checkpoints.wait()
if kill_in == "commit":
    from orbax.checkpoint._src.path import atomicity
    atomicity.AtomicRenameTemporaryPath.finalize = die
elif kill_in == "rename":
    os.rename = os.replace = die
    epath.Path("/").__class__.rename = die
elif kill_in == "deletion":
    from orbax.checkpoint._src.path import deleter
    deleter.PathDeleter.delete = delete_half_and_die
checkpoints.save(2, state(2), {"position": 2})
checkpoints.wait()
print("survived")
"""


@pytest.mark.parametrize(
    ("kill_in", "survivor"),
    [("commit", 1), ("rename", 1), ("deletion", 2)],
    ids=["before the commit", "before the rename", "while the old one is deleted"],
)
def test_sigkill_during_a_save_leaves_a_readable_checkpoint(tmp_path, kill_in, survivor, caplog):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path, kill_in],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    wanted = {"w": jnp.full((50,), survivor, jnp.float32), "key": jax.random.key(survivor)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = checkpoints.restore(abstract(wanted))
        assert (restored.step, restored.data_state) == (survivor, {"position": survivor})
        assert_identical(restored.state, wanted)
        checkpoints.save(survivor + 1, wanted, {})
    assert os.listdir(tmp_path) == [str(survivor + 1)]
    assert not warnings_of(caplog)


SHARDED = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from moe_jax.training.checkpoints import Checkpoints

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rows, columns, whole = (NamedSharding(mesh, P(*spec)) for spec in (("data",), (None, "data"), ()))
w = np.arange(32, dtype=np.float32).reshape(4, 8)
state = {
    "w": jax.device_put(w, rows),
    "step": jax.device_put(jnp.asarray(5, jnp.int32), whole),
    "key": jax.device_put(jax.random.key(5), whole),
    "keys": jax.device_put(jax.random.split(jax.random.key(6), 4), rows),
    "none": jax.device_put(jnp.zeros((4, 0), jnp.float32), rows),
}
shardings = {"w": columns, "step": whole, "key": whole, "keys": rows, "none": rows}
wanted = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
    for name, leaf in state.items()
}
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(5, state, {})
    restored = checkpoints.restore(wanted).state
for name, sharding in shardings.items():
    assert restored[name].sharding.is_equivalent_to(sharding, restored[name].ndim), name
np.testing.assert_array_equal(restored["w"], w)
for name in ("key", "keys"):
    assert restored[name].dtype == state[name].dtype
    np.testing.assert_array_equal(*(jax.random.key_data(x[name]) for x in (restored, state)))
print("done")
"""


def test_leaves_land_on_the_shardings_asked_for(tmp_path):
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert child.stdout == "done\n", child.stderr
    leaves = json.loads((tmp_path / "5" / "record" / "metadata").read_text())["record"]["leaves"]
    assert all(leaf["digest"] is not None for leaf in leaves.values())


def test_parameters_are_restored_without_the_rest(tmp_path):
    write(tmp_path, [2, 3])
    part = {"params": ABSTRACT.params}
    with pytest.raises(CheckpointMismatchError, match="unknown to this run"):
        Checkpoints(tmp_path).restore(part)
    restored = Checkpoints(tmp_path).restore(part, partial=True)
    assert restored.step == 3
    assert_identical(restored.state, {"params": make_state(3).params})


def test_partial_restore_still_names_what_is_missing_or_of_another_shape(tmp_path):
    write(tmp_path, [1])
    wanted = {"params": {"w": jax.ShapeDtypeStruct((41, 60), jnp.float32)}, "extra": ABSTRACT.step}
    with pytest.raises(CheckpointMismatchError, match="extra is missing.*params/w has shape"):
        Checkpoints(tmp_path).restore(wanted, partial=True)


def test_chosen_step_is_restored_and_no_other(tmp_path):
    write(tmp_path, [2, 3])
    assert Checkpoints(tmp_path).restore(ABSTRACT, step=2).step == 2
    with pytest.raises(ValueError, match=r"step=7 is not among the checkpoints in .*: 2, 3$"):
        Checkpoints(tmp_path).restore(ABSTRACT, step=7)
    (tmp_path / "2" / "record" / "metadata").write_text("{}")
    with pytest.raises(CheckpointCorruptError, match="step 2.*") as error:
        Checkpoints(tmp_path).restore(ABSTRACT, step=2)
    assert "others may be" in str(error.value)
    assert Checkpoints(tmp_path / "absent").restore(ABSTRACT, step=2) is None


def test_best_step_has_the_lowest_score_and_is_known_while_it_is_written(tmp_path):
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        assert checkpoints.best_step() is None
        save_scores(checkpoints, {1: None, 2: 3.0})
        assert checkpoints.best_step() == 2
        save_scores(checkpoints, {3: 2.0, 4: 2.0, 5: 2.5, 6: math.nan})
        assert checkpoints.best_step() == 4
    assert Checkpoints(tmp_path).best_step() == 4
