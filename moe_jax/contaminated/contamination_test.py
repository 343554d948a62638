"""Tests of no contamination, p = f0.

Under the hypothesis the gate is at the boundary of its range and the prompt's parameters vanish
from the model, so twice the log-likelihood ratio has no chi-squared limit. But the frozen model is
known: data can be drawn from it, and the same statistic of such data gives an exact test at any n.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, PRNGKeyArray
from scipy import stats

from moe_jax.contaminated.data import check_data, check_log_frozen, frozen_log_prob
from moe_jax.contaminated.fit import fit_many
from moe_jax.contaminated.frozen import FrozenGaussian, require
from moe_jax.contaminated.model import ContaminatedMoE


class ContaminationTest(NamedTuple):
    """A statistic, its p-value and the statistics of data drawn under the hypothesis [b]."""

    statistic: float
    p_value: float
    null_draws: Float[np.ndarray, " b"]


class ClosedTest(NamedTuple):
    """A statistic and the p-value of its known distribution."""

    statistic: float
    p_value: float


def test_no_contamination(
    key: PRNGKeyArray,
    model: ContaminatedMoE,
    x: ArrayLike,
    y: ArrayLike,
    *,
    n_boot: int = 199,
    refit: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    **options: Any,
) -> ContaminationTest:
    """Monte-Carlo test of p = f0 by the likelihood ratio 2 (max loglik - sum log f0).

    x is kept and n_boot responses are drawn from f0. All of them, the data among them, are fitted
    in one call: same starts, same rule for the bounds, same budget. With
    p = (1 + #{LR_b >= LR}) / (B + 1) the test is exact at levels k / (B + 1), if f0 does not come
    from these data.

    Args:
        key: of the draws and of random starts.
        model: frozen model, which must `sample`, and family.
        x: covariates [n, d].
        y: responses [n].
        n_boot: B.
        refit: takes x and y, returns a frozen model: how f0 was estimated if it comes from these
            data. It is then estimated anew from every draw, and the test is approximate.
        **options: of `fit_many`, without starting parameters, which would favour the data.

    Raises:
        ValueError: if n_boot < 1, starts are parameters, or the frozen model cannot sample.
    """
    if n_boot < 1:
        raise ValueError(f"n_boot={n_boot}, expected at least 1")
    if not isinstance(options.get("starts", "tail"), str):
        raise ValueError("starts are parameters, expected 'tail' or 'tail+random'")
    x, y = check_data(x, y, model.expert)
    sample = require(model.frozen, "sample", "to draw data under the hypothesis")
    draw_key, fit_key = jax.random.split(key)
    with jax.enable_x64(True):
        draws = [np.asarray(sample(k, x), np.float64) for k in jax.random.split(draw_key, n_boot)]
    ys = np.stack([y, *draws])
    models = [model.frozen] * len(ys)
    if refit is not None:
        models = [model.frozen, *(refit(x, draw) for draw in draws)]
    log_frozen = np.stack([frozen_log_prob(f, x, row) for f, row in zip(models, ys, strict=True)])
    check_log_frozen(log_frozen[0], np.ones(len(y)))
    many = fit_many(model, x, ys, key=fit_key, log_frozen=log_frozen, **options)
    ratio = 2.0 * (many.loglik - np.sum(log_frozen, axis=1))
    # A fit that stops below the frozen model's own likelihood has found nothing. A draw that cannot
    # be fitted counts against the data.
    ratio = np.where(np.isnan(ratio), np.inf, np.maximum(ratio, 0.0))
    return ContaminationTest(float(ratio[0]), monte_carlo_p(ratio[0], ratio[1:]), ratio[1:])


def monte_carlo_p(statistic: float, null_draws: Float[np.ndarray, " b"]) -> float:
    """(1 + #{null draws >= statistic}) / (B + 1)."""
    return float((1 + np.sum(null_draws >= statistic)) / (len(null_draws) + 1))


def fixed_prompt_test(
    log_frozen: Float[np.ndarray, " n"], log_expert: Float[np.ndarray, " n"]
) -> ClosedTest:
    """Likelihood-ratio test of w = 0 for a known prompt and a constant gate.

    The statistic is 2 sup_w sum_i log(1 - w + w f(y_i)/f0(y_i)) over w in [0, 1]. Only w is
    unknown, at the boundary, and the limit is half a point mass at 0 and half chi-squared(1): the
    critical value at 5 % is 2.71.

    Args:
        log_frozen: log f0(y_i | x_i).
        log_expert: log f(y_i | x_i), both finite.
    """
    difference = np.asarray(log_expert, np.float64) - np.asarray(log_frozen, np.float64)
    low, high = 0.0, 1.0
    if np.sum(np.expm1(np.minimum(difference, 700.0))) <= 0:
        return ClosedTest(0.0, 1.0)
    # The derivative falls in w. Divided through by the larger density, nothing overflows.
    frozen_share = np.exp(np.minimum(-difference, 0.0))
    expert_share = np.exp(np.minimum(difference, 0.0))
    for _ in range(60):
        w = 0.5 * (low + high)
        slope = (expert_share - frozen_share) / ((1 - w) * frozen_share + w * expert_share)
        low, high = (w, high) if np.sum(slope) > 0 else (low, w)
    mixture = np.log((1 - low) * frozen_share + low * expert_share)
    statistic = max(2.0 * float(np.sum(mixture + np.maximum(difference, 0.0))), 0.0)
    return ClosedTest(statistic, 0.5 * float(stats.chi2.sf(statistic, 1)))


def score_test(
    frozen: FrozenGaussian,
    x: ArrayLike,
    y: ArrayLike,
    *,
    mean: Float[np.ndarray, " n"],
    nu: float,
    log_odds: Float[np.ndarray, " n"] | None = None,
) -> ClosedTest:
    """Score test against a known Gaussian prompt and gate slope, one-sided and normal.

    z = sum_i o_i (f/f0 - 1) / sqrt(sum_i o_i^2 (M_i - 1)) with o_i = exp(beta.x_i) and, completing
    the square, M = int f^2/f0 dy = nu0 / sqrt(nu (2 nu0 - nu)) exp((h - h0)^2 / (2 nu0 - nu)). The
    integral is finite only for nu < 2 nu0.

    Args:
        frozen: Gaussian of mean h0 and variance nu0.
        x: covariates [n, d].
        y: responses [n].
        mean: h(x_i), the prompt's mean.
        nu: the prompt's variance.
        log_odds: beta.x_i, zero by default.

    Raises:
        ValueError: if nu is not below twice the frozen variance everywhere.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    base, nu0 = frozen.mean(x), frozen.variance(x)
    if not 0 < nu < 2 * np.min(nu0):
        raise ValueError(f"nu={nu}, expected a number in (0, {2 * np.min(nu0):g}), twice nu0")
    odds = np.ones(len(y)) if log_odds is None else np.exp(np.asarray(log_odds, np.float64))
    ratio = np.exp(stats.norm.logpdf(y, mean, np.sqrt(nu)) - frozen_log_prob(frozen, x, y))
    square = nu0 / np.sqrt(nu * (2 * nu0 - nu)) * np.exp(np.square(mean - base) / (2 * nu0 - nu))
    z = float(np.sum(odds * (ratio - 1)) / np.sqrt(np.sum(np.square(odds) * (square - 1))))
    return ClosedTest(z, float(stats.norm.sf(z)))


def pit_screen(
    key: PRNGKeyArray, frozen: Any, x: ArrayLike, y: ArrayLike, *, n_draws: int = 999
) -> ContaminationTest:
    """Monte-Carlo test that u_i = F0(y_i | x_i) are uniform, before any fit.

    The statistic is Anderson and Darling's, which weighs the tails. It has no power against prompts
    that leave the distribution of u alone, whatever they do to its dependence on x.

    Args:
        key: of the draws.
        frozen: has `cdf(x, y)`.
        x: covariates [n, d].
        y: responses [n].
        n_draws: uniform samples to compare with.
    """
    cdf = require(frozen, "cdf", "for probability integral transforms")
    with jax.enable_x64(True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        u = np.asarray(cdf(x, y), np.float64)
        draws = np.asarray(jax.random.uniform(key, (n_draws, len(y)), jnp.float64))
    statistic, null = _anderson_darling(u[None])[0], _anderson_darling(draws)
    return ContaminationTest(float(statistic), monte_carlo_p(statistic, null), null)


def _anderson_darling(u: Float[np.ndarray, "b n"]) -> Float[np.ndarray, " b"]:
    """-n - mean of (2 i - 1) (log u_(i) + log(1 - u_(n+1-i)))."""
    n = u.shape[1]
    ordered = np.clip(np.sort(u, axis=1), 1e-300, 1 - 1e-16)
    odd = 2 * np.arange(1, n + 1) - 1
    return -n - np.sum(odd * (np.log(ordered) + np.log1p(-ordered[:, ::-1])), axis=1) / n
