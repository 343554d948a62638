"""The idea every family shares: a gate decides, experts answer, a rule combines them.

Axis names used in annotations and formulas of the whole library:

| name       | letter | meaning                                                           |
| ---------- | ------ | ----------------------------------------------------------------- |
| `tokens`   | T      | independent inputs of a layer, leading axes flattened             |
| `model`    | D      | width of a token                                                  |
| `hidden`   | F      | inner width of one expert                                         |
| `experts`  | E      | experts of a layer                                                |
| `k`        | K      | experts selected for a token                                      |
| `rows`     | M      | token-to-expert assignments laid out for the experts, M = T K     |
| `groups`   | G      | runs of consecutive rows that share one weight matrix (usually E) |
| `layers`   | L      | stacked layers                                                    |
"""

from moe_jax.core.experts import ExpertFFN, FeedForward, matmul
from moe_jax.core.grouped_matmul import grouped_matmul
from moe_jax.core.losses import load_balance_loss, router_z_loss
from moe_jax.core.routing import Routing, RoutingMetrics, routing_metrics, top_k_routing
from moe_jax.core.sparse_moe import SparseMoE

__all__ = [
    "ExpertFFN",
    "FeedForward",
    "Routing",
    "RoutingMetrics",
    "SparseMoE",
    "grouped_matmul",
    "load_balance_loss",
    "matmul",
    "router_z_loss",
    "routing_metrics",
    "top_k_routing",
]
