"""Moments from draws of q and of a broad proposal together, where q alone is blind."""

import jax
import numpy as np
import pytest
from scipy import stats

from moe_jax.product_of_t.diagnostics import trust_warnings
from moe_jax.product_of_t.pool import moment_gaps, pool_draws
from moe_jax.product_of_t.simulate import banana
from moe_jax.product_of_t.targets import LogDensity
from moe_jax.product_of_t.warmup import Candidates, Proposal, draw_candidates, tempered_weights

NUM_Q, NUM_BROAD = 8000, 4000


def draws_of_q_and_broad():
    """A target N(0, 1) in one coordinate, q uniform on (-1.5, 1.5), t_4 of scale 1.5 as r."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.uniform(-1.5, 1.5, NUM_Q), 1.5 * rng.standard_t(4, NUM_BROAD)])
    log_q = np.where(np.abs(values) < 1.5, -np.log(3.0), -800.0)
    return values[:, None], stats.norm.logpdf(values) - 7.0, log_q


def test_pool_sees_the_tails_that_q_cuts_off():
    values, log_density, log_q = draws_of_q_and_broad()
    proposal = Proposal(np.zeros((1, 1)), np.full((1, 1, 1), 1.5), np.ones(1))
    log_r = proposal.log_prob(values)
    np.testing.assert_allclose(log_r, stats.t.logpdf(values[:, 0], 4, scale=1.5), rtol=1e-12)
    pool = pool_draws(values, log_density, log_q, log_r, NUM_Q)
    # Five standard errors at an effective sample size above 4,000: one false alarm in 10^6.
    assert pool.ess > 4000 and pool.pareto_k < 0.5
    assert abs(pool.mean[0]) < 5 * pool.mean_error[0] < 6 / np.sqrt(pool.ess)
    error = pool.standard_deviation_error[0]
    assert abs(pool.standard_deviation[0] - 1.0) < 5 * error < 6 / np.sqrt(pool.ess)
    assert pool.log_evidence == pytest.approx(-7.0, abs=5 * 2 / np.sqrt(len(values)))

    blind = pool_draws(values[:NUM_Q], log_density[:NUM_Q], log_q[:NUM_Q], None, NUM_Q)
    # Its weights are all good, and its deviation is that of a normal cut off at 1.5, 0.74.
    assert blind.pareto_k < 0.5 and blind.standard_deviation[0] < 0.8
    mean_gap, deviation_gap = moment_gaps(values[:NUM_Q], pool)
    assert mean_gap < 0.1 and deviation_gap == pytest.approx(1 - 3 / np.sqrt(12), abs=0.03)


def test_points_without_a_density_have_no_weight():
    values, log_density, log_q = draws_of_q_and_broad()
    log_density[::2] = np.nan
    pool = pool_draws(values[:NUM_Q], log_density[:NUM_Q], log_q[:NUM_Q], None, NUM_Q)
    assert np.all(pool.log_weights[::2] == -np.inf) and np.isfinite(pool.standard_deviation[0])


@pytest.mark.parametrize(
    "gaps, is_trusted",
    [((0.09, 0.09), True), ((0.12, 0.0), False), ((0.0, 0.12), False), ((np.nan, 0.0), False)],
)
def test_moments_that_disagree_with_the_pools_are_not_trusted(gaps, is_trusted):
    found = trust_warnings(
        pareto_k=0.3, pool_pareto_k=0.3, ess=900.0, num_draws=1000, degrees_of_freedom=9.0,
        normalizer_error=0.01,
        mean_gap=gaps[0], deviation_gap=gaps[1], num_nonfinite=0, num_runaway=0,
    )  # fmt: skip
    assert (found == ()) == is_trusted
    assert is_trusted or "take result.pool's" in found[0]


def test_candidates_reach_the_ends_of_a_banana():
    """From a Gaussian at its mode, whose own draws give the ends weights of 50 and a deviation
    that is 18% short."""
    loc, scale = np.array([[0.0, -1.125]]), np.diag([1.5, 1.0])[None]
    with jax.enable_x64(True):
        target = LogDensity(banana(2).log_density)
        candidates = draw_candidates(jax.random.key(0), target, loc, scale, 4000)
    weights = np.exp(candidates.log_ratios)
    assert weights.max() < 20
    # Standard errors of 0.02 and, by the fourth moment of the second coordinate, 0.05.
    assert weights.mean() == pytest.approx(1.0, abs=0.1)
    mean = weights @ candidates.points / weights.sum()
    variance = weights @ (candidates.points - mean) ** 2 / weights.sum()
    np.testing.assert_allclose(np.sqrt(variance), [1.5, np.sqrt(1 + 0.5 * 1.5**4)], rtol=0.12)


@pytest.mark.parametrize("num_finite", [0, 3, 400])
def test_weights_are_numbers_however_few_candidates_the_target_is_finite_at(num_finite):
    values = np.random.default_rng(0).normal(size=(500, 1))
    log_density = np.where(np.arange(500) < num_finite, -(values[:, 0] ** 2), -np.inf)
    proposal = Proposal(np.zeros((1, 1)), np.ones((1, 1, 1)), np.ones(1))
    log_ratios = log_density - proposal.log_prob(values)
    power, weights = tempered_weights(Candidates(values, log_density, log_ratios, proposal))
    assert np.sum(weights > 0) == num_finite
    assert np.sum(weights) == pytest.approx(1.0 if num_finite else 0.0)
    # Three are worth no hundred at any power, and then all alike.
    assert power == pytest.approx(0.0, abs=1e-8) if num_finite < 100 else power > 0.3
