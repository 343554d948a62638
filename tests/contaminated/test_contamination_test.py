"""Tests of no contamination beside their closed cases; their size is in test_reports.py."""

import jax
import numpy as np
import pytest
from scipy import integrate, stats

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian, FrozenLogProb
from moe_jax.contaminated.contamination_test import (
    fixed_prompt_test,
    monte_carlo_p,
    pit_screen,
    score_test,
)
from moe_jax.contaminated.contamination_test import (
    test_no_contamination as no_contamination,
)
from tests.contaminated.small import MODEL, data

FROZEN = FrozenGaussian(lambda x: np.zeros(len(x)), 1.0)


def test_p_values_count_the_data_among_the_draws():
    assert monte_carlo_p(3.0, np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(3 / 5)


def test_a_known_prompt_has_half_a_chi_squared():
    # P(statistic > 2.7055) is 5 % in the limit; 2,000 data sets of 200 rows, standard error .5 %.
    y = np.random.default_rng(0).normal(size=(2000, 200))
    tests = [fixed_prompt_test(stats.norm.logpdf(v), stats.norm.logpdf(v, 1.5)) for v in y]
    rejected = np.mean([t.statistic > 2.7055 for t in tests])
    # Four standard errors and the limit's own error at 200 rows.
    assert 0.025 < rejected < 0.075
    assert 0.4 < np.mean([t.statistic == 0.0 for t in tests]) < 0.65
    assert tests[0].p_value <= 1.0


def test_a_known_prompts_statistic_is_the_maximum_over_its_share():
    y = np.r_[np.random.default_rng(1).normal(size=80), 6.0 + np.zeros(5)]
    logs = stats.norm.logpdf(y), stats.norm.logpdf(y, 6.0)
    shares = np.linspace(0.0, 1.0, 20_001)[1:-1, None]
    grid = np.logaddexp(np.log1p(-shares) + logs[0], np.log(shares) + logs[1]).sum(axis=1)
    found = fixed_prompt_test(*logs)
    assert found.statistic == pytest.approx(2 * (grid.max() - logs[0].sum()), rel=1e-6)
    assert found.p_value == pytest.approx(0.5 * stats.chi2.sf(found.statistic, 1))


def test_the_score_test_is_standard_normal_and_has_its_variance():
    x = np.zeros((1, 1))
    mean, nu = np.full(1, 0.7), 1.4

    def ratio(y):
        return stats.norm.pdf(y, 0.7, np.sqrt(1.4)) / stats.norm.pdf(y)

    second, _ = integrate.quad(lambda y: ratio(y) ** 2 * stats.norm.pdf(y), -30, 30)
    found = score_test(FROZEN, x, np.array([0.9]), mean=mean, nu=nu)
    assert found.statistic == pytest.approx((ratio(0.9) - 1) / np.sqrt(second - 1), rel=1e-9)
    assert found.p_value == pytest.approx(stats.norm.sf(found.statistic))
    with pytest.raises(ValueError, match=r"nu=2.0, expected a number in \(0, 2\)"):
        score_test(FROZEN, x, np.array([0.9]), mean=mean, nu=2.0)


def test_the_screen_rejects_a_wrong_scale_and_keeps_its_size():
    rng = np.random.default_rng(2)
    x, y = np.zeros((200, 1)), rng.normal(size=200)
    assert pit_screen(jax.random.key(0), FROZEN, x, 2 * y).p_value == pytest.approx(1 / 1000)
    found = [
        pit_screen(jax.random.key(k), FROZEN, x, rng.normal(size=200), n_draws=99).p_value
        for k in range(100)
    ]
    # Binomial(100, 0.05) exceeds 15 with probability 4e-5.
    assert np.sum(np.array(found) <= 0.05) <= 15
    bare = FrozenLogProb(FROZEN.log_prob)
    with pytest.raises(ValueError, match="no method cdf"):
        pit_screen(jax.random.key(0), bare, x, y)


def test_a_frozen_model_of_the_same_data_is_estimated_anew():
    x, y = data()
    # Two lines that 30 standard deviations part, which no draw from one line shows.
    y = np.where(y - x[:, 0] > 2.0, y + 30.0, y)
    seen = []

    def refit(x, y):
        seen.append(len(y))
        slope, intercept = np.polyfit(x[:, 0], y, 1)
        variance = float(np.var(y - slope * x[:, 0] - intercept))
        return FrozenGaussian(lambda x: slope * x[:, 0] + intercept, variance)

    model = ContaminatedMoE(refit(x, y))
    test = no_contamination(jax.random.key(0), model, x, y, n_boot=19, refit=refit)
    assert test.null_draws.shape == (19,) and len(seen) >= 20
    assert test.p_value == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"n_boot": 0}, "n_boot=0"), ({"starts": {"tau": 0.0}}, "starts are parameters")],
    ids=["n_boot", "starts"],
)
def test_options_that_spoil_the_test_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MODEL.test_no_contamination(*data(), key=jax.random.key(0), **options)
