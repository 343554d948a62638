"""The program end to end on a tiny corpus: what it leaves behind, resuming, signals, bad input."""

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from moe_jax.language import load_language_model
from moe_jax.language.main import train_language_model
from moe_jax.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 24
CHECKPOINT_EVERY = 8

# Runs the program with one thing added, as the environment's PLAN says: `kill=N` and `signal=N:S`
# strike before step N + 1 begins; `kill_in_save=N` while the checkpoint of step N is committed;
# `nan=A:B` makes the losses of steps A + 1 to B not finite.
CHILD = """
import os, signal
import jax, jax.numpy as jnp
from moe_jax.language import main
from moe_jax.training.checkpoints import Checkpoints
from orbax.checkpoint._src.path import atomicity

plan = dict(pair.split("=") for pair in os.environ["PLAN"].split(",") if pair)
kill = int(plan.get("kill", -1))
signal_step, signal_number = map(int, plan.get("signal", "-1:0").split(":"))
nan_first, nan_last = map(int, plan.get("nan", "-1:-1").split(":"))
train, save = main.train, Checkpoints.save

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def planned_train(state, batches, train_step, *rest, **named):
    def step(state, batch):
        number = int(state.step)
        if number == kill:
            die()
        if number == signal_step:
            os.kill(os.getpid(), signal_number)
        if not nan_first <= number < nan_last:
            return train_step(state, batch)
        kept = jax.tree.map(jnp.copy, state.params)
        broken = state.replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
        state, metrics = train_step(broken, batch)
        return state.replace(params=kept), metrics
    return train(state, batches, step, *rest, **named)

def planned_save(self, step, *rest):
    if step == int(plan.get("kill_in_save", -1)):
        atomicity.AtomicRenameTemporaryPath.finalize = die
    return save(self, step, *rest)

main.train, Checkpoints.save = planned_train, planned_save
main.run()
"""

OVERRIDES = {
    "data.batch_size": 4,
    "data.sequence_length": 32,
    "data.eval_tokens": 2000,
    "data.held_out_fraction": 0.3,
    "model.model_dim": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.num_experts": 4,
    "model.expert_hidden_dim": 16,
    "model.hidden_dim": 32,
    "optimizer.warmup_steps": 4,
    "train.num_steps": NUM_STEPS,
    "train.log_every": 2,
    "train.eval_every": 8,
    "train.checkpoint_every": CHECKPOINT_EVERY,
    "sample.num_tokens": 5,
}


CHILD_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # The runs compile the same functions, each of them in less than the default threshold.
    "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    CHILD_ENVIRONMENT["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of small texts, one of which is not UTF-8."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["def", "return", "x", "y", "=", "(", ")", "\n", "    ", "import"]
    for index in range(12):
        text = " ".join(rng.choice(words) for _ in range(200))
        (folder / f"{index}.py").write_text(text)
    (folder / "latin.py").write_bytes("é".encode("latin-1"))
    return folder


def run_program(corpus, workdir, *arguments, plan="", source=None, **overrides):
    """Runs the program in a process of its own; overrides use __ for the dot."""
    values = OVERRIDES | {"data.source": source if source is not None else f"{corpus}/*.py"}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    command = [sys.executable, "-c", CHILD, "--config=configs/language/stdlib_moe.py"]
    command += [f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in values.items() if value is not None]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | CHILD_ENVIRONMENT | {"PLAN": plan},
        capture_output=True,
        text=True,
        timeout=600,
    )


def final_arrays(workdir, step=NUM_STEPS):
    """All arrays of a checkpoint, by name."""
    with ocp.PyTreeCheckpointer() as checkpointer, warnings.catch_warnings():
        # That the arrays come back on the devices they were saved from is what is wanted here.
        warnings.filterwarnings("ignore", "Sharding info not provided when restoring")
        return checkpointer.restore(Path(workdir).absolute() / "checkpoints" / str(step) / "state")


