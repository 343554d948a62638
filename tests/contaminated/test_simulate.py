import jax
import numpy as np
import pytest
from scipy import stats

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian, GaussianLinear, simulate
from moe_jax.contaminated.designs import DESIGNS, row_vectors

MODEL = ContaminatedMoE(FrozenGaussian(lambda x: 2.0 * x[:, 0], 0.5), expert=GaussianLinear())
PARAMS = {"beta": [1.5], "tau": -0.5, "eta": [-1.0], "intercept": 4.0, "log_nu": np.log(0.25)}


def test_draws_have_the_distribution_of_the_mixture():
    # At x = 0.4: w = sigmoid(0.1), f0 = N(0.8, 0.5), f = N(3.6, 0.25). False alarm rate 1e-6.
    x = np.full((20_000, 1), 0.4)
    y = simulate(jax.random.key(0), MODEL, PARAMS, x)
    w = 1 / (1 + np.exp(-0.1))

    def cdf(value):
        frozen = stats.norm.cdf(value, 0.8, np.sqrt(0.5))
        return (1 - w) * frozen + w * stats.norm.cdf(value, 3.6, 0.5)

    assert stats.kstest(y, cdf).pvalue > 1e-6


def test_gate_decides_by_row():
    # 80 standard deviations of logit apart: the sign of x decides.
    x = np.array([[-1.0], [1.0]]).repeat(50, axis=0)
    y = simulate(jax.random.key(1), MODEL, PARAMS | {"beta": [80.0], "tau": 0.0}, x)
    np.testing.assert_array_less(np.abs(y[:50] + 2.0), 5.0)
    np.testing.assert_array_less(np.abs(y[50:] - 3.0), 3.0)
    assert abs(y[:50].mean() + 2.0) < 0.6 and abs(y[50:].mean() - 3.0) < 0.5


def test_same_key_same_data():
    x = np.linspace(-1, 1, 30)[:, None]
    first, second, other = (simulate(jax.random.key(seed), MODEL, PARAMS, x) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert not np.any(first == other)


def test_paper_b2_as_printed_keeps_its_experts_apart():
    for size in (10**3, 10**5, 10**8):
        assert np.linalg.norm(DESIGNS["paper_b2"].truth(size)["eta"] - np.eye(8)[0]) == 2.0
        gap = DESIGNS["paper_b1"].truth(size)["eta"][0] - 1.0
        assert gap == pytest.approx(size ** (-1 / 8))


def test_rows_are_the_papers_coordinates_and_keep_leading_axes():
    params = {
        "beta": np.ones((5, 8)),
        "tau": np.full(5, 2.0),
        "eta": np.zeros((5, 8)),
        "log_nu": np.zeros(5),
    }
    rows = row_vectors(params)
    assert {name: row.shape for name, row in rows.items()} == {
        "beta": (5, 8),
        "exp_tau": (5, 1),
        "eta": (5, 8),
        "nu": (5, 1),
    }
    np.testing.assert_allclose(rows["exp_tau"], np.exp(2.0))
    np.testing.assert_allclose(rows["nu"], 1.0)


def test_covariates_are_standard_normal():
    # 80,000 numbers; false alarm rate 1e-6.
    x = DESIGNS["paper_a"].draw_x(jax.random.key(0), 10_000)
    assert x.shape == (10_000, 8) and x.dtype == np.float64
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-6
