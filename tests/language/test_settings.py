import importlib.util
import json
from pathlib import Path

import pytest

from moe_jax.language.settings import (
    check_configuration,
    model_config,
    read_settings,
    write_configuration,
)
from moe_jax.language.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parents[2]


def make_config(**overrides):
    """The default configuration; overrides use __ for the dot."""
    path = ROOT / "configs/language/stdlib_moe.py"
    spec = importlib.util.spec_from_file_location("stdlib_moe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config().to_dict()
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    return config


def test_default_configuration_is_accepted_and_names_every_field():
    settings = read_settings(make_config())
    config = model_config(settings.model, ByteTokenizer())
    assert config.vocab_size == 259
    for name in ("data", "optimizer", "loss", "train", "sample", "mesh"):
        assert set(make_config()[name]) == set(vars(getattr(settings, name)))
    assert set(make_config()["model"]) | {"vocab_size", "head_dim"} == set(vars(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__num_expert": 4}, "config.model.num_expert .* did you mean num_experts"),
        ({"train__nmu_steps": 4}, "config.train.nmu_steps .* did you mean num_steps"),
        ({"model__num_selected": 17}, "num_selected=17 exceeds num_experts=16"),
        ({"model__num_heads": 3}, "model_dim=128 is not divisible by num_heads=3"),
        ({"optimizer__schedule": "linear"}, "config.optimizer: schedule='linear' .*cosine"),
        ({"optimizer__learning_rate": float("nan")}, "learning_rate=nan must be positive"),
        ({"loss__router_z_weight": -1.0}, "router_z_weight=-1.0 must not be negative"),
        ({"data__accumulate": 3}, "batch_size=16 is not divisible by accumulate=3"),
        ({"data__batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"sample__temperature": -1.0}, "temperature=-1.0 must not be negative"),
        ({"sample__num_tokens": -1}, "num_tokens=-1 must not be negative"),
        ({"train__num_steps": 0}, "num_steps=0 must be an integer of at least 1"),
        ({"mesh__expert": 0}, "config.mesh: expert=0 must be an integer of at least 1, or -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_configuration_names_key_value_and_range(overrides, message):
    with pytest.raises(ValueError, match=message):
        read_settings(make_config(**overrides))


@pytest.mark.parametrize("seed", [-1, 2**31, True, "x", 0.5])
def test_seed_that_is_not_an_integer_in_range_is_refused(seed):
    config = make_config()
    config["seed"] = seed
    with pytest.raises(ValueError, match=f"config.seed={seed!r} must be an integer in"):
        read_settings(config)


def test_unknown_section_is_refused():
    config = make_config()
    config["optimiser"] = config["optimizer"]
    with pytest.raises(ValueError, match="config.optimiser .* did you mean optimizer"):
        read_settings(config)


def test_sections_left_out_take_their_defaults_where_there_are_any():
    config = make_config()
    del config["data"], config["loss"]
    assert read_settings(config).data.sequence_length == 256
    del config["train"]
    with pytest.raises(ValueError, match="config.train.num_steps is missing"):
        read_settings(config)


def test_vocabulary_may_exceed_the_tokenizers_but_not_fall_short():
    fields = make_config()["model"]
    assert model_config({**fields, "vocab_size": 320}, ByteTokenizer()).vocab_size == 320
    with pytest.raises(ValueError, match="vocab_size=100 is below the tokenizer's 259"):
        model_config({**fields, "vocab_size": 100}, ByteTokenizer())


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("data", "batch_size", 8), ("data", "source", "*.txt"), ("seed", None, 1)],
)
def test_batches_may_not_change_once_there_is_a_checkpoint(tmp_path, section, key, value):
    before, after = make_config(), make_config()
    if key:
        after[section][key] = value
    else:
        after[section] = value
    write_configuration(tmp_path, before)
    assert check_configuration(tmp_path, after) == []
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    assert check_configuration(tmp_path, before) == []
    name = f"config.{section}.{key}" if key else "config.seed"
    with pytest.raises(ValueError, match=f"{name}={value!r} differs from the ".replace("*", ".")):
        check_configuration(tmp_path, after)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_lengths_of_the_run_may_change_after_a_checkpoint(tmp_path):
    write_configuration(tmp_path, make_config(train__num_steps=8))
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    changed = make_config(train__num_steps=9, data__eval_tokens=5)
    lines = check_configuration(tmp_path, changed)
    assert "config.train.num_steps: 8 -> 9" in lines and len(lines) == 2
    assert json.loads((tmp_path / "config.json").read_text())["train"]["num_steps"] == 8
    write_configuration(tmp_path, changed)
    assert check_configuration(tmp_path, changed) == []


def test_configuration_of_a_run_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json is damaged: "):
        check_configuration(tmp_path, make_config())


def test_what_a_killed_first_save_leaves_is_no_checkpoint(tmp_path):
    write_configuration(tmp_path, make_config())
    (tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    assert check_configuration(tmp_path, make_config(data__batch_size=8)) == []


def test_tokenizer_is_kept_with_the_run_and_may_not_change(tmp_path):
    file, folder = tmp_path / "tokenizer.json", tmp_path / "run"
    file.write_text("one")
    config = make_config(data__tokenizer=str(file))
    (folder / "checkpoints" / "10").mkdir(parents=True)
    write_configuration(folder, config)
    assert (folder / "tokenizer.json").read_text() == "one"
    assert check_configuration(folder, config) == []
    file.write_text("two")
    with pytest.raises(ValueError, match=f"config.data.tokenizer='{file}' is no longer the same"):
        check_configuration(folder, config)
