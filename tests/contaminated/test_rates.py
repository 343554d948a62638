"""Rate studies: slopes and intervals of known errors, a small study, and what it keeps."""

import dataclasses

import jax
import numpy as np
import pytest
from matplotlib import pyplot as plt

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian, GaussianLinear, rates
from moe_jax.contaminated.compilation import padded_rows
from moe_jax.contaminated.designs import Design
from moe_jax.contaminated.plots import plot_rates
from moe_jax.contaminated.rates import (
    RateStudy,
    SizeFits,
    bootstrap_means,
    efficiency,
    fit_size,
    format_table,
    rate_study,
    slope_table,
    study_record,
)

KEY = jax.random.key(0)
TRUTH = {
    "beta": np.array([1.0]),
    "tau": np.asarray(0.0),
    "eta": np.array([-1.0]),
    "log_nu": np.asarray(0.0),
}
DESIGN = Design(
    "small",
    "a linear expert of the opposite slope",
    ContaminatedMoE(FrozenGaussian(lambda x: 4.0 * x[:, 0], 1.0), GaussianLinear(intercept=False)),
    lambda n: TRUTH,
    dim=1,
    theory={"beta": -0.5},
)


def made_up_study(slope=-0.5, replicates=400):
    """Errors |N(0, 1)| n^slope, and a bound of the same slope."""
    sizes = (100, 316, 1000, 3162, 10_000)
    scale = np.array(sizes, float)[:, None] ** slope
    draws = np.abs(np.random.default_rng(0).normal(size=(5, replicates, 2)))
    return RateStudy(
        design="made up",
        title="errors of known slope",
        rows=("beta", "nu"),
        sizes=sizes,
        errors=draws * scale[:, None],
        statuses=({"ok": replicates},) * 5,
        bound=np.tile(scale, 2),
        bound_mean=np.tile(scale * np.sqrt(2 / np.pi), 2),
        theory={"beta": -0.25, "nu": -0.5},
        paper={"beta": -0.23},
        seconds=(1.0,) * 5,
    )


def test_bootstrap_of_the_mean_has_its_standard_error():
    errors = np.random.default_rng(1).normal(5.0, 1.0, size=(2, 100, 1))
    draws = bootstrap_means(errors, 4000)
    expected = errors.std(axis=1) / 10
    # 4,000 draws give the standard error to 1.1%; 6% is more than 5 standard errors.
    np.testing.assert_allclose(draws.std(axis=1), expected, rtol=0.06)
    np.testing.assert_allclose(draws.mean(axis=1), errors.mean(axis=1), rtol=2e-3)


def test_intervals_of_known_errors_hold_the_slope():
    study = made_up_study()
    table = slope_table(study)
    for row in study.rows:
        # Standard error 0.0104: sd/mean of |N| is .756, over 20 and over log(10) sqrt(2.5).
        assert table.ours[row].slope == pytest.approx(-0.5, abs=5 * 0.0104)
        assert table.ours[row].se == pytest.approx(0.0104, rel=0.2)
        assert table.ours[row].low < table.ours[row].slope < table.ours[row].high
        assert table.bound[row] == pytest.approx(-0.5)
    # Mean square of |N| is 1; 5 standard errors of a root mean square of 400 are 0.18.
    np.testing.assert_allclose(efficiency(study), 1.0, atol=0.18)


def test_table_and_record_show_a_dash_for_what_nobody_claims():
    study = made_up_study()
    table = slope_table(study)
    text = format_table(study, table)
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["nu"]]
    assert line.split()[1:3] == ["-0.500", "-"]
    record = study_record(study, table)
    assert record["slopes"]["nu"]["paper"] is None
    assert record["slopes"]["beta"]["ours_slope"] == table.ours["beta"].slope


@pytest.mark.parametrize("size", [50, 63, 64, 1000, 1025, 100_000, 2**20])
def test_padding_is_at_most_a_quarter(size):
    assert size <= padded_rows(size) < 1.25 * size


def test_sizes_of_an_octave_share_four_shapes():
    assert len({padded_rows(size) for size in range(1025, 2049)}) == 4


@pytest.fixture(scope="module")
def study():
    # Padded to 128 and to 640 rows: two compiled shapes. One covariate needs few points.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "BOUND_LOG2_POINTS", 7)
        return rate_study(KEY, DESIGN, (120, 124, 128, 600, 640), 24)


