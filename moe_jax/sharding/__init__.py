"""Meshes and what is split over them, exchange of tokens, where experts stand, schedules."""

from moe_jax.sharding.compiled_report import CHIPS, report_compiled
from moe_jax.sharding.expert_parallel import ExpertParallel
from moe_jax.sharding.expert_permutation import permute_experts
from moe_jax.sharding.global_batches import GlobalBatches, process_rows
from moe_jax.sharding.hlo_schedule import bytes_by_kind, covered_share, read_schedule
from moe_jax.sharding.meshes import AXES, MeshConfig, make_mesh
from moe_jax.sharding.network import Cost, Link, Network, all_reduce_cost, exchange_costs
from moe_jax.sharding.placement import (
    busiest_device,
    device_visits,
    expert_use,
    place_experts,
    uninformed_device_visits,
)
from moe_jax.sharding.ragged import ragged_all_to_all
from moe_jax.sharding.rules import constrain, replicated, state_shardings
from moe_jax.sharding.schedule_simulator import SCHEDULES, Schedule, StepWork, simulate_step
from moe_jax.sharding.simulator import Task, Timeline, simulate

__all__ = [
    "AXES",
    "CHIPS",
    "SCHEDULES",
    "Cost",
    "ExpertParallel",
    "GlobalBatches",
    "Link",
    "MeshConfig",
    "Network",
    "Schedule",
    "StepWork",
    "Task",
    "Timeline",
    "all_reduce_cost",
    "busiest_device",
    "bytes_by_kind",
    "constrain",
    "covered_share",
    "device_visits",
    "exchange_costs",
    "expert_use",
    "make_mesh",
    "permute_experts",
    "place_experts",
    "process_rows",
    "ragged_all_to_all",
    "read_schedule",
    "replicated",
    "report_compiled",
    "simulate",
    "simulate_step",
    "state_shardings",
    "uninformed_device_visits",
]
