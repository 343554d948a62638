"""Estimates of the target's own moments, from everything at which a fit knew the target's value.

Draws of q alone cannot say what q does not reach: where it cuts off a tail, no draw lies, and the
weights p / q of the others are all good. The candidates of the preparation, of a proposal r much
broader than q, do lie there. All n q-draws and m candidates together are draws of the mixture
(n q + m r) / (n + m), whose weights p / mixture are bounded by both.

Reference: Veach and Guibas 1995, balance heuristic; Owen and Zhou 2000, deterministic mixtures.
"""

import math

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from moe_jax.product_of_t.diagnostics import pareto_smooth


@chex.dataclass(frozen=True)
class Pool:
    """Weighted draws of the target; arrays are numpy's.

    Attributes:
        values: draws of q, then the candidates, [n + m, D].
        log_weights: normalised Pareto-smoothed logarithms of p / mixture.
        pareto_k: k-hat of p / mixture.
        ess: effective sample size of the weights.
        log_evidence: log of the mean of p / mixture.
        mean: weighted mean, [D].
        mean_error: its standard error, sqrt(sum_i w_i^2 (z_i - mean)^2), [D].
        standard_deviation: weighted standard deviation s, [D].
        standard_deviation_error: its standard error, sqrt(sum_i w_i^2 ((z_i - mean)^2 - s^2)^2) /
            (2 s), [D]. A tail that no draw reached is in neither error.
    """

    values: np.ndarray
    log_weights: np.ndarray
    pareto_k: float
    ess: float
    log_evidence: float
    mean: np.ndarray
    mean_error: np.ndarray
    standard_deviation: np.ndarray
    standard_deviation_error: np.ndarray


def pool_draws(
    values: Float[np.ndarray, "draws dim"],
    log_density: Float[np.ndarray, " draws"],
    log_q: Float[np.ndarray, " draws"],
    log_proposal: Float[np.ndarray, " draws"] | None,
    num_q: int,
) -> Pool:
    """Weights of draws of which the first `num_q` are of q and the others of the proposal.

    Args:
        values: all draws.
        log_density: log p there, up to a constant; not finite means no weight.
        log_q: log q there, normalised.
        log_proposal: log r there, normalised; None where all draws are of q.
        num_q: n.
    """
    log_mixture = log_q
    if log_proposal is not None:
        share = num_q / len(values)
        log_mixture = np.logaddexp(
            math.log(share) + log_q, math.log(max(1.0 - share, 1e-300)) + log_proposal
        )
    ratios = np.where(np.isfinite(log_density), log_density - log_mixture, -np.inf)
    smoothed, pareto_k = pareto_smooth(jnp.asarray(ratios))
    log_weights = np.asarray(smoothed)
    with np.errstate(under="ignore"):
        weights = np.exp(log_weights)
        effective = 1.0 / np.sum(weights**2)
        mean = weights @ values
        squares = (values - mean) ** 2
        variance = weights @ squares
        mean_error = np.sqrt(weights**2 @ squares)
        deviation = np.sqrt(variance)
        deviation_error = np.sqrt(weights**2 @ (squares - variance) ** 2) / (2.0 * deviation)
    return Pool(
        values=values,
        log_weights=log_weights,
        pareto_k=float(pareto_k),
        ess=float(effective),
        log_evidence=float(logsumexp(ratios)) - math.log(len(ratios)),
        mean=mean,
        mean_error=mean_error,
        standard_deviation=deviation,
        standard_deviation_error=deviation_error,
    )


def moment_gaps(draws: Float[np.ndarray, "draws dim"], pool: Pool) -> tuple[float, float]:
    """How far the moments of q's draws lie from the pool's, the worst coordinate of each.

    Returns:
        Difference of means in standard deviations, and relative difference of deviations.
    """
    sd = np.maximum(pool.standard_deviation, np.finfo(np.float64).tiny)
    mean_gap = np.max(np.abs(np.mean(draws, axis=0) - pool.mean) / sd)
    return float(mean_gap), float(np.max(np.abs(np.std(draws, axis=0) / sd - 1.0)))
