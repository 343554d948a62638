"""The targets of the benchmark, with reference draws and what is asked of each."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.product_of_t_metrics import Reference
from moe_jax.product_of_t.posteriordb import POSTERIORS, load_posterior
from moe_jax.product_of_t.simulate import SYNTHETIC

NUM_REFERENCE = 4000
# Moments come from more draws than distances are measured with.
NUM_MOMENT_DRAWS = 400_000
SYNTHETIC_CASES = (
    "heavy_t_2",
    "heavy_t_10",
    "skew_t_2",
    "skew_t_10",
    "sinh_arcsinh_2",
    "sinh_arcsinh_10",
    "banana_2",
    "banana_10",
    "funnel_2",
    "funnel_10",
    "cross_2",
    "two_modes_2",
    "two_modes_10",
    "three_modes_2",
    "four_modes_2",
)
SWEEP_FAMILIES = ("sinh_arcsinh", "skew_t")
SWEEP_DIMS = (2, 5, 10, 20, 50)
SWEEP_CASES = tuple(f"{family}_{dim}" for family in SWEEP_FAMILIES for dim in SWEEP_DIMS)
# |skewness| of an unconstrained coordinate of 0.4 and more, by the data's own README.
SKEWED_POSTERIORS = (
    "garch11",
    "eight_schools_noncentered",
    "eight_schools_centered",
    "gp_pois_regr",
    "one_comp_mm_elim_abs",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A target of the benchmark.

    Attributes:
        name: its name in tables, dimension included for synthetic ones.
        log_density: z [dim] -> log p up to a constant.
        dim: number of coordinates.
        reference: draws and moments.
        fresh: second, independent set of draws, whose errors are the noise of the metrics.
    """

    name: str
    log_density: Callable[[jax.Array], jax.Array]
    dim: int
    reference: Reference
    fresh: np.ndarray


def load_case(name: str) -> Case:
    """Makes a case; draws of synthetic targets are the same in every call."""
    if name in POSTERIORS:
        posterior = load_posterior(name)
        half = len(posterior.draws) // 2
        reference = Reference(posterior.draws, posterior.mean, posterior.sd)
        # Half of the draws against all of them: an optimistic floor, but the only one there is.
        return Case(name, posterior.log_density, posterior.dim, reference, posterior.draws[:half])
    family, _, dim = name.rpartition("_")
    target = SYNTHETIC[family](int(dim))
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(20_000), 3)
        moments = np.asarray(target.sample(keys[0], NUM_MOMENT_DRAWS))
        draws = np.asarray(target.sample(keys[1], NUM_REFERENCE))
        fresh = np.asarray(target.sample(keys[2], NUM_REFERENCE))
    reference = Reference(draws, moments.mean(axis=0), moments.std(axis=0))
    return Case(name, target.log_density, target.dim, reference, fresh)
