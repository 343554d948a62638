import dataclasses
import re

import jax.numpy as jnp
import jaxtyping
import pytest

from moe_jax.language.config import LanguageModelConfig

DENSE = LanguageModelConfig(
    vocab_size=32,
    model_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    layer_pattern=("dense",),
    hidden_dim=24,
)
MIXED = dataclasses.replace(
    DENSE,
    num_layers=5,
    layer_pattern=("dense", "sparse"),
    num_experts=4,
    num_selected=2,
    expert_hidden_dim=8,
)


@pytest.fixture(autouse=True)
def without_runtime_checks():
    """Outside the tests nothing checks annotations; the config's own errors are what users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_head_dim_follows_from_the_width():
    assert DENSE.head_dim == 4
    assert dataclasses.replace(DENSE, head_dim=6).head_dim == 6


def test_head_dim_frees_the_width_from_the_number_of_heads():
    assert dataclasses.replace(DENSE, model_dim=18, head_dim=6).head_dim == 6


def test_pattern_is_repeated_and_cut_to_the_number_of_layers():
    assert MIXED.layer_kinds == ("dense", "sparse", "dense", "sparse", "dense")
    assert MIXED.num_sparse_layers == 2
    assert dataclasses.replace(MIXED, num_layers=1).layer_kinds == ("dense",)


def test_pattern_given_as_a_list_leaves_the_config_hashable():
    config = dataclasses.replace(MIXED, layer_pattern=["dense", "sparse"])
    assert config == MIXED and hash(config) == hash(MIXED)


def test_a_layer_kind_that_does_not_occur_needs_no_sizes():
    assert dataclasses.replace(DENSE, num_experts=0, num_selected=0).num_experts == 0
    assert dataclasses.replace(MIXED, layer_pattern=("sparse",), hidden_dim=-1).hidden_dim == -1


def test_sizes_that_are_left_out_have_defaults_that_fit():
    config = LanguageModelConfig(
        vocab_size=32, model_dim=16, num_layers=1, num_heads=2, num_kv_heads=1
    )
    assert (config.hidden_dim, config.expert_hidden_dim) == (64, 32)


def test_dtype_may_be_a_type():
    named = dataclasses.replace(DENSE, dtype="bfloat16")
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16")):
        assert dataclasses.replace(DENSE, dtype=dtype) == named


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_dim": 18}, "model_dim=18 is not divisible by num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"num_kv_heads": 8}, "num_heads=4 is not divisible by num_kv_heads=8"),
        ({"model_dim": 12}, "head_dim=3 must be even for rotary positions"),
        ({"head_dim": 5}, "head_dim=5 must be even for rotary positions"),
        ({"head_dim": -2}, "head_dim=-2 must be an integer of at least 1"),
        ({"num_selected": 5}, "num_selected=5 exceeds num_experts=4"),
        ({"num_selected": 0}, "num_selected=0 must be an integer of at least 1"),
        ({"num_selected": True}, "num_selected=True must be an integer of at least 1"),
        ({"num_experts": 0}, "num_experts=0 must be an integer of at least 1"),
        ({"expert_hidden_dim": -1}, "expert_hidden_dim=-1 must be an integer of at least 1"),
        ({"hidden_dim": -1}, "hidden_dim=-1 must be an integer of at least 1"),
        ({"num_shared_experts": -1}, "num_shared_experts=-1 must be an integer of at least 0"),
        ({"num_shared_experts": True}, "num_shared_experts=True must be an integer of at least 0"),
        ({"layer_pattern": ()}, "layer_pattern=() must name at least one layer"),
        ({"layer_pattern": ("dense", "spares")}, "layer_pattern='spares' is not one of"),
        ({"layer_pattern": "sparse"}, "layer_pattern='sparse' must be a sequence of kinds"),
        ({"rope_base": 1.0}, "rope_base=1.0 must exceed 1"),
        ({"rope_base": float("nan")}, "rope_base=nan must exceed 1"),
        ({"activation": "tanh"}, "activation='tanh' is not one of ('silu', 'gelu', 'relu')"),
        ({"router": "topk"}, "router='topk' is not one of ('top_k',"),
        (
            {"router_options": {"renormalise": 1}},
            "'renormalise' is not one of ['axis_names', 'gate'",
        ),
        (
            {"router": "expert_choice"},
            "router='expert_choice' lets a token's output depend on later",
        ),
        ({"router": "soft"}, "router='soft' lets a token's output depend on later tokens"),
        (
            {"capacity_factor": 1.0, "capacity_priority": "score"},
            "capacity_priority='score' lets a token's output depend on later tokens",
        ),
        ({"capacity_factor": 2.5}, "capacity_factor=2.5 is not in (0, 2]"),
        ({"capacity_priority": "first"}, "capacity_priority='first' is not one of"),
        ({"expert_dropout": 1.0}, "expert_dropout=1.0 is not in [0, 1)"),
        ({"remat": "all"}, "remat='all' is not one of ('none', 'dots', 'full')"),
        ({"dtype": "float16"}, "dtype='float16' is not one of ('float32', 'bfloat16')"),
        ({"dtype": jnp.int32}, "dtype='int32' is not one of ('float32', 'bfloat16')"),
        ({"dtype": "half a float"}, "dtype='half a float' is not one of"),
    ],
)
def test_impossible_shape_is_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(MIXED, **{"head_dim": 0} | fields)


@pytest.mark.parametrize(
    "name", ["vocab_size", "model_dim", "num_layers", "num_heads", "num_kv_heads"]
)
@pytest.mark.parametrize("value", [0, -4, True, "4", 4.0, None])
def test_sizes_are_positive_integers(name, value):
    message = f"{name}={value!r} must be an integer of at least 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(DENSE, **{name: value, "head_dim": 0})
