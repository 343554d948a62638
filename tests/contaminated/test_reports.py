"""What users of other mixture software report, as tests of ours; one prompt, starts and data.

The number in a comment is that of the report in the table of the family's specification. 9 and 16,
of two prompts, are in test_fit.py, the bootstrap of 15 in test_inference.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import optimize, special

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian
from moe_jax.contaminated.status import STATUSES
from tests.contaminated.small import MODEL, PARAMS, ROWS, centred, data, fit_padded, fitted

RNG = np.random.default_rng(11)


def is_sound(result):
    """Whether the fit has a status, finite parameters and the log-likelihood that they have."""
    present = result.weight > 0
    again = np.sum(result.log_prob(result.x[present], result.y[present]))
    return (
        result.status in STATUSES
        and np.all(np.isfinite(result.theta))
        and np.isclose(result.loglik, again, rtol=1e-9)
    )


# 1: mixtools#7, unseeded runs land on a wrong optimum one time in five.
def test_every_key_finds_the_same_optimum():
    y = np.concatenate([RNG.normal(size=18), RNG.normal(5.0, 1.0, 38), 8 + RNG.exponential(4.0, 8)])
    x = RNG.normal(size=(ROWS, 1))
    found = centred().fit_many(
        x, np.tile(y, (50, 1)), key=jax.random.key(0), starts="tail+random", n_starts=5
    )
    assert np.ptp(found.loglik) < 0.01
    # Nor do the random starts, 50 in all, find anything better than the tail starts alone.
    single = fit_padded(centred(), x, y)
    assert single.loglik > found.loglik.max() - 0.01


GIVEN = [
    # 2: mixtools#8, an expert that starts on two identical points ends in an error.
    {"beta": [0.0], "tau": -3.0, "eta": [0.0], "intercept": 2.0, "log_nu": -30.0},
    # 10: ExpectationMaximization.jl#11, a start far away with sd 1e-3 gives NaN.
    {"beta": [0.0], "tau": 0.0, "eta": [0.0], "intercept": 100.0, "log_nu": 2 * np.log(1e-3)},
    {"beta": [0.0], "tau": 0.0, "eta": [0.0], "intercept": 200.0, "log_nu": 2 * np.log(1e-3)},
]


@pytest.mark.parametrize("start", GIVEN, ids=["two identical points", "at 100", "at 200"])
def test_a_hopeless_start_ends_with_a_status(start):
    y = RNG.normal(size=40)
    y[:2] = 2.0
    result = fit_padded(centred(), RNG.normal(size=40), y, starts=start)
    assert is_sound(result)
    if result.status == "ok":
        assert np.all(np.isfinite(result.cov()))


# 3: mixtools#6, singular matrix where few points reach an expert.
def test_an_expert_that_too_few_points_reach_is_empty():
    x = np.linspace(-1.0, 1.0, 20)
    y = 0.1 * RNG.normal(size=20)
    y[[4, 13]] = 8.0, 8.3
    result = fit_padded(centred(var=0.01), x, y)
    assert result.status == "empty_expert" and is_sound(result)
    assert "effective points reach an expert of 2 location parameters" in result.message


# 4: mixtools#3, mixing weights cannot be fixed.
def test_fixed_parameters_stay_bit_for_bit():
    tau = -0.1234567890123456789
    model = dataclasses.replace(MODEL, fixed={"tau": tau})
    result = model.fit(*data())
    assert result.params["tau"] == tau
    assert result.standard_errors()[result.names.index("tau")] == 0.0
    assert result.loglik < fitted().loglik


# 5: pomegranate#800, NaN on tied data; 8: mmdetection#4152, 2 to 9 scalars, some equal.
@pytest.mark.parametrize(
    "y",
    [
        np.round(np.random.default_rng(0).normal(size=30) * 2) / 2,
        [1.0, 1.0],
        [0.0, 2.0, 2.0],
        [0.5, 0.5, 3.0, 3.0, 3.1],
        [0.0, 0.1, 0.1, 0.1, 7.0, 7.0, 7.0, 7.1, 7.1],
        [3.0] * 20,
    ],
    ids=["30 with ties", "2 equal", "3", "5", "9", "20 equal"],
)
def test_ties_and_tiny_samples_give_numbers(y):
    result = fit_padded(centred(), np.linspace(-1.0, 1.0, len(y)), y)
    assert is_sound(result)
    assert not np.any(np.isnan(result.responsibilities()))


# 6: scikit-learn#23032, weights of float32 data do not sum to one and sampling fails.
def test_float32_data_give_probabilities_and_draws():
    x = RNG.normal(size=30).astype(np.float32)
    y = np.where(np.arange(30) % 2 == 0, x, 4.0 - x).astype(np.float32)
    result = fit_padded(MODEL, x, y + 0.3 * RNG.normal(size=30).astype(np.float32))
    assert is_sound(result)
    w = result.gate(x[:, None])
    assert w.dtype == np.float64 and np.all((w >= 0) & (w <= 1))
    assert np.all(np.isfinite(result.sample(jax.random.key(0), x[:, None])))


# 7: scikit-learn#12056, covariance of one-hot features.
@pytest.mark.parametrize("kind", ["constant", "duplicate"])
def test_a_useless_column_is_reported_and_changes_no_prediction(kind):
    x, y = data()
    extra = np.full_like(x, 3.0) if kind == "constant" else x
    result = MODEL.fit(np.concatenate([x, extra], axis=1), y)
    assert result.status == "flat_information" and is_sound(result)
    assert np.all(np.isnan(result.cov()))
    np.testing.assert_allclose(result.loglik, fitted().loglik, rtol=1e-7)
    np.testing.assert_allclose(result.gate(), fitted().gate(), atol=1e-4)


# 11: seqHMM#56, coefficients of a separable gate are not finite.
def test_a_separating_gate_is_reported_and_a_prior_makes_it_finite():
    x, noise = np.random.default_rng(11).normal(size=(2, 40))
    y = np.where(x > 0, 9.0, x) + noise
    result = fit_padded(MODEL, x, y)
    assert result.status == "gate_separated" and is_sound(result)
    assert "gate_prior_scale" in result.message
    # Of two values of x the expert's line explains both: then no rows need be frozen at all.
    two = fit_padded(MODEL, np.sign(x), np.where(x > 0, 9.0, np.sign(x)) + noise)
    assert two.status in ("gate_separated", "all_contamination") and is_sound(two)
    held = fit_padded(dataclasses.replace(MODEL, gate_prior_scale=5.0), x, y)
    assert not held.flags["gate_separated"] and held.converged
    assert abs(held.params["beta"][0]) < 15


# 12: Luminescence#69 and #470, the root of a negative variance.
def test_three_observations_give_no_standard_error_and_say_why():
    result = fit_padded(centred(), [0.0, 1.0, 2.0], [0.1, -0.2, 6.0])
    assert result.status != "ok" and result.message and is_sound(result)
    with np.errstate(invalid="raise"):
        errors = result.standard_errors()
    assert np.all(np.isnan(errors) | (errors >= 0))


# 13: scikit-learn#4178, convergence depends on the number of rows.
def test_repeated_data_give_the_same_estimates_in_the_same_iterations():
    x, y = (a[:16] for a in data())
    once = fit_padded(MODEL, x, y)
    four_times = fit_padded(MODEL, np.tile(x, (4, 1)), np.tile(y, 4))
    weighted = fit_padded(MODEL, x, y, sample_weight=np.full(ROWS, 10.0))
    for other, factor in ((four_times, 4.0), (weighted, 10.0)):
        assert other.iterations == once.iterations
        np.testing.assert_allclose(other.theta, once.theta, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(other.loglik, factor * once.loglik, rtol=1e-10)


# 14: scikit-learn#10869, the reported bound is not the best start's.
def test_the_reported_likelihood_is_the_best_starts_at_the_estimates():
    result = fitted()
    assert is_sound(result)
    np.testing.assert_allclose(
        result.loglik, max(row["loglik"] for row in result.starts_table), rtol=1e-12
    )
    assert result.trace[-1] == pytest.approx(result.loglik, rel=1e-12)
    assert 1 <= result.n_agree <= len(result.starts_table)


# 15: stepmix#61, the order of rows changes results; #11, a class without spread.
def test_the_order_of_rows_does_not_matter():
    x, y = data()
    order = np.random.default_rng(3).permutation(ROWS)
    shuffled = MODEL.fit(x[order], y[order])
    np.testing.assert_allclose(shuffled.theta, fitted().theta, rtol=1e-8, atol=1e-8)


def test_a_cluster_without_spread_stops_at_the_variance_floor():
    y = np.where(np.arange(40) % 2 == 0, RNG.normal(size=40), 6.0)
    result = fit_padded(centred(), RNG.normal(size=40), y)
    assert result.status == "variance_floor" and is_sound(result)
    # The floor is a hundredth of the smaller of the frozen variance, 1, and that of y.
    np.testing.assert_allclose(np.exp(result.params["log_nu"]), 0.01, rtol=1e-6)


# 17: mixle#114, a seed that does not fix the fit.
def test_the_same_key_gives_the_same_bits():
    options = {"key": jax.random.key(4), "starts": "tail+random", "n_starts": 5}
    x, y = data()
    first, second = (centred().fit_many(x, np.tile(y, (50, 1)), **options) for _ in range(2))
    np.testing.assert_array_equal(first.theta, second.theta)
    np.testing.assert_array_equal(fitted().theta, MODEL.fit(*data()).theta)


# 18: nlmixr2est#1058, mixing proportions that disagree with responsibilities.
def test_gate_and_responsibilities_agree_in_the_mean():
    result = fitted()
    assert abs(np.mean(result.responsibilities()) - np.mean(result.gate())) < 1e-8


# 19: statsmodels#5380, underflow of scaled data.
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_units_of_y_do_not_matter(scale):
    x, y = data()
    model = ContaminatedMoE(FrozenGaussian(lambda x: scale * x[:, 0], scale**2))
    result = model.fit(x, scale * y)
    assert result.status == "ok" and result.iterations == fitted().iterations
    np.testing.assert_allclose(
        result.loglik, fitted().loglik - ROWS * np.log(scale), rtol=1e-8, atol=1e-6
    )
    for name, factor in (("beta", 1.0), ("eta", scale), ("intercept", scale)):
        np.testing.assert_allclose(
            result.params[name], factor * fitted().params[name], rtol=1e-6, atol=1e-7 * factor
        )


# 20: lcmm#20, Luminescence#703, statsmodels#2055, ratio tests at a boundary that are wrong.
def test_the_test_of_no_contamination_has_its_size():
    # p <= 1/20 where the data beat 19 draws: Binomial(40, 0.05) exceeds 9 with probability 2e-5.
    model, rejected = centred(), 0
    for index in range(40):
        rng = np.random.default_rng(1000 + index)
        x, y = rng.normal(size=(48, 1)), rng.normal(size=48)
        test = model.test_no_contamination(x, y, key=jax.random.key(index), n_boot=19)
        assert test.statistic >= 0 and test.null_draws.shape == (19,)
        rejected += test.p_value <= 0.05
    assert rejected <= 9
    contaminated = np.where(np.arange(48) % 4 == 0, y + 4.0, y)
    assert model.test_no_contamination(x, contaminated, key=jax.random.key(0), n_boot=19)[1] == 0.05


# 21: pymc#1376, #3069, estimates far from the truth of well separated components.
def test_separated_components_give_the_estimates_of_labelled_data():
    rng = np.random.default_rng(5)
    x, z = rng.normal(size=(ROWS, 1)), rng.normal(size=ROWS)
    label = rng.uniform(size=ROWS) < special.expit(PARAMS["beta"][0] * x[:, 0])
    y = np.where(label, 60.0 - x[:, 0] + 0.5 * z, x[:, 0] + z)
    result = MODEL.fit(x, y)
    assert result.status == "ok" and result.n_agree >= 1
    design = np.column_stack([x, np.ones(ROWS)])
    line, *_ = np.linalg.lstsq(design[label], y[label], rcond=None)
    np.testing.assert_allclose(
        [result.params["eta"][0], result.params["intercept"]], line, rtol=1e-7
    )
    np.testing.assert_allclose(
        np.exp(result.params["log_nu"]), np.mean((y[label] - design[label] @ line) ** 2), rtol=1e-7
    )

    def loss(gamma):
        return np.sum(np.logaddexp(0.0, np.where(label, -1.0, 1.0) * (design @ gamma)))

    gate = optimize.minimize(loss, np.zeros(2), tol=1e-12).x
    np.testing.assert_allclose([result.params["beta"][0], result.params["tau"]], gate, atol=1e-5)
