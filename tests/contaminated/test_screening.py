"""Large data: starts are followed on a sample, and what that can lose is not lost."""

import jax
import numpy as np
import pytest

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian
from moe_jax.contaminated.problem import Ends
from moe_jax.contaminated.screening import _first_alike, sample_size
from tests.contaminated.small import MODEL, PARAMS

ROWS = 33_000


@pytest.fixture(scope="module")
def large():
    x = np.random.default_rng(2).normal(size=(ROWS, 1))
    return x, MODEL.sample(jax.random.key(2), PARAMS, x)


def test_screened_starts_reach_the_optimum_of_all_rows(large):
    x, y = large
    # Rows that do not count are no part of the sample either.
    y = np.where(np.arange(ROWS) < 100, np.nan, y)
    mask = np.arange(ROWS) >= 100
    result = MODEL.fit(x, y, mask=mask)
    assert result.status == "ok" and result.n_agree == len(result.starts_table) == 4
    assert [row["same_as"] for row in result.starts_table] == [0, 0, 0, 0]
    assert all(row["sample_iterations"] > 0 and row["converged"] for row in result.starts_table)
    # Parameters given are never screened.
    plain = MODEL.fit(x, y, mask=mask, starts=PARAMS)
    assert "same_as" not in plain.starts_table[0]
    np.testing.assert_allclose(result.loglik, plain.loglik, rtol=1e-12)
    np.testing.assert_allclose(result.theta, plain.theta, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result.cov(), plain.cov(), rtol=1e-5, atol=1e-9)


def test_a_contamination_too_rare_for_the_sample_is_found():
    # 60 of 33,000 rows, some 15 of the sample: fewer than 10 for each of 5 parameters.
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 1))
    is_rare = np.arange(ROWS) % 550 == 7
    y = np.where(is_rare, 9.0 + 0.3 * rng.normal(size=ROWS), x[:, 0] + rng.normal(size=ROWS))
    model = ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], 1.0))
    result = model.fit(x, y)
    assert result.status == "ok", result.message
    found = result.responsibilities() > 0.5
    assert found[is_rare].all() and found.sum() == is_rare.sum()


def ends(theta, value, converged=True):
    theta = np.array(theta, float)[:, None]
    count = len(theta)
    return Ends(
        theta,
        theta,
        np.array(value, float),
        np.full(count, 100.0),
        np.ones(count, int),
        np.broadcast_to(converged, count),
    )


def test_only_equal_ends_are_followed_together():
    none = np.zeros(4, bool)
    same = _first_alike(ends([1.0, 2.0, 1.0, 2.0], [0.0, 0.0, 1e-9, 1e-9]), none)
    np.testing.assert_array_equal(same, [0, 1, 0, 1])
    other_value = _first_alike(ends([1.0] * 4, [0.0, 1.0, 2.0, 3.0]), none)
    np.testing.assert_array_equal(other_value, range(4))
    unfinished = _first_alike(ends([1.0] * 4, [0.0] * 4, [True, False, True, True]), none)
    np.testing.assert_array_equal(unfinished, [0, 1, 0, 0])
    returned = _first_alike(ends([1.0] * 4, [0.0] * 4), np.array([True, False, True, False]))
    np.testing.assert_array_equal(returned, [0, 1, 2, 1])


def test_the_sample_is_an_eighth_or_more():
    assert sample_size(1000) == 8192
    for n in (65_536, 100_000, 10**6, 10**7):
        assert n / 16 < sample_size(n) <= max(n / 8, 8192)
