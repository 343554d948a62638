"""What cannot be fitted is refused in one line that names the argument; the rest is accepted."""

import dataclasses

import jax
import jaxtyping
import numpy as np
import pytest

from moe_jax.contaminated import (
    ContaminatedMoE,
    FrozenClassifier,
    FrozenGaussian,
    FrozenLogProb,
    FrozenStudentT,
    Multinomial,
    calibrate_variance,
)
from moe_jax.contaminated.fit import make_plan
from moe_jax.contaminated.layout import fixed_vector
from tests.contaminated.small import MODEL, data, fit_padded, fitted

X, Y = data()
CLASSES = ContaminatedMoE(FrozenClassifier(lambda x: np.zeros((len(x), 3))), Multinomial(3))


def refusal(function):
    """The one-line message of the ValueError."""
    with pytest.raises(ValueError) as caught:
        function()
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_log_prob(value):
    """MODEL with a frozen log-density that is `value` at rows 3 and 7."""

    def log_prob(x, y):
        values = np.array(MODEL.frozen.log_prob(x, y))
        values[[3, 7]] = value
        return values

    return ContaminatedMoE(FrozenLogProb(log_prob))


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, r"+inf")])
def test_a_frozen_density_that_is_no_number_is_named_with_its_rows(value, name):
    message = refusal(lambda: with_log_prob(value).fit(X, Y))
    assert message == f"the frozen log-density is {name} at rows 3, 7"


def test_a_frozen_density_of_zero_is_accepted():
    result = with_log_prob(-np.inf).fit(X, Y)
    np.testing.assert_array_equal(result.responsibilities()[[3, 7]], 1.0)
    assert np.isfinite(result.loglik)


def test_one_bad_data_set_does_not_stop_the_others():
    calls = []

    def log_prob(x, y):
        calls.append(len(y))
        return np.where(np.isfinite(y) & (y < 1e3), MODEL.frozen.log_prob(x, y), np.nan)

    model = ContaminatedMoE(FrozenLogProb(log_prob))
    bad = np.where(np.arange(len(Y)) == 5, 1e4, Y)
    ys, mask = np.stack([Y, bad, Y]), np.ones((3, len(Y)), bool)
    many = model.fit_many(np.tile(X, (3, 1, 1)), ys, mask=mask)
    assert many.status == ("ok", "nonfinite_frozen", "ok") and calls
    np.testing.assert_allclose(many.theta[0], fitted().theta, rtol=1e-6, atol=1e-8)
    assert np.all(np.isnan(many.theta[1])) and np.isnan(many.loglik[1])
    assert np.all(np.isnan(many.cov[1]))


