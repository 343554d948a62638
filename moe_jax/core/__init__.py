"""The idea every family shares: a gate decides, experts answer, a rule combines them.

Axis names used in annotations and formulas of the whole library:

| name       | letter | meaning                                                           |
| ---------- | ------ | ----------------------------------------------------------------- |
| `tokens`   | T      | independent inputs of a layer, leading axes flattened             |
| `model`    | D      | width of a token                                                  |
| `hidden`   | F      | inner width of one expert                                         |
| `experts`  | E      | experts of a layer                                                |
| `k`        | K      | experts selected for a token                                      |
| `capacity` | C      | most assignments that an expert answers, where there is a limit   |
| `rows`     | M      | token-to-expert assignments laid out for the experts, M = T K     |
| `groups`   | G      | runs of consecutive rows that share one weight matrix (usually E) |
| `slots`    | S      | weighted means of the tokens that the experts of a soft mixture answer |
| `layers`   | L      | stacked layers                                                    |
"""

from moe_jax.core.balanced import (
    expert_choice_routing,
    sinkhorn_plan,
    sinkhorn_routing,
    update_balance_bias,
)
from moe_jax.core.capacity import expert_capacity, limit_capacity, order_by_capacity
from moe_jax.core.experts import ExpertFFN, FeedForward, matmul
from moe_jax.core.gates import GATES, CosineGate, HiddenLayerGate, LinearGate, RandomGate
from moe_jax.core.grouped_matmul import grouped_matmul
from moe_jax.core.losses import (
    gate_entropy,
    importance_loss,
    load_balance_loss,
    router_z_loss,
    sequence_load_balance_loss,
)
from moe_jax.core.permutation import RowOrder, combine, dispatch, sort_by_expert
from moe_jax.core.routers import ROUTERS
from moe_jax.core.routing import Routing, RoutingMetrics, routing_metrics
from moe_jax.core.soft import SoftWeights, soft_routing
from moe_jax.core.sparse_moe import SparseMoE
from moe_jax.core.token_choice import (
    dense_routing,
    hash_routing,
    noisy_top_k_routing,
    sigmoid_routing,
    top_k_routing,
)

__all__ = [
    "GATES",
    "ROUTERS",
    "CosineGate",
    "ExpertFFN",
    "FeedForward",
    "HiddenLayerGate",
    "LinearGate",
    "RandomGate",
    "RowOrder",
    "Routing",
    "RoutingMetrics",
    "SoftWeights",
    "SparseMoE",
    "combine",
    "dense_routing",
    "dispatch",
    "expert_capacity",
    "expert_choice_routing",
    "gate_entropy",
    "grouped_matmul",
    "hash_routing",
    "importance_loss",
    "limit_capacity",
    "load_balance_loss",
    "matmul",
    "noisy_top_k_routing",
    "order_by_capacity",
    "router_z_loss",
    "routing_metrics",
    "sequence_load_balance_loss",
    "sigmoid_routing",
    "sinkhorn_plan",
    "sinkhorn_routing",
    "soft_routing",
    "sort_by_expert",
    "top_k_routing",
    "update_balance_bias",
]
