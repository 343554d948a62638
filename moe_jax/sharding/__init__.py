"""Meshes, what is split over them, and the exchange of tokens between experts' devices."""

from moe_jax.sharding.expert_parallel import ExpertParallel
from moe_jax.sharding.meshes import AXES, MeshConfig, make_mesh
from moe_jax.sharding.ragged import ragged_all_to_all
from moe_jax.sharding.rules import constrain, replicated, state_shardings

__all__ = [
    "AXES",
    "ExpertParallel",
    "MeshConfig",
    "constrain",
    "make_mesh",
    "ragged_all_to_all",
    "replicated",
    "state_shardings",
]
