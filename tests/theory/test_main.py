"""The program: one small experiment, interrupted and resumed, and what it refuses."""

import importlib
import json
import os
import signal

import pytest

from moe_jax.training import Progress
from theory.experiments import EXPERIMENTS, runs_of
from theory.main import run_experiment

CONFIG = {
    "experiment": "gates",
    "seed": 0,
    "data": {"num_train": 200, "num_test": 100},
    "train": {"num_seeds": 2, "num_steps": 20, "batch_size": 16, "num_pieces": 2},
    "start_learning_rate": 1e-4,
    "options": {"cases": [("rings", "likelihood", "affine")], "width": 2},
    "full": {"train": {"num_seeds": 3}},
}


def results_of(folder):
    return json.loads((folder / "results.json").read_text())["runs"]


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, capsys, monkeypatch):
    assert run_experiment(CONFIG, tmp_path / "whole") == 0
    assert "rings likelihood affine" in capsys.readouterr().out
    assert (tmp_path / "whole" / "figure.png").stat().st_size > 10_000
    update = Progress.update

    def interrupt(self, step, **scalars):
        update(self, step, **scalars)
        if step == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", interrupt)
        assert run_experiment(CONFIG, tmp_path / "cut") == 130
    assert "run the same command again" in capsys.readouterr().out
    assert not (tmp_path / "cut" / "table.md").exists()
    assert run_experiment(CONFIG, tmp_path / "cut") == 0
    whole, cut = (results_of(tmp_path / name) for name in ("whole", "cut"))
    for results in (whole, cut):
        results["rings likelihood affine"].pop("seconds")
    assert whole == cut
    # Both are complete: nothing is trained again, the figures are drawn.
    (tmp_path / "cut" / "figure.png").unlink()
    assert run_experiment(CONFIG, tmp_path / "cut") == 0
    assert (tmp_path / "cut" / "figure.png").exists()
    with pytest.raises(ValueError, match="results of another configuration"):
        run_experiment(CONFIG, tmp_path / "cut", full=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiment": "none"}, "experiment='none' is not one of"),
        ({"options": {"width": 2}}, "config.options.cases is missing"),
        ({"options": {**CONFIG["options"], "widths": 2}}, "config.options.widths is not an option"),
        ({"train": {"num_steps": 10, "num_pieces": 3}}, "do not divide into num_pieces=3"),
        ({"train": {"num_seeds": 0}}, "num_seeds=0 must be at least 1"),
        ({"train": {"scale_end": 2.0}}, "scale_end=2.0 is not in"),
        ({"speed": 1}, "config.speed is not a configuration key"),
    ],
)
def test_bad_configurations_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_experiment(CONFIG | changes, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("full", [False, True])
def test_shipped_configurations_name_distinct_runs(name, full):
    config = importlib.import_module(f"configs.theory.{name}").get_config().to_dict()
    options = config["options"] | (config["full"].get("options", {}) if full else {})
    runs = runs_of(config["experiment"], options, config["data"])
    assert len({run.name for run in runs}) == len(runs) >= 5
    if name == "depth":
        active = {run.name: run.stack.active_parameters for run in runs}
        cells = options["cells"]
        deep = active[f"2 x {cells}"]
        matched = active[f"1 x {2 * cells}, same active"]
        assert abs(matched - deep) <= 2 * runs[0].stack.token_dim


def test_a_missing_section_is_named(tmp_path):
    config = {name: value for name, value in CONFIG.items() if name != "data"}
    with pytest.raises(ValueError, match="config.data is missing"):
        run_experiment(config, tmp_path)