def assert_identical(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(second[name]), err_msg=name)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """An uninterrupted run: its workdir and process."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    process = run_program(corpus, workdir)
    assert process.returncode == 0, process.stderr
    return workdir, process


def test_run_leaves_metrics_figures_evaluation_and_a_sample(finished):
    workdir, process = finished
    records = read_metrics(workdir / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(2, NUM_STEPS + 1, 2))
    assert {"loss", "bits_per_byte", "gradient_norm", "tokens_per_second"} <= train[-1].keys()
    assert {"model_flops_per_second", "load_balance_loss", "router_z_loss"} <= train[-1].keys()
    assert np.shape(train[-1]["load"]) == (2, 4)
    assert np.shape(train[-1]["entropy"]) == np.shape(train[-1]["balance"]) == (2,)
    assert train[-1]["dropped"] == [0.0, 0.0]
    assert train[-1]["bits_per_byte"] < train[0]["bits_per_byte"] - 1
    evaluated = [record["step"] for record in records if record["kind"] == "eval"]
    assert evaluated == [8, 16, 24]
    evaluation = json.loads((workdir / "evaluation.json").read_text())
    total = sum(document["bits"] for document in evaluation["documents"])
    num_bytes = sum(document["bytes"] for document in evaluation["documents"])
    assert evaluation["bits_per_byte"] == pytest.approx(total / num_bytes)
    assert evaluation["step"] == NUM_STEPS
    for name in ("loss.png", "expert_load.png"):
        assert (workdir / "figures" / name).read_bytes().startswith(b"\x89PNG")
    assert list(workdir.glob("**/events.out.tfevents.*"))
    assert "sample at step 24, temperature 0.7" in process.stdout
    assert "step 24, held out: " in process.stdout


def test_log_tells_of_compilation_and_each_evaluation(finished):
    _, process = finished
    assert sum("compiling" in line for line in process.stderr.splitlines()) == 1
    lines = [line for line in process.stderr.splitlines() if "held out: bits per byte" in line]
    assert [line.split(",")[0] for line in lines] == ["step 8", "step 16", "step 24"]
    best = min(
        (record["bits_per_byte"], record["step"])
        for record in read_metrics(finished[0] / "metrics.jsonl")
        if record["kind"] == "eval"
    )
    assert lines[-1].endswith(f"best {best[0]:.4f} at step {best[1]}")


def test_finished_model_is_loaded_back(finished):
    loaded = load_language_model(finished[0])
    assert (loaded.step, loaded.sequence_length) == (NUM_STEPS, 32)
    arrays = final_arrays(finished[0])
    for path, leaf in jax.tree.leaves_with_path(loaded.variables["params"]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_array_equal(leaf, arrays[f"params/{name}"], err_msg=name)


def test_one_log_line_says_devices_mesh_parameters_and_corpus(finished):
    _, process = finished
    (line,) = [line for line in process.stderr.splitlines() if "devices" in line]
    assert re.match(r"\d\d:\d\d:\d\d devices 1 x cpu", line)
    assert "mesh" in line and "parameters" in line and "active" in line
    assert "13 files" in line and "1 not UTF-8" in line


@pytest.mark.parametrize(
    "plan",
    [
        f"kill={random.Random(1).randrange(1, CHECKPOINT_EVERY)}",
        f"kill={random.Random(2).randrange(CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY)}",
        f"kill_in_save={2 * CHECKPOINT_EVERY}",
    ],
    ids=["before the first checkpoint", "between checkpoints", "while a checkpoint is written"],
)
def test_killed_run_ends_bit_identical_to_an_uninterrupted_one(corpus, finished, tmp_path, plan):
    killed = run_program(corpus, tmp_path / "run", plan=plan)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_program(corpus, tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert_identical(final_arrays(finished[0]), final_arrays(tmp_path / "run"))
    steps = [
        record["step"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert steps == list(range(2, NUM_STEPS + 1, 2))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_signal_saves_says_how_to_resume_and_loses_nothing(
    corpus, finished, tmp_path, number, status
):
    stopped = run_program(corpus, tmp_path, plan=f"signal=10:{int(number)}")
    assert stopped.returncode == status, stopped.stderr
    assert "same command" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert (tmp_path / "checkpoints" / "11").is_dir()
    assert not (tmp_path / "evaluation.json").exists()
    assert (tmp_path / "figures" / "loss.png").exists()
    resumed = run_program(corpus, tmp_path, sample__num_tokens=4)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step 11 with another configuration than before:\n" in resumed.stdout
    assert "\n  config.sample.num_tokens: 5 -> 4\n" in resumed.stdout
    assert resumed.stdout.count("config.") == 1
    assert json.loads((tmp_path / "config.json").read_text())["sample"]["num_tokens"] == 4
    assert json.loads((tmp_path / "evaluation.json").read_text())["step"] == NUM_STEPS
    assert_identical(final_arrays(finished[0]), final_arrays(tmp_path))


def test_non_finite_steps_are_skipped_and_counted(corpus, tmp_path):
    process = run_program(corpus, tmp_path, plan="nan=5:7")
    assert process.returncode == 0, process.stderr
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "skipped"] == [6, 7]
    last = [record for record in records if record["kind"] == "train"][-1]
    assert (last["skipped"], last["skipped_in_row"]) == (2, 0)
    assert all(np.isfinite(value).all() for value in final_arrays(tmp_path).values())


def test_run_of_non_finite_steps_stops_and_names_the_last_good_checkpoint(corpus, tmp_path):
    process = run_program(corpus, tmp_path, plan="nan=12:99", train__max_skipped_in_row=3)
    assert process.returncode == 1
    error = process.stderr.splitlines()[-1]
    assert error.startswith("error: step 15: loss or gradient not finite 3 times in a row")
    assert f"last good checkpoint {tmp_path}/checkpoints/8" in error
    assert "load" in error and "balance" in error
    assert "Traceback" not in process.stderr
    arrays = final_arrays(tmp_path, step=8)
    assert all(np.isfinite(value).all() for value in arrays.values())


def make_config(corpus, **overrides):
    """The default configuration, made tiny; overrides use __ for the dot."""
    path = ROOT / "configs/language/stdlib_moe.py"
    spec = importlib.util.spec_from_file_location("stdlib_moe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.update_from_flattened_dict(OVERRIDES | {"data.source": f"{corpus}/*.py"})
    config.unlock()
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    return config.to_dict()


def artifacts(workdir):
    """What a run leaves besides checkpoints and events, byte for byte."""
    paths = [*workdir.glob("*.json*"), *workdir.glob("figures/*")]
    return {str(path.relative_to(workdir)): path.read_bytes() for path in paths}


def test_finished_run_keeps_its_configuration_and_evaluates_again(corpus, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    process = run_program(corpus, tmp_path / "run", optimizer__learning_rate=1.0)
    assert process.returncode == 0, process.stderr
    assert "config.optimizer.learning_rate: 0.006 -> 1.0" in process.stdout
    assert "no steps are left" in process.stdout
    assert artifacts(tmp_path / "run") == artifacts(finished[0])


def test_run_that_goes_on_removes_what_describes_an_earlier_step(corpus, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    process = run_program(corpus, tmp_path / "run", plan="kill=25", train__num_steps=32)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert artifacts(tmp_path / "run").keys() == {"config.json", "metrics.jsonl"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["num_steps"] == 32


def assert_refused(message, corpus, workdir, **overrides):
    """The program ends before its first step, with one line that matches."""
    with pytest.raises(ValueError, match=message) as error:
        train_language_model(make_config(corpus, **overrides), workdir)
    assert "\n" not in str(error.value)


def test_missing_tokenizer_is_refused(corpus, tmp_path):
    name = "/nowhere/tokenizer.json"
    assert_refused(name, corpus, tmp_path, data__tokenizer=name)


def test_empty_corpus_is_refused(corpus, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert_refused("empty", corpus, tmp_path / "run", data__source=f"{tmp_path}/*.py")
    assert_refused("absent", corpus, tmp_path / "run", data__source=f"{tmp_path}/*.absent")


def test_corpus_without_any_utf8_is_refused(corpus, tmp_path):
    assert_refused("UTF-8", corpus, tmp_path, data__source=f"{corpus}/latin.py")


def test_sequence_longer_than_the_corpus_is_refused(corpus, tmp_path):
    message = "sequence_length=1000000 exceeds the corpus of [0-9]+ tokens"
    assert_refused(message, corpus, tmp_path, data__sequence_length=1_000_000)


def test_workdir_that_cannot_be_written_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(f"workdir={tmp_path}/file/run", corpus, tmp_path / "file" / "run")
    assert_refused("workdir=/proc/run is not writable", corpus, "/proc/run")


def test_checkpoint_of_another_shape_names_the_leaf_and_both_shapes(corpus, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    message = r"checkpoints/24: .*experts/down has shape \(2, 4, 16, 16\), .* \(2, 8, 16, 16\)"
    changes = {"model__num_experts": 8, "train__num_steps": 99}
    assert_refused(message, corpus, tmp_path / "run", **changes)
    assert artifacts(tmp_path / "run") == artifacts(finished[0])


def test_resuming_on_other_batches_is_refused(corpus, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    message = "config.data.batch_size=8 differs from the 4"
    assert_refused(message, corpus, tmp_path / "run", data__batch_size=8, train__num_steps=99)
    assert artifacts(tmp_path / "run") == artifacts(finished[0])


def test_corrupt_newest_checkpoint_falls_back_to_the_one_before(corpus, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / str(NUM_STEPS)
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    process = run_program(corpus, tmp_path / "run")
    assert process.returncode == 0, process.stderr
    assert f"checkpoints/{NUM_STEPS} passed over" in process.stderr
    assert f"resuming from {tmp_path}/run/checkpoints/16" in process.stderr
    assert_identical(final_arrays(finished[0]), final_arrays(tmp_path / "run"))


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (
            ["--config.model.num_expert=4"],
            ['configuration key: Did you mean "num_experts" instead of "num_expert"?'],
        ),
        (["--config.zzz.num_experts=4"], ["configuration key: 'zzz'"]),
        (["--config.model.num_experts=many"], ["num_experts", "many"]),
        (["--config.model.num_selected=9"], ["num_selected=9 exceeds num_experts=4"]),
        (["--config=configs/language/absent.py"], ["absent.py"]),
        (["--workdir=/proc/run"], ["workdir=/proc/run"]),
        (["extra"], ["extra"]),
    ],
    ids=[
        "misspelt key",
        "unknown key",
        "wrong type",
        "bad value",
        "no such file",
        "workdir",
        "stray argument",
    ],
)
def test_program_ends_with_one_line_and_a_failing_status(corpus, tmp_path, arguments, fragments):
    process = run_program(corpus, tmp_path, *arguments)
    assert process.returncode > 0, process.stdout
    assert "Traceback" not in process.stderr, process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, process.stderr
    assert process.stderr.splitlines()[-1] == errors[0]
    for fragment in fragments:
        assert fragment in errors[0], errors[0]


@pytest.fixture
def heeded_interrupts():
    """A session that was started in the background ignores them, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_during_the_imports_is_quiet(heeded_interrupts, tmp_path):
    (tmp_path / "optax").mkdir()
    interrupt = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "optax" / "__init__.py").write_text(interrupt)
    process = subprocess.run(
        [sys.executable, "-m", "moe_jax.language.main"],
        cwd=ROOT,
        env=os.environ | CHILD_ENVIRONMENT | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (process.returncode, process.stderr) == (130, "")


def test_importing_the_library_leaves_interrupts_alone(heeded_interrupts):
    show = "import signal, moe_jax.language; print(signal.getsignal(signal.SIGINT).__name__)"
    process = subprocess.run(
        [sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert process.stdout == "default_int_handler\n", process.stderr
