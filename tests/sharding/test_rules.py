"""Which mesh axes split which parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.language import LanguageModel, LanguageModelConfig
from moe_jax.sharding import state_shardings
from moe_jax.sharding.rules import constrain, partition_spec
from moe_jax.training import init_state, split_variables

AXES = ("data", "fsdp", "expert", "tensor")


def mesh(*sizes):
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)


def test_an_axis_serves_the_first_dimension_and_only_one_that_it_divides():
    whole = mesh(2, 2, 2, 2)
    assert partition_spec((8, 8, 8), ("experts", "model", "hidden"), whole) == P(
        ("expert",), ("fsdp",), ("tensor",)
    )
    assert partition_spec((8, 8), ("model", "hidden"), whole) == P(("fsdp", "expert"), ("tensor",))
    assert partition_spec((6, 7), ("model", "hidden"), whole) == P(("fsdp",), None)
    assert partition_spec((8, 3), ("batch", None), whole) == P(("data", "fsdp", "expert"), None)
    assert partition_spec((8,), ("experts",), mesh(8, 1, 1, 1)) == P(None)


def test_every_matrix_of_a_language_model_and_its_moments_are_split():
    config = LanguageModelConfig(
        vocab_size=16,
        model_dim=8,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
        layer_pattern=("dense", "sparse"),
        num_experts=4,
        num_shared_experts=2,
    )

    def init():
        variables = LanguageModel(config).init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        params, model_state = split_variables(variables)
        return init_state(jax.random.key(1), params, optax.adamw(1e-3), model_state)

    shapes = jax.eval_shape(init)
    shardings = state_shardings(shapes, mesh(1, 2, 2, 2))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    whole = set()
    for name, shape, sharding in zip(
        names, jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
    ):
        if np.prod(sharding.shard_shape(shape.shape)) * 8 != shape.size:
            whole.add(name)
    # What is left whole is of the size of a vector, or a gate's matrix.
    assert all(
        name.endswith((".step", ".key", ".skipped", ".skipped_in_row", ".count"))
        or "norm" in name
        or "router" in name
        for name in whole
    )
    experts = shardings.params["blocks_0"]["layer_1"]["moe"]["experts"]
    assert experts["up"].spec == P(None, ("expert",), ("fsdp",), ("tensor",))
    assert experts["down"].spec == P(None, ("expert",), ("tensor",), ("fsdp",))
    assert any("mu" in name and "experts" in name for name in names)


def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((2, 3))
    assert constrain(x, ("batch", None), None) is x
