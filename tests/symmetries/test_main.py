"""The program end to end on a tiny system: what it leaves behind, starting again, bad input."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.symmetries import neural
from moe_jax.symmetries.main import fit_system
from moe_jax.symmetries.nets import mlp
from moe_jax.symmetries.settings import SYSTEMS, configuration, model_config, read_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs/symmetries").glob("*.py"))
TINY = {
    "seed": 0,
    "system": {"name": "pendulum", "rows": 6, "val_rows": 4, "test_rows": 5},
    "model": {"hidden": 4, "decoder_hidden": 4, "experts": 2},
    "train": {"steps": 6, "batch_size": 4, "linear_latent": False, "neural": ["Latent ODE"]},
    "loss": {"growth": 0.0},
    "optimizer": {"learning_rate": 1e-2},
}


def load(path):
    spec = importlib.util.spec_from_file_location("config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config().to_dict()


def euler(field, z, span, steps):
    """In place of diffrax, whose programs take most of a minute to compile."""
    h = span[..., None] / steps
    states = [z]
    for _ in range(steps):
        states.append(states[-1] + h * mlp(field, states[-1]))
    return jnp.stack(states, axis=-2)


@pytest.fixture(scope="module", autouse=True)
def cheap_solver():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neural, "_solve", euler)
        patch.setattr(neural, "LONG_STEPS", 4)
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "pendulum"
    assert fit_system(TINY, folder) == 0
    return folder


def test_a_run_leaves_errors_of_every_model_and_a_figure(workdir, capsys):
    record = json.loads((workdir / "evaluation.json").read_text())
    assert record["planes"] == 1 and record["system"] == "pendulum"
    assert len(record["errors"]) == 6
    for errors in record["errors"].values():
        assert all(np.isfinite(value) and value > 0 for value in errors.values())
    assert (workdir / "portrait.png").stat().st_size > 10_000
    assert (workdir / "planes_1/start_0/metrics.jsonl").exists()


def test_the_same_command_again_takes_no_step_and_agrees(workdir, capsys):
    before = json.loads((workdir / "evaluation.json").read_text())
    assert fit_system(TINY, workdir) == 0
    assert json.loads((workdir / "evaluation.json").read_text()) == before
    assert "| latent mixture of symmetries |" in capsys.readouterr().out


def test_another_configuration_needs_another_workdir(workdir):
    with pytest.raises(ValueError, match="another configuration"):
        fit_system(TINY | {"seed": 1}, workdir)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_accepted(path):
    settings = read_settings(load(path))
    simulator = SYSTEMS[settings.system.name]
    run = simulator(0, 1, times=np.linspace(0, 0.1, 3), **settings.system.options)
    config = model_config(settings, run.values.shape[-1], settings.train.planes[0])
    assert config.obs_dim == run.values.shape[-1]


def test_a_configuration_states_what_differs_and_holds_every_key():
    whole = configuration(seed=3, train={"planes": (2, 4)}).to_dict()
    assert (whole["seed"], whole["train"]["planes"], whole["model"]["experts"]) == (3, (2, 4), 4)
    assert read_settings(whole).train.steps == configuration().train.steps
    with pytest.raises(ValueError, match="config.train.plane is not a configuration key"):
        configuration(train={"plane": (2, 4)})


def test_every_system_has_a_configuration():
    assert {read_settings(load(path)).system.name for path in CONFIGS} == set(SYSTEMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": {"name": "planet"}}, "config.system: name='planet' is not one of"),
        ({"system": {"rows": 0}}, "config.system: rows=0 must be an integer in"),
        ({"system": {"options": {"mass": 2.0}}}, "must be arguments of pendulum: "),
        ({"system": {"options": 3}}, "options=3 must be arguments of pendulum"),
        ({"system": {"fraction": 0.0}}, "fraction=0.0 must be in"),
        ({"train": {"neural": ["ODE"]}}, "'ODE' is not one of"),
        ({"train": {"neural": "ODE-RNN"}}, "neural='ODE-RNN' must be a tuple of names"),
        ({"train": {"planes": []}}, "must name at least one positive number"),
        ({"train": {"planes": 1}}, "planes=1 must name at least one positive number"),
        ({"train": {"planes": [1.5]}}, "planes=1.5 must be an integer in"),
        ({"train": {"steps": 0}}, "config.train: steps=0 must be an integer in"),
        ({"train": {"batch_size": 0}}, "config.train: batch_size=0 must be an integer in"),
        ({"train": {"multistart": 0}}, "config.train: multistart=0 must be an integer in"),
        ({"train": {"drop": (0.5, 0.1)}}, "config.train: drop=.* must be two increasing numbers"),
        ({"train": None}, "config.train=None must be a section of keys"),
        ({"model": {"planes": 2}}, "config.model.planes follows from system and train"),
        ({"model": {"expert": 2}}, "did you mean experts"),
        ({"loss": {"growth": -1.0}}, "config.loss: growth=-1.0 must not be negative"),
        ({"seed": -1}, "config.seed=-1 must be an integer"),
        ({"steps": 3}, "config.steps is not a configuration key"),
    ],
)
def test_bad_configurations_are_refused(change, message, unchecked):
    with pytest.raises(ValueError, match=message):
        read_settings(TINY | change)


def test_the_program_says_what_is_wrong_in_one_line(tmp_path):
    command = [sys.executable, "-m", "moe_jax.symmetries.main", f"--workdir={tmp_path}"]
    command += [f"--config={CONFIGS[0]}", "--config.system.name=planet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: config.system: name='planet'")