NAN_AT_4 = np.where(np.arange(len(Y)) == 4, np.nan, Y)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, Y[:-1], "x has 64 rows and y has 63"),
        (X[:0], Y[:0], "no rows"),
        (X[:, 0], Y, r"x has shape (64,), expected [rows, covariates]"),
        (X, Y[:, None], r"y has shape (64, 1), expected [rows]"),
        (X, NAN_AT_4, "y is not finite at rows 4"),
        (np.where(np.isnan(NAN_AT_4)[:, None], np.inf, X), Y, "x is not finite at rows 4"),
    ],
    ids=["unequal", "empty", "x flat", "y wide", "y NaN", "x inf"],
)
def test_data_that_cannot_be_fitted_are_refused(x, y, message):
    assert message in refusal(lambda: MODEL.fit(x, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starts": "random"}, "starts='random', expected 'tail', 'tail+random' or parameters"),
        ({"starts": "tail+random"}, "key=None, but random starts need a jax.random.key"),
        ({"starts": []}, "starts=[], expected at least one set of parameters"),
        ({"starts": {"tau": 0.0}}, "params names ['tau'], expected"),
        ({"n_starts": 0}, "n_starts=0, expected at least 1"),
        ({"method": "bfgs"}, "method='bfgs', expected one of"),
        ({"max_iter": 0}, "max_iter=0 and em_steps=20, expected at least 1 and 0"),
        ({"sample_weight": -np.ones(64)}, "expected values in [0, inf)"),
        ({"sample_weight": np.zeros(64)}, "leave no row with a positive weight"),
        ({"mask": np.ones(63, bool)}, "mask has shape (63,), expected (64,)"),
        ({"mask": np.ones(64)}, "mask has dtype float64, expected bool"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_impossible_options_are_refused(options, message):
    assert message in refusal(lambda: MODEL.fit(X, Y, **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_prompts": 0}, "n_prompts=0, expected an integer of at least 1"),
        ({"nu_bounds": (2.0, 1.0)}, "nu_bounds=(2.0, 1.0), expected 0 < low < high"),
        ({"gate_prior_scale": -1.0}, "gate_prior_scale=-1.0, expected a positive number"),
        ({"frozen": object()}, "frozen=object has no method log_prob"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_impossible_models_are_refused(changes, message):
    assert message in refusal(lambda: dataclasses.replace(MODEL, **changes))


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"nu": 1.0}, "fixed names ['nu'], expected some of"),
        ({"beta": [1.0, 2.0]}, "fixed['beta'] has shape (2,), expected (1,)"),
    ],
    ids=["name", "shape"],
)
def test_impossible_fixed_parameters_are_refused(fixed, message):
    model = dataclasses.replace(MODEL, fixed=fixed)
    assert message in refusal(lambda: model.fit(X, Y))


def test_integers_are_responses_of_a_gaussian_expert():
    y = np.round(Y).astype(int)
    whole, real = fit_padded(MODEL, X, y), fit_padded(MODEL, X, y.astype(float))
    np.testing.assert_array_equal(whole.theta, real.theta)


@pytest.mark.parametrize("label", [-1, 3, 0.5])
def test_labels_out_of_range_are_refused_with_their_row(label):
    y = np.zeros(64)
    y[9] = label
    message = refusal(lambda: CLASSES.fit(X, y))
    assert message == f"y={label:g} at row 9: expected labels in 0..2"


def test_what_a_frozen_model_lacks_is_named():
    bare = ContaminatedMoE(FrozenLogProb(MODEL.frozen.log_prob))
    params = fitted().params
    for use, method in (
        (lambda: bare.sample(jax.random.key(0), params, X), "sample"),
        (lambda: bare.mean(params, X), "mean"),
        (lambda: bare.test_no_contamination(X, Y, key=jax.random.key(0)), "sample"),
    ):
        assert f"frozen=FrozenLogProb has no method {method}" in refusal(use)


def test_frozen_values_of_a_wrong_shape_are_named():
    wide = ContaminatedMoE(FrozenLogProb(lambda x, y: np.zeros((len(y), 2))))
    assert "frozen.log_prob returns shape (64, 2) for 64 rows" in refusal(lambda: wide.fit(X, Y))
    two = ContaminatedMoE(FrozenGaussian(lambda x: np.zeros(2), 1.0))
    assert "mean_fn gives shape (2,) for 64 rows" in refusal(lambda: two.fit(X, Y))
    still = ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], 0.0))
    assert "expected positive values" in refusal(lambda: still.fit(X, Y))
    assert "df=0.0 of FrozenStudentT" in refusal(
        lambda: FrozenStudentT(lambda x: x[:, 0], 1.0, 0.0)
    )


def test_a_variance_is_calibrated_on_two_or_more_rows():
    assert calibrate_variance(lambda x: x[:, 0], X, X[:, 0] + 0.5) == pytest.approx(0.25)
    assert "2 or more" in refusal(lambda: calibrate_variance(lambda x: x[:, 0], X[:1], Y[:1]))
    assert "positive number" in refusal(lambda: calibrate_variance(lambda x: x[:, 0], X, X[:, 0]))


def test_data_sets_of_different_numbers_are_refused():
    assert "xs has 3 data sets and ys has 2" in refusal(
        lambda: MODEL.fit_many(np.zeros((3, 8, 1)), np.zeros((2, 8)))
    )
    assert "expected [R, n, d]" in refusal(lambda: MODEL.fit_many(X, Y))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X.astype(str), Y, "x has dtype <U32, expected real numbers"),
        (X, np.where(Y > 0, "a", "b"), "y has dtype <U1, expected real numbers"),
        (X, Y + 0j, "y has dtype complex128, expected real numbers"),
        (X, np.arange(64).astype("datetime64[D]"), "y has dtype datetime64[D]"),
        (X, np.array([{}] * 64), "y holds other things than numbers"),
        (np.ma.array(X, mask=X > 1), Y, "x is a masked array: give the mask of its rows as mask="),
        (X, np.where(np.arange(64) == 4, 1e150, Y), "y is beyond 1e100 in size at rows 4"),
        (np.where(np.arange(64) == 4, -1e150, X.T).T, Y, "x is beyond 1e100 in size at rows 4"),
    ],
    ids=["strings", "string labels", "complex", "dates", "objects", "masked", "huge y", "huge x"],
)
def test_what_is_no_number_of_use_is_named(x, y, message):
    assert message in refusal(lambda: MODEL.fit(x, y))


def test_columns_of_objects_that_are_numbers_are_accepted():
    found = MODEL.fit(X.astype(object), Y.astype(object))
    np.testing.assert_array_equal(found.theta, fitted().theta)


