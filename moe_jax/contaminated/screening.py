"""Starts on large data: all are followed on a sample of the rows, the distinct ones on all rows.

Starts that the sample leads to the same optimum would be the same start on all rows, and are
followed there once. None is dropped for its likelihood. A start whose prompt reaches too few rows
of the sample to be estimated from them begins where it would have without a sample, so that a
contamination too rare for the sample is not lost.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from moe_jax.contaminated.estimate import follow_starts, place_starts
from moe_jax.contaminated.problem import Ends, Plan, Problem, Settings

# The sample is an eighth of the rows, rounded down to a power of two, and no smaller than this.
_LEAST_SAMPLE = 8192
_SHARE = 8
# Rows of the sample that a prompt must reach, a parameter.
_POINTS_PER_PARAMETER = 10
# Two ends are one if their objectives and their standardised parameters differ by less.
_SAME_VALUE, _SAME_THETA = 1e-6, 1e-4


class Screening(NamedTuple):
    """What the sample says of the starts.

    Attributes:
        given: where each goes on, in the user's units [s, p].
        same_as: the first start that leads to the same end [s].
        iterations: on the sample [s].
        returned: starts that the sample cannot decide and that begin anew on all rows [s].
        rows: of the sample.
    """

    given: Float[np.ndarray, "s p"]
    same_as: Int[np.ndarray, " s"]
    iterations: Int[np.ndarray, " s"]
    returned: Bool[np.ndarray, " s"]
    rows: int


def sample_size(n: int) -> int:
    """Rows of the sample of n rows."""
    return max(_LEAST_SAMPLE, 2 ** ((n // _SHARE).bit_length() - 1))


def screen_starts(
    plan: Plan, problem: Problem, settings: Settings, key: PRNGKeyArray
) -> Screening | None:
    """Follows the starts on a sample, the same for the same number of rows.

    None where it would spare little: fewer rows that count than four samples.
    """
    present = np.flatnonzero(problem.weight > 0)
    size = sample_size(len(present))
    if len(present) < 4 * size:
        return None
    picks = np.sort(np.random.default_rng(0).choice(present, size, replace=False))
    x, y, log_frozen, weight = (a[picks] for a in problem[:4])
    sample = Problem(x, y, log_frozen, weight, problem.frozen_variance)
    ends = jax.tree.map(np.asarray, follow_starts(plan, sample, settings, key))
    needed = _POINTS_PER_PARAMETER * plan.family.size(problem.x.shape[1]) / plan.family.n_prompts
    is_finite = np.all(np.isfinite(ends.theta), axis=1) & np.isfinite(ends.value)
    returned = ~is_finite | ~(ends.effective >= needed)
    given = np.where(is_finite[:, None], ends.theta, 0.0)
    if np.any(returned):
        begun = np.asarray(place_starts(plan, problem, settings, key))
        given = np.where(returned[:, None], begun, given)
    return Screening(given, _first_alike(ends, returned), ends.iterations, returned, size)


def _first_alike(ends: Ends, returned: np.ndarray) -> Int[np.ndarray, " s"]:
    """Number of the first start that leads to the same end."""
    first = np.arange(len(returned))
    for k in range(len(first)):
        for j in range(k):
            apart = np.abs(ends.standardised[k] - ends.standardised[j])
            if (
                first[j] == j
                and ends.converged[j]
                and ends.converged[k]
                and not (returned[j] or returned[k])
                and abs(ends.value[k] - ends.value[j]) < _SAME_VALUE
                and np.max(apart / (1 + np.abs(ends.standardised[j]))) < _SAME_THETA
            ):
                first[k] = j
                break
    return first.astype(np.int32)
