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
from moe_jax.product_of_t.fit import FitResult, fit_product_of_t
from moe_jax.product_of_t.model import Estimate, LogNormalizer, ProductOfT
from moe_jax.product_of_t.samplers import WeightedDraws, effective_sample_size
from moe_jax.product_of_t.settings import PAPER, SAFEGUARDED, FitSettings

__all__ = [
    "PAPER",
    "SAFEGUARDED",
    "Estimate",
    "Experts",
    "FitResult",
    "FitSettings",
    "History",
    "LogNormalizer",
    "ProductOfT",
    "WeightedDraws",
    "diagonal_experts",
    "effective_sample_size",
    "fit_product_of_t",
    "full_experts",
    "join_experts",
    "low_rank_experts",
    "pareto_smooth",
    "transform_experts",
]
