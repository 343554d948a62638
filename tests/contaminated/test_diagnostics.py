"""What the diagnostics say of designs whose answer is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from moe_jax.contaminated import (
    ContaminatedMoE,
    FrozenGaussian,
    FrozenLaplace,
    GaussianLinear,
    GaussianNonlinear,
)
from moe_jax.contaminated.densities import definition1_check, hellinger, limit_expert, separation
from moe_jax.contaminated.designs import tanh_mean
from moe_jax.contaminated.diagnostics import canonical_correlation, diagnose, flat_directions
from tests.contaminated.small import MODEL, PARAMS, data, fitted

X = np.linspace(-2.0, 2.0, 9)[:, None]
LINE = [-1.0, 4.0, np.log(0.6)]


def test_distances_of_gaussians_are_their_closed_forms():
    mean, mean0, nu = 4.0 - X[:, 0], X[:, 0], 0.6
    expected = np.mean((mean - mean0) ** 2) + 0.5 * np.log(nu) ** 2
    with jax.enable_x64(True):
        assert separation(MODEL, jnp.asarray(LINE), X) == pytest.approx(expected)
        affinity = np.sqrt(2 * np.sqrt(nu) / (1 + nu)) * np.exp(-((mean - mean0) ** 2) / 4 / 1.6)
        assert hellinger(MODEL, jnp.asarray(LINE), X) == pytest.approx(
            1 - affinity.mean(), abs=3e-5
        )


def sine(frozen, expert, phi):
    with jax.enable_x64(True):
        model = ContaminatedMoE(frozen, expert)
        return definition1_check(model, jnp.asarray(phi), X)


def tanh_first(x):
    return np.tanh(x[:, 0])


def test_the_definition_1_check_knows_which_pairs_are_distinguishable():
    tanh = GaussianNonlinear(tanh_mean, np.zeros(1))
    of_one_kind = [
        (FrozenGaussian(lambda x: x[:, 0], 1.0), GaussianLinear(), LINE),
        (FrozenGaussian(tanh_first, 1.0), tanh, [1.7, 0.3]),
    ]
    for frozen, expert, phi in of_one_kind:
        assert sine(frozen, expert, phi) < 1e-6
    # A tanh is no line: no linear expert has its mean at every x.
    others = [
        (FrozenGaussian(tanh_first, 0.01), GaussianLinear(), LINE),
        (FrozenLaplace(lambda x: x[:, 0], 1.0), GaussianLinear(), LINE),
        (FrozenGaussian(lambda x: x[:, 0], lambda x: 1 + x[:, 0] ** 2), GaussianLinear(), LINE),
    ]
    for frozen, expert, phi in others:
        assert sine(frozen, expert, phi) > 0.05
    # It says how far they are: next to much noise a tanh is nearly a line.
    near = sine(FrozenGaussian(tanh_first, 100.0), GaussianLinear(), LINE)
    assert 1e-4 < near < 0.02


def test_the_nearest_expert_is_the_regression_of_the_frozen_mean():
    model = ContaminatedMoE(FrozenGaussian(tanh_first, 0.5))
    with jax.enable_x64(True):
        found = np.asarray(limit_expert(model, jnp.asarray(LINE), X))
    line = stats.linregress(X[:, 0], tanh_first(X))
    residual = tanh_first(X) - line.slope * X[:, 0] - line.intercept
    expected = [line.slope, line.intercept, np.log(0.5 + np.mean(residual**2))]
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_canonical_correlation_of_known_blocks():
    # Correlation 0.6 between the first of each block, none elsewhere; units do not matter.
    matrix = np.eye(4)
    matrix[0, 2] = matrix[2, 0] = 0.6
    unit = np.array([10.0, 1.0, 0.1, 3.0])
    first = np.array([True, True, False, False])
    assert canonical_correlation(matrix * np.outer(unit, unit), first, ~first) == pytest.approx(0.6)
    assert canonical_correlation(matrix, first, np.zeros(4, bool)) == 0.0


def test_flat_directions_name_who_moves():
    matrix = np.array([[4.0, 3.96, 0.0], [3.96, 4.0, 0.0], [0.0, 0.0, 9.0]])
    least, found = flat_directions(matrix, np.ones(3, bool), ("tau", "intercept", "eta"))
    assert least == pytest.approx(0.01) and len(found) == 3
    assert set(found[0].description.split(" ↔ ")) == {"tau", "intercept"}
    least, found = flat_directions(np.diag([1.0, 0.0]), np.ones(2, bool), ("a", "b"))
    assert least == 0.0 and found[0].description == "b"


def test_a_sound_fit_has_green_lights_and_counts_its_rows():
    result = fitted()
    found = diagnose(result)
    np.testing.assert_allclose(found.responsibility_count, result.responsibilities().sum())
    np.testing.assert_allclose(found.gate_count, result.gate().sum())
    assert found.lights["canonical_correlation"] == found.lights["lambda_min"] == "green"
    assert found.lights["definition1_check"] == "amber" and found.definition1_check < 1e-6
    # All of the frozen model's kind: at a moving gate the gate's exponents are 1, the expert's 0.
    assert set(found.rate_factors) == set(PARAMS)
    assert found.rate_factors["beta"].standard_error == pytest.approx(result.standard_errors()[0])
    assert "canonical_correlation" in str(found) and "\nrate tau" in str(found)


def test_a_duplicated_column_is_named_as_the_flat_direction():
    x, y = data()
    found = diagnose(MODEL.fit(np.concatenate([x, x], axis=1), y), rates=False)
    assert found.lights["lambda_min"] == "red" and abs(found.lambda_min) < 1e-6
    names = {name for d in found.collinear_directions[:2] for name in d.description.split(" ↔ ")}
    assert names <= {"beta[0]", "beta[1]", "eta[0]", "eta[1]"}
    assert any(line.startswith("lambda_min: ") for line in found.warnings)


def test_wald_intervals_of_a_gate_that_is_hardly_known_are_refused():
    result = fitted()
    assert diagnose(result, rates=False).wald_gate_is_usable
    few = MODEL.fit(*(a[:12] for a in data()))
    found = diagnose(few, rates=False)
    assert not found.wald_gate_is_usable and found.lights["gate_deviation"] == "red"
    assert found.lights["responsibility_count"] == "amber"


def test_several_prompts_have_no_rate_factors_and_say_so():
    two = dataclasses.replace(MODEL, n_prompts=2).fit(*data())
    found = diagnose(two)
    assert found.rate_factors == {} and found.separation.shape == (2,)
    assert "no rate factors: they need n_prompts=1" in found.warnings
