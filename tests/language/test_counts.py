import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.counts import count_parameters, training_flops_per_token
from moe_jax.language.model import LanguageModel

MIXED = LanguageModelConfig(
    vocab_size=10,
    model_dim=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    layer_pattern=("dense", "sparse", "sparse"),
    hidden_dim=12,
    num_experts=5,
    num_selected=2,
    expert_hidden_dim=6,
    num_shared_experts=1,
)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_shared_experts": 0, "tie_embeddings": True},
        {"num_shared_experts": 3, "qk_norm": False},
        {"layer_pattern": ("dense",), "num_kv_heads": 4},
        {"layer_pattern": ("sparse", "dense"), "num_layers": 5, "head_dim": 6},
    ],
    ids=["mixed", "tied", "shared", "dense", "wide_heads"],
)
def test_total_is_the_size_of_the_parameters(fields):
    config = dataclasses.replace(MIXED, **{"head_dim": 0} | fields)
    tokens = jnp.zeros((1, 4), jnp.int32)
    params = jax.eval_shape(LanguageModel(config).init, jax.random.key(0), tokens)["params"]
    assert count_parameters(config).total == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_active_parameters_by_hand():
    # Each layer: query and out 8 * 8, key and value 8 * 4, norms 2 * 8, query and key norms 2 * 2.
    attention = 2 * 64 + 2 * 32 + 16 + 4
    # Dense: 3 * 8 * 12. Sparse: gate 8 * 5, and one shared and two selected experts of 3 * 8 * 6.
    feed_forward = 288 + 2 * (40 + 3 * 144)
    # And the final norm and the head.
    active = 3 * attention + feed_forward + 8 + 80
    assert count_parameters(MIXED).active == active == 1956
    # Besides: the input embedding and three idle experts in two layers.
    assert count_parameters(MIXED).total == active + 80 + 2 * 3 * 144


def test_tied_embedding_is_active_as_the_head():
    tied = dataclasses.replace(MIXED, tie_embeddings=True)
    assert count_parameters(tied).active == count_parameters(MIXED).active
    assert count_parameters(tied).total == count_parameters(MIXED).total - 80


def test_every_parameter_of_a_tied_dense_model_is_active():
    counts = count_parameters(
        dataclasses.replace(MIXED, layer_pattern=("dense",), tie_embeddings=True)
    )
    assert counts.active == counts.total


def test_flops_by_hand():
    # A token attends to 4 keys on average in a row of 7: 4 scores and 4 weighted values in each
    # of 3 layers and 4 heads of width 2, two operations a product and sum, three times that in all.
    attention = 3 * 3 * 4 * (2 * 4 * 2 + 2 * 4 * 2)
    assert training_flops_per_token(MIXED, 7) == 6 * 1956 + attention
