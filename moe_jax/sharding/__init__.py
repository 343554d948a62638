"""Meshes, what is split over them, and the exchange of tokens between experts' devices."""

from moe_jax.sharding.expert_parallel import ExpertParallel
from moe_jax.sharding.global_batches import GlobalBatches, process_rows
from moe_jax.sharding.meshes import AXES, MeshConfig, make_mesh
from moe_jax.sharding.ragged import ragged_all_to_all
from moe_jax.sharding.rules import constrain, replicated, state_shardings

__all__ = [
    "AXES",
    "ExpertParallel",
    "GlobalBatches",
    "MeshConfig",
    "constrain",
    "make_mesh",
    "process_rows",
    "ragged_all_to_all",
    "replicated",
    "state_shardings",
]
