"""What each part of the choice of experts, and each safeguard, is worth."""

import dataclasses
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.product_of_t_cases import Case
from benchmarks.product_of_t_metrics import compare
from moe_jax.product_of_t import fit_product_of_t
from moe_jax.product_of_t.settings import PAPER, SAFEGUARDED, FitSettings

ABLATION_CASES = (
    "sinh_arcsinh_10",
    "skew_t_10",
    "banana_2",
    "funnel_2",
    "two_modes_2",
    "garch11",
    "eight_schools_noncentered",
)


def _changed(**changes: Any) -> FitSettings:
    return dataclasses.replace(SAFEGUARDED, **changes)


# All take the same number of scores in updates: a variant of one round has twice the iterations.
_ONE_ROUND = {"rounds": 1, "iterations": SAFEGUARDED.rounds * SAFEGUARDED.iterations}
VARIANTS = {
    "default": SAFEGUARDED,
    "jitter about modes, no others": _changed(
        placement="jitter", ladder=False, coordinate_experts=False, **_ONE_ROUND
    ),
    "tempered, no others": _changed(ladder=False, coordinate_experts=False, **_ONE_ROUND),
    "no local experts": _changed(local_experts=0, **_ONE_ROUND),
    "no coordinate experts": _changed(coordinate_experts=False),
    "no broad experts": _changed(ladder=False),
    "jitter for tempered": _changed(placement="jitter"),
    "no refreshing": _changed(**_ONE_ROUND),
    "Lambda = H only": _changed(local_scales=(1.0,)),
    "Lambda = H / (D + 5) only": _changed(local_scales=("dof",)),
    "no whitening": _changed(whiten=False),
    "samples of q only": _changed(target_share=0.0),
    "no bound on scores": _changed(score_clip=None),
    "Dirichlet for Gibbs": _changed(sampler="dirichlet"),
    "paper": PAPER,
}


def run_ablation(case: Case, keys: Sequence[jax.Array]) -> dict[str, list[dict[str, Any]]]:
    """Errors, k-hat and counts of every variant on one target; a failed fit says why."""
    return {
        name: [_run(case, key, settings) for key in keys] for name, settings in VARIANTS.items()
    }


def _run(case: Case, key: jax.Array, settings: FitSettings) -> dict[str, Any]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        # What they say is in the record.
        warnings.simplefilter("ignore", UserWarning)
        try:
            result = fit_product_of_t(key, case.log_density, case.dim, settings=settings)
        except ValueError as error:
            return {"failed": str(error)}
    record = compare(np.asarray(result.draws), case.reference)
    return record | {
        "pareto_k": float(result.pareto_k),
        "trusted": bool(result.trusted),
        "scores": int(result.evaluations.total_scores),
        "num_active": int(result.history.num_active[-1]),
        "exponent_sum": float(result.history.exponent_sum[-1]),
        "seconds": time.perf_counter() - began,
    }
