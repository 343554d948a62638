"""The program: one small experiment, interrupted and resumed, and what it refuses."""

import importlib
import json
import os
import signal

import numpy as np
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
    "options": {"cases": [("rings", "likelihood", "affine", "width")], "width": 2, "gate_dim": 4},
    "full": {"train": {"num_seeds": 3}},
}


def results_of(folder):
    return json.loads((folder / "results.json").read_text())["runs"]


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, capsys, monkeypatch):
    assert run_experiment(CONFIG, tmp_path / "whole") == 0
    assert "rings likelihood affine, same width" in capsys.readouterr().out
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
    record = json.loads((tmp_path / "whole" / "record.json").read_text())["runs"]
    for name, run in record.items():
        np.testing.assert_allclose(run["purity"], whole[name]["purity"], rtol=1e-3)
        assert run["map"] == whole[name]["map"] and "capacity" not in run
    for results in (whole, cut):
        results["rings likelihood affine, same width"].pop("seconds")
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


def counts(name, same):
    """Parameters of the runs of the shipped configuration, in groups that are to be compared."""
    config = importlib.import_module(f"configs.theory.{name}").get_config().to_dict()
    groups = {}
    for run in runs_of(name, config["options"], config["data"]):
        key = tuple(run.facts.get(fact) for fact in ("manifold", "D", "partition", "cells"))
        if run.facts.get("matched", same) in (same, "reference"):
            neuron = 2 * run.stack.token_dim * (run.stack.num_experts if same == "total" else 1)
            groups.setdefault(key, []).append((run, run.facts[same], neuron))
    return groups


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("gates", "active"),
        ("depth", "active"),
        ("depth", "total"),
        ("sharing", "active"),
        ("encoders", "active"),
    ],
)
def test_networks_of_a_comparison_have_equal_parameters_up_to_one_neuron(name, same):
    for group in counts(name, same).values():
        assert len(group) >= 5
        wanted = {"gates": "hidden_layer"}.get(name)
        reference = [n for run, n, _ in group if wanted in (None, run.facts.get("gate"))][0]
        for run, found, neuron in group:
            # A layer more of the same width is a neuron more a layer.
            room = neuron * run.stack.num_layers / 2
            assert abs(found - reference) <= room, run.name
    if name == "sharing":
        assert len({found for _, found, _ in group}) == 1


def test_top_1_networks_of_every_dimension_have_equal_active_parameters():
    for (manifold, *_), group in counts("dimension", "active").items():
        active = {run.facts["weighting"]: run.facts["active"] for run, *_ in group}
        total = {run.facts["weighting"]: run.facts["total"] for run, *_ in group}
        same = ["straight_through", "switch", "likelihood", "dense_active"]
        # On the sphere the construction takes two layers of 16 neurons.
        same += ["built"] if manifold == "moment_curve" else []
        assert len({active[name] for name in same}) == 1
        assert active["soft"] == total["soft"] == active["dense_total"]


def test_a_missing_section_is_named(tmp_path):
    config = {name: value for name, value in CONFIG.items() if name != "data"}
    with pytest.raises(ValueError, match="config.data is missing"):
        run_experiment(config, tmp_path)