def test_a_label_that_the_frozen_classifier_lacks_is_named():
    model = ContaminatedMoE(FrozenClassifier(lambda x: np.zeros((len(x), 2))), Multinomial(3))
    message = refusal(lambda: model.fit(X, np.where(np.arange(64) == 9, 2, 0)))
    assert message == "y=2 at row 9: the frozen model has labels 0..1"


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContaminatedMoE(MODEL.frozen, Multinomial(3)),
        lambda: ContaminatedMoE(CLASSES.frozen),
    ],
    ids=["reals with labels", "labels with reals"],
)
def test_densities_of_labels_and_of_reals_do_not_mix(make):
    assert "they do not mix" in refusal(make)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: fitted().responsibilities(X), "y=None: give both x and y, or neither"),
        (lambda: fitted().gate(np.ones((4, 3))), "x has 3 covariates, expected the fit's 1"),
        (lambda: fitted().log_prob(X, Y[:4]), "x has 64 rows and y has 4"),
        (lambda: fitted().wald({"nu": 1.0}), "hypothesis names ['nu'], expected some of"),
        (
            lambda: fitted().profile("tau", values=np.array([np.nan])),
            "values=[nan], expected one or more",
        ),
        (
            lambda: fitted().profile("tau", values=np.zeros(0)),
            "values=[], expected one or more finite",
        ),
        (lambda: fitted().profile("tau", num=1), "num=1 and width=4.0, expected at least 3"),
        (lambda: MODEL.fit(X, Y, tol=float("nan")), "tol=nan, expected a positive number"),
        (lambda: MODEL.fit(X, Y, n_starts=5), "n_starts=5 of starts='tail', at most 4"),
    ],
    ids=["half", "columns", "rows", "wald", "nan", "empty", "one", "tol", "starts"],
)
def test_uses_of_a_fit_that_make_no_sense_are_named(use, message):
    assert message in refusal(use)


@pytest.fixture
def unchecked():
    """Without the tests' checks of types, as users call."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: make_plan(MODEL, 1, "tail", None, "em", 2.5, 20, None),
            "max_iter=2.5, expected",
        ),
        (lambda: make_plan(MODEL, 1, None, 1, "em", 5, 20, None), "starts=None, expected 'tail'"),
        (lambda: fixed_vector(MODEL.family, {"tau": "a"}, 1), "fixed['tau'] has dtype <U1"),
    ],
    ids=["half an iteration", "no starts", "fixed at a letter"],
)
def test_options_of_a_wrong_type_are_named(use, message, unchecked):
    assert message in refusal(use)


def test_logits_of_one_class_are_named():
    model = ContaminatedMoE(FrozenClassifier(lambda x: x[:, 0]), Multinomial(2))
    message = refusal(lambda: model.fit(X, np.zeros(64)))
    assert message == "logits_fn gives shape (64,) for 64 rows, expected (64, K)"


def test_a_frozen_mean_of_other_classes_is_named():
    model = ContaminatedMoE(CLASSES.frozen, Multinomial(2))
    params = {"beta": [0.0], "tau": 0.0, "coef": [[0.0]], "intercept": [0.0]}
    message = refusal(lambda: model.mean(params, X))
    assert message == "the frozen mean has shape (64, 3), the prompts' (64, 2)"


def test_a_separating_gate_is_diagnosed():
    y = np.where(X[:, 0] > 0, 60.0, X[:, 0]) + 0.1 * np.sin(np.arange(64))
    result = MODEL.fit(X, y)
    assert result.status == "gate_separated" and str(result.diagnose(rates=False))


def test_an_infinite_fixed_parameter_is_refused():
    model = dataclasses.replace(MODEL, fixed={"tau": np.inf})
    assert "fixed['tau']=inf, expected finite numbers" in refusal(lambda: model.fit(X, Y))


# One row, two, fewer than parameters; all of y alike, all of x; and y that the frozen model fits.
@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X[:1], Y[:1]),
        (X[:2], Y[:2]),
        (X[:4], Y[:4]),
        (X, np.ones(64)),
        (np.ones_like(X), Y),
        (X, X[:, 0].copy()),
        (X, np.where(np.arange(64) == 5, 1e6, Y)),
        (X + 1e9, Y + 1e9),
        (X * 1e-160, Y),
    ],
    ids=["1 row", "2 rows", "4 rows", "y", "x", "frozen is exact", "outlier", "offset", "tiny x"],
)
def test_data_on_the_edge_end_with_a_status_and_a_summary(x, y):
    result = MODEL.fit(x, y)
    assert np.all(np.isfinite(result.theta)) and np.isfinite(result.loglik)
    assert result.summary().startswith(f"status {result.status}")
    assert result.status == "ok" or result.message
    assert result.diagnose(rates=False).warnings is not None


def test_x_without_columns_leaves_a_constant_gate():
    model = ContaminatedMoE(FrozenGaussian(lambda x: np.zeros(len(x)), 1.0))
    y = np.concatenate([np.random.default_rng(0).normal(size=60), [7.0, 8.0, 7.5, 8.2]])
    result = model.fit(X[:, :0], y)
    assert result.names == ("tau", "intercept", "log_nu")
    assert np.isfinite(result.loglik) and result.params["intercept"] > 6
