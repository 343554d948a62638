"""Rates against exact power laws, an independent regression, and their stated error rates."""

import numpy as np
import pytest
from scipy import stats

from moe_jax.training.rates import equivalent, fit_floor, fit_rate, local_slopes

WIDTHS = np.array([4.0, 8.0, 16.0, 32.0, 64.0, 128.0])


def noisy(rng, slope, scale, shape=(6,)):
    return 3.0 * WIDTHS**slope * np.exp(scale * rng.normal(size=shape))


def test_a_power_law_gives_its_exponent_and_no_uncertainty():
    fit = fit_rate(WIDTHS, 3.0 * WIDTHS**-2.0)
    assert fit.slope == pytest.approx(-2) and np.exp(fit.intercept) == pytest.approx(3)
    assert fit.half_width < 1e-10 and fit.num_widths == 6
    np.testing.assert_allclose(fit.local_slopes, -2)
    assert fit.bootstrap_interval is None


def test_slope_and_interval_are_those_of_scipy():
    errors = noisy(np.random.default_rng(0), -1.0, 0.3)
    fit = fit_rate(WIDTHS, errors)
    known = stats.linregress(np.log(WIDTHS), np.log(errors))
    assert fit.slope == pytest.approx(known.slope)
    assert fit.intercept == pytest.approx(known.intercept)
    assert fit.standard_error == pytest.approx(known.stderr)
    # 2.776: two-sided 95% quantile of Student's t with 6 - 2 degrees of freedom.
    assert fit.half_width == pytest.approx(2.776445 * known.stderr, rel=1e-6)


def test_the_interval_covers_as_often_as_it_says():
    """1000 fits; the count of covering ones leaves the band by chance once in 1000 times."""
    rng = np.random.default_rng(1)
    intervals = [fit_rate(WIDTHS, noisy(rng, -1.0, 0.3)).interval for _ in range(1000)]
    covered = sum(low <= -1.0 <= high for low, high in intervals)
    low, high = stats.binom.ppf([0.0005, 0.9995], 1000, 0.95)
    assert low <= covered <= high


def test_seeds_are_averaged_in_logarithms_and_resampled():
    errors = noisy(np.random.default_rng(2), -1.0, 0.3, (12, len(WIDTHS)))
    fit = fit_rate(WIDTHS, errors, num_bootstrap=4000)
    assert fit.slope == pytest.approx(fit_rate(WIDTHS, np.exp(np.log(errors).mean(axis=0))).slope)
    # The slope is linear in log error, so the bootstrap's spread is that of a mean of 12 slopes;
    # a percentile of 4000 draws is within a few parts in a hundred of the normal one.
    slopes = [fit_rate(WIDTHS, each).slope for each in errors]
    low, high = fit.bootstrap_interval
    assert (high - low) / 2 == pytest.approx(1.96 * np.std(slopes) / np.sqrt(12), rel=0.1)
    same = fit_rate(WIDTHS, np.tile(errors[:1], (5, 1))).bootstrap_interval
    assert same[0] == pytest.approx(same[1])


def test_local_slopes_show_where_a_floor_sets_in():
    # 1, 1/2, 1/4, 1/4: slopes -1, -1, 0.
    slopes = local_slopes(np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 0.5, 0.25, 0.25]))
    np.testing.assert_allclose(slopes, [-1, -1, 0], atol=1e-15)


def test_equivalence_needs_precision_and_not_just_agreement():
    exact = fit_rate(WIDTHS, WIDTHS**-1.02)
    assert equivalent(exact, -1.0, 0.05) and not equivalent(exact, -1.0, 0.01)
    wide = fit_rate(WIDTHS, noisy(np.random.default_rng(3), -1.0, 1.5))
    assert wide.interval[0] <= -1.0 <= wide.interval[1]
    assert not equivalent(wide, -1.0, 0.1)


