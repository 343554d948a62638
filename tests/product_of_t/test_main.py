"""The program: what a run writes, and what it refuses."""

import importlib
import json

import arviz_base
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.product_of_t import banana
from moe_jax.product_of_t.main import fit_target
from moe_jax.product_of_t.posteriordb import POSTERIORS
from moe_jax.product_of_t.settings import FitSettings
from moe_jax.product_of_t.simulate import SYNTHETIC


@pytest.fixture(scope="module")
def tiny():
    """The banana's configuration at a size that fits in a moment."""
    config = banana.get_config().to_dict()
    config["fit"] |= {
        "rounds": 1, "iterations": 3, "batch_size": 32, "local_experts": 4, "num_draws": 500,
        "match_iterations": 5,
    }  # fmt: skip
    return config


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("banana")
    assert fit_target(tiny, folder) == 0
    return folder


def test_run_writes_results_and_figures(run):
    result = json.loads((run / "result.json").read_text())
    assert set(result["errors"]) == {"product", "Gaussian", "pool"}
    assert len(result["errors"]["product"]["mean"]) == 2
    # Three updates are no fit, and the program says so.
    assert result["trusted"] == (not result["warnings"])
    assert result["scores"] > 3 * 32
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["kind"] == "fit" and "fisher_divergence" in line for line in lines)
    figures = {path.name for path in (run / "figures").iterdir()}
    assert figures == {"contours.png", "experts.png", "history.png", "marginals.png"}


def test_draws_are_arvizs(run):
    posterior = arviz_base.from_dict({"posterior": dict(np.load(run / "draws.npz"))})["posterior"]
    assert posterior["z"].shape == (1, 500, 2)
    assert np.isfinite(posterior["z"].values).all()


def test_experts_give_the_density_back(run):
    experts = np.load(run / "experts.npz")
    count = len(experts["full_loc"]) + len(experts["factored_loc"])
    assert experts["exponents"].shape == (count,) and np.all(experts["exponents"] > 0)
    assert experts["exponents"][: len(experts["full_loc"])].sum() > 1.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target": {"name": "bananas", "dim": 2}}, "name='bananas' must be one of heavy_t"),
        ({"target": {"name": "banana", "dim": 1}}, "dim=1 of banana must be at least 2"),
        ({"target": {"name": "garch11", "dim": 4}}, "dim=4 must be 0: garch11 has its own"),
        ({"fit": {"rounds": 0}}, "rounds=0: expected at least 1"),
        ({"fit": {"steps": 3}}, "steps"),
        ({"sed": 1}, "sed"),
    ],
)
def test_bad_configurations_are_refused(tiny, tmp_path, changes, message):
    with pytest.raises((ValueError, KeyError, AttributeError), match=message):
        fit_target(tiny | changes, tmp_path)


@pytest.mark.parametrize("name", [*SYNTHETIC, *POSTERIORS])
def test_every_target_has_a_configuration(name):
    config = importlib.import_module(f"configs.product_of_t.{name}").get_config()
    assert isinstance(config, ConfigDict)
    assert config.target.name == name
    FitSettings(**config.to_dict()["fit"])