def test_separated_experts_are_estimated_at_the_bound(study):
    assert study.errors.shape == (5, 24, 4)
    # 24 replicates: a ratio of 1 with standard error 0.14; five of them, and 8 ratios.
    assert np.all((efficiency(study)[3:] > 0.4) & (efficiency(study)[3:] < 1.8))
    for row, slope in slope_table(study).ours.items():
        # Standard error of a slope about 0.07.
        assert slope.slope == pytest.approx(-0.5, abs=0.35), row
    assert all(statuses == {"ok": 24} for statuses in study.statuses)


def test_a_study_goes_on_where_it_stopped(study):
    # 130 padded rows of capacity hold one data set, so that a chunk is one fit.
    steps = list(fit_size(KEY, DESIGN, 120, 3, chunk_rows=130))
    assert [step.count for step in steps] == [1, 2, 3]
    resumed = SizeFits.from_json(steps[0].to_json())
    *_, last = fit_size(KEY, DESIGN, 120, 3, chunk_rows=130, done=resumed)
    assert last.errors == steps[-1].errors and last.statuses == steps[-1].statuses
    np.testing.assert_allclose(last.errors, study.errors[0, :3], rtol=1e-5)
    assert list(fit_size(KEY, DESIGN, 120, 3, done=last)) == []


def test_first_fits_are_those_of_a_smaller_study():
    fits = SizeFits(100, ((1.0,), (2.0,), (3.0,)), ("ok", "ok", "max_iter"), 1.5)
    assert fits.first(2) == dataclasses.replace(
        fits, errors=((1.0,), (2.0,)), statuses=("ok", "ok")
    )


def test_padding_changes_no_estimate():
    # 128 rows need none, and 120 are padded to 128: the same data in both cases but for the mask.
    x = DESIGN.draw_x(jax.random.key(3), 128)
    y = DESIGN.model.sample(jax.random.key(4), TRUTH, x)
    mask = np.arange(128)[None] < 120
    padded = DESIGN.model.fit_many(x[None], y[None], mask=mask, starts=TRUTH)
    plain = DESIGN.model.fit_many(x[None, :120], y[None, :120], starts=TRUTH)
    np.testing.assert_allclose(padded.theta, plain.theta, rtol=1e-6, atol=1e-8)


def test_stored_fits_are_checked():
    with pytest.raises(ValueError, match="damaged"):
        SizeFits.from_json('{"size": 5}')
    with pytest.raises(ValueError, match="of 5 observations, not 120"):
        next(fit_size(KEY, DESIGN, 120, 2, done=SizeFits(5)))


def test_sizes_and_replicates_are_checked():
    with pytest.raises(ValueError, match="ascending"):
        rate_study(KEY, DESIGN, (400, 120, 500, 600, 700), 4)
    with pytest.raises(ValueError, match="5 or more"):
        rate_study(KEY, DESIGN, (120, 400), 4)
    with pytest.raises(ValueError, match="replicates=1"):
        rate_study(KEY, DESIGN, (120, 400, 500, 600, 700), 1)


def test_figure_shows_every_slope(tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    study = made_up_study()
    plot_rates(study, slope_table(study), tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    beta, nu = plt.gcf().axes
    labels = [text.get_text() for text in beta.get_legend().get_texts()]
    assert labels[0] == "Cramér–Rao -0.500" and labels[1].startswith("ours -0.")
    assert labels[2:] == ["theory -0.25", "paper -0.23"]
    assert "[" in labels[1]
    assert [text.get_text() for text in nu.get_legend().get_texts()][2:] == ["theory -0.5"]
    assert beta.get_xscale() == beta.get_yscale() == "log"
    plt.close("all")
    monkeypatch.undo()
    plt.close("all")


def test_a_model_studies_itself_under_a_design(study, monkeypatch):
    monkeypatch.setattr(rates, "BOUND_LOG2_POINTS", 5)
    # Its variance is held where the design's own model estimates it.
    model = dataclasses.replace(DESIGN.model, fixed={"log_nu": 0.0})
    other = model.rate_study(DESIGN, study.sizes, 2, KEY)
    assert np.all(other.errors[..., 3] == 0.0) and other.design == "small"
    same = DESIGN.model.rate_study(DESIGN, study.sizes, 2, KEY)
    np.testing.assert_allclose(same.errors, study.errors[:, :2], rtol=1e-5)
    with pytest.raises(ValueError, match="design='paper_c' is not one of paper_a"):
        model.rate_study("paper_c", study.sizes, 2, KEY)