def test_equivalence_is_rarely_claimed_of_a_slope_at_the_margin():
    """Level 5%: 1000 fits at the margin; more than 73 claims come by chance once in 1000 times."""
    rng = np.random.default_rng(4)
    claims = sum(
        equivalent(fit_rate(WIDTHS, noisy(rng, -0.9, 0.05)), -1.0, 0.1) for _ in range(1000)
    )
    assert 0 < claims <= stats.binom.ppf(0.999, 1000, 0.05)


def test_a_floor_is_found():
    fit = fit_floor(WIDTHS, 0.01 + 2.0 * WIDTHS**-1.5)
    assert fit.floor == pytest.approx(0.01, rel=1e-2)
    assert fit.rate == pytest.approx(1.5, rel=1e-2) and fit.scale == pytest.approx(2, rel=1e-2)


def test_the_interval_of_the_floor_covers_it():
    """20 fits of a 95% interval: fewer than 15 that cover come by chance once in 1000 times."""
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(20):
        noise = np.exp(0.05 * rng.normal(size=(8, len(WIDTHS))))
        fit = fit_floor(WIDTHS, (0.01 + 2.0 * WIDTHS**-1.5) * noise)
        covered += fit.floor_interval[0] <= 0.01 <= fit.floor_interval[1]
        assert 0 < fit.floor_interval[0] < fit.floor < fit.floor_interval[1]
    assert covered >= stats.binom.ppf(0.001, 20, 0.95)


def test_a_power_law_needs_no_floor():
    rng = np.random.default_rng(6)
    fit = fit_floor(WIDTHS, noisy(rng, -1.0, 0.05, (8, len(WIDTHS))))
    assert fit.floor_interval[0] == 0
    assert fit.rate == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("fit", [fit_rate, fit_floor])
@pytest.mark.parametrize(
    ("widths", "errors", "message"),
    [
        (WIDTHS[:4], WIDTHS[:4], "4 different sizes; a rate needs at least 5"),
        (np.array([1.0, 2.0, 2.0, 3.0, 4.0]), np.ones(5), "4 different sizes"),
        (WIDTHS, WIDTHS[:5], r"widths \(6,\) and errors \(1, 5\) disagree"),
        (WIDTHS - 4.0, WIDTHS, "must be positive"),
        (WIDTHS, WIDTHS - 4.0, "errors hold 0.0; a rate needs positive, finite errors"),
        (WIDTHS, -WIDTHS, "errors hold -4.0"),
        (WIDTHS, np.where(WIDTHS == 8, np.nan, 1.0), "errors hold nan"),
        (WIDTHS, np.where(WIDTHS == 8, np.inf, 1.0), "errors hold inf"),
    ],
)
def test_what_gives_no_rate_is_refused_in_one_line(fit, widths, errors, message):
    with pytest.raises(ValueError, match=message) as refused:
        fit(widths, errors)
    assert "\n" not in str(refused.value)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="confidence=1.0 is not in"):
        fit_rate(WIDTHS, WIDTHS, confidence=1.0)
    with pytest.raises(ValueError, match="margin=0.0 must be positive"):
        equivalent(fit_rate(WIDTHS, WIDTHS), 1.0, 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_rate(np.append(WIDTHS[1:], np.inf), WIDTHS), "must be positive and finite"),
        (lambda: fit_rate(WIDTHS, np.ones((0, 6))), "errors (0, 6) hold no seed"),
        (lambda: fit_rate(WIDTHS, np.ones((2, 6)), num_bootstrap=0), "num_bootstrap=0 must be"),
        (lambda: fit_floor(WIDTHS, 1 / WIDTHS, confidence=2.0), "confidence=2.0 is not in (0, 1)"),
        (lambda: fit_floor(WIDTHS, 0.3 + 0 * WIDTHS), "errors are 0.3 at every width"),
        (lambda: local_slopes(WIDTHS, 0 * WIDTHS), "errors hold 0.0"),
        (lambda: equivalent(fit_rate(WIDTHS, 1 / WIDTHS), np.nan, 0.1), "theory=nan"),
        (lambda: equivalent(fit_rate(WIDTHS, 1 / WIDTHS), -1.0, 0.1, level=1.0), "level=1.0"),
    ],
)
def test_what_would_give_a_rate_of_nan_is_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
