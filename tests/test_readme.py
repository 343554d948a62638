"""What README shows runs as printed, and what it points to exists."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moe_jax.language import LanguageModel
from moe_jax.language.settings import model_config, read_settings, write_configuration
from moe_jax.language.tokenizer import ByteTokenizer
from moe_jax.training import Checkpoints, init_state, make_optimizer, split_variables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A working directory with a run of the default name: a tiny model at its first step."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/stdlib_moe")
    folder.mkdir(parents=True)
    model = {"model_dim": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "num_experts": 4}
    config = {"data": {"sequence_length": 8}, "model": model, "train": {"num_steps": 1}}
    write_configuration(folder, config)
    settings = read_settings(config)
    language_model = LanguageModel(model_config(settings.model, ByteTokenizer()))
    variables = language_model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    params, model_state = split_variables(variables)
    optimizer = make_optimizer(settings.optimizer, 1)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, init_state(jax.random.key(1), params, optimizer, model_state), {})


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run_as_printed(block, trained, capsys):
    # A reader has JAX's own rules of promotion, and sees warnings (of a product that does not fit).
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.filterwarnings("default", "Pareto k-hat", UserWarning)
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out or "print(" not in block


def test_there_are_python_blocks():
    assert len(BLOCKS) >= 3 and any("load_language_model(" in block for block in BLOCKS)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_linked_files_exist(path):
    assert (ROOT / path).exists()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_files_of_the_commands_exist():
    commands = " ".join(re.findall(r"```sh\n(.*?)```", README, re.S))
    for path in re.findall(r"\b(?:configs|benchmarks)/[\w/]+\.py", commands):
        assert (ROOT / path).exists()
