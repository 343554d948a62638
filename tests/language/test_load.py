import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.language import LanguageModel, generate, load_language_model
from moe_jax.language.settings import model_config, read_settings, write_configuration
from moe_jax.language.tokenizer import ByteTokenizer, load_tokenizer
from moe_jax.training.checkpoints import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    Checkpoints,
)
from moe_jax.training.optimizer import make_optimizer
from moe_jax.training.state import init_state, split_variables

CONFIG = {
    "data": {"sequence_length": 12},
    "model": {
        "model_dim": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "num_experts": 4,
        "expert_hidden_dim": 8,
        "layer_pattern": ("sparse",),
        "router": "sigmoid",
    },
    "train": {"num_steps": 9},
}
SCORES = {2: 3.0, 4: 2.0, 6: 2.5}
TOKENS = jnp.arange(12, dtype=jnp.int32)[None]


def state_at(step, config=CONFIG):
    """A state whose numbers tell the step; initialising takes no compilation."""
    settings = read_settings(config)
    model = LanguageModel(model_config(settings.model, ByteTokenizer()))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    rng = np.random.default_rng(step)
    variables = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, leaf.dtype), shapes
    )
    params, model_state = split_variables(variables)
    optimizer = make_optimizer(settings.optimizer, settings.train.num_steps)
    return variables, init_state(jax.random.key(0), params, optimizer, model_state)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_configuration(folder, CONFIG)
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        for step, score in SCORES.items():
            checkpoints.save(step, state_at(step)[1], {}, {"bits_per_byte": score})
    return folder


@pytest.fixture
def copy(workdir, tmp_path):
    """The run's folder, to be damaged."""
    return shutil.copytree(workdir, tmp_path / "run")


@pytest.mark.parametrize(("step", "found"), [(None, 6), ("best", 4), (2, 2)])
def test_variables_are_those_of_the_step_asked_for(workdir, step, found):
    loaded = load_language_model(workdir, step)
    assert (loaded.step, loaded.sequence_length) == (found, 12)
    assert loaded.tokenizer == ByteTokenizer()
    expected = state_at(found)[0]
    assert set(loaded.variables) == {"params", "router_state"}
    jax.tree.map(np.testing.assert_array_equal, dict(loaded.variables), dict(expected))


def test_loaded_model_scores_and_continues(workdir):
    model, variables, tokenizer, *_ = load_language_model(str(workdir))
    logits, routing = model.apply(variables, TOKENS)
    assert logits.shape == (1, 12, tokenizer.vocab_size) and routing.load_balance_loss.shape == (1,)
    (new,) = generate(jax.random.key(0), model, variables, [tokenizer.encode("ab")], 3)
    assert len(new) == 3


def test_optimiser_is_not_read(copy):
    # A run that was resumed with another kind of optimiser would hold another state.
    record = copy / "checkpoints" / "6" / "record" / "metadata"
    names = json.loads(record.read_text())["record"]["leaves"]
    assert any(name.startswith("opt_state") for name in names)
    changed = {**CONFIG, "train": {"num_steps": 99}, "optimizer": {"max_gradient_norm": 0.5}}
    write_configuration(copy, changed)
    assert load_language_model(copy).step == 6


def test_loading_changes_nothing(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    load_language_model(copy, "best")
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_damaged_newest_is_passed_over_but_not_one_that_was_asked_for(copy):
    (copy / "checkpoints" / "6" / "record" / "metadata").write_text("{}")
    assert load_language_model(copy).step == 4
    with pytest.raises(CheckpointCorruptError, match="step 6"):
        load_language_model(copy, 6)


def refusal(workdir, step=None, error=ValueError):
    with pytest.raises(error) as caught:
        load_language_model(workdir, step)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_that_holds_no_run_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        message = f"workdir={str(folder)!r} holds no run: no config.json is there"
        assert refusal(folder) == message


def test_run_without_a_checkpoint_or_an_evaluation_is_named(tmp_path):
    write_configuration(tmp_path, CONFIG)
    assert refusal(tmp_path) == f"workdir={str(tmp_path)!r} holds no checkpoint yet"
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state_at(1)[1], {})
    assert "no checkpoint" in refusal(tmp_path, "best") and "evaluated" in refusal(tmp_path, "best")
    assert load_language_model(tmp_path).step == 1


def test_step_without_a_checkpoint_is_named_with_those_there_are(workdir):
    assert re.search("step=5 is not among the checkpoints in .*: 2, 4, 6$", refusal(workdir, 5))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is damaged: "),
        ("{", "is damaged: "),
        ("[]", "is damaged: not a JSON object"),
        ('{"modle": {}}', "is not of this version: config.modle is not a configuration key"),
        ('{"train": {"num_steps": 1}}', "is not of this version: config.model.model_dim"),
    ],
)
def test_broken_configuration_is_named(copy, text, reason):
    (copy / "config.json").write_text(text)
    assert refusal(copy).startswith(f"{copy}/config.json {reason}")


def test_checkpoint_of_another_model_is_refused(copy):
    write_configuration(copy, {**CONFIG, "model": {**CONFIG["model"], "num_experts": 8}})
    assert "experts/down has shape" in refusal(copy, error=CheckpointMismatchError)


def test_tokenizer_comes_from_the_runs_own_copy(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "elsewhere.json"
    vocabulary = {"a": 0, "b": 1, "<unk>": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>")).save(str(file))
    expected = load_tokenizer(str(file)).fingerprint
    config = {**CONFIG, "data": {"sequence_length": 12, "tokenizer": str(file)}}
    folder = tmp_path / "run"
    folder.mkdir()
    write_configuration(folder, config)
    settings = read_settings(config)
    fields = dict(settings.model) | {"vocab_size": 259}
    write_configuration(folder, {**config, "model": fields})
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, state_at(1)[1], {})
    file.unlink()
    assert load_language_model(folder).tokenizer.fingerprint == expected
