"""Products of t-experts: a variational family with skew, tails and modes, fitted by scores."""

from moe_jax.product_of_t.diagnostics import History, pareto_smooth
from moe_jax.product_of_t.experts import (
    Experts,
    diagonal_experts,
    full_experts,
    join_experts,
    low_rank_experts,
    transform_experts,
)
from moe_jax.product_of_t.model import Estimate, LogNormalizer, ProductOfT
from moe_jax.product_of_t.samplers import WeightedDraws, effective_sample_size

__all__ = [
    "Estimate",
    "Experts",
    "History",
    "LogNormalizer",
    "ProductOfT",
    "WeightedDraws",
    "diagonal_experts",
    "effective_sample_size",
    "full_experts",
    "join_experts",
    "low_rank_experts",
    "pareto_smooth",
    "transform_experts",
]
