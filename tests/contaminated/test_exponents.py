"""Fisher information by quadrature against closed forms, and the exponents of the specification."""

import numpy as np
import pytest
from scipy import integrate, special, stats

from benchmarks.contaminated_exact import (
    EXPONENT_TOLERANCE,
    EXPONENTS,
    LINEAR,
    NO_INTERCEPT,
    measure_exponents,
)
from moe_jax.contaminated import (
    ContaminatedMoE,
    FrozenClassifier,
    FrozenGaussian,
    FrozenLaplace,
    FrozenLogProb,
    FrozenStudentT,
    GaussianLinear,
    Multinomial,
)
from moe_jax.contaminated.designs import DESIGNS
from moe_jax.contaminated.exponents import (
    cramer_rao,
    exponents,
    gauss_hermite,
    information,
    normal_points,
    standard_deviations,
)

X = np.array([[-0.7, 0.4], [0.2, 1.1], [1.3, -0.6]])
POINTS, WEIGHTS = gauss_hermite(2, 16)
E1 = np.array([1.0, 0.0])


def linear_mean(x):
    return x[:, 0]


def with_one(x):
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def linear_params(beta=(0.3, -0.2), tau=0.4, eta=(1.0, 0.0), intercept=0.0, log_nu=0.0):
    return {
        "beta": np.array(beta),
        "tau": np.asarray(tau),
        "eta": np.array(eta),
        "intercept": np.asarray(intercept),
        "log_nu": np.asarray(log_nu),
    }


def test_separated_experts_have_the_information_of_labelled_data():
    # 60 standard deviations apart r is 0 or 1: logistic regression, and a regression on share w.
    params = linear_params(intercept=60.0, log_nu=np.log(0.5))
    design = with_one(X)
    w = 1 / (1 + np.exp(-(X @ params["beta"] + params["tau"])))
    gate = np.einsum("n,ni,nj->ij", w * (1 - w), design, design) / len(X)
    expert = np.einsum("n,ni,nj->ij", w, design, design) / len(X) / 0.5
    expected = np.zeros((7, 7))
    expected[:3, :3], expected[3:6, 3:6], expected[6, 6] = gate, expert, w.mean() / 2
    np.testing.assert_allclose(information(LINEAR, params, X), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("frozen", "density"),
    [
        (FrozenGaussian(linear_mean, 0.3), stats.norm(0.2, np.sqrt(0.3))),
        (FrozenLaplace(linear_mean, 0.3), stats.laplace(0.2, np.sqrt(0.15))),
        (FrozenStudentT(linear_mean, np.sqrt(0.3), 4.0), stats.t(4.0, 0.2, np.sqrt(0.3))),
    ],
    ids=["Gaussian", "Laplace", "Student t"],
)
def test_overlapping_experts_agree_with_adaptive_integration(frozen, density):
    # One covariate at 0.2: w = sigmoid(0.5), frozen mean 0.2, expert N(0.9, 0.8).
    model = ContaminatedMoE(frozen, expert=GaussianLinear())
    params = {"beta": [1.5], "tau": 0.2, "eta": [2.0], "intercept": 0.5, "log_nu": np.log(0.8)}
    w, mean, nu = 1 / (1 + np.exp(-0.5)), 0.9, 0.8
    expert = stats.norm(mean, np.sqrt(nu))

    def score(y):
        logs = np.log(1 - w) + density.logpdf(y), np.log(w) + expert.logpdf(y)
        p, r = np.exp(np.logaddexp(*logs)), special.expit(logs[1] - logs[0])
        e = (y - mean) / nu
        parts = [r - w, r * e, r * 0.5 * (e * (y - mean) - 1)]
        return p, np.array([0.2 * parts[0], parts[0], 0.2 * parts[1], parts[1], parts[2]])

    def integrand(y, i, j):
        p, g = score(y)
        return p * g[i] * g[j]

    matrix = information(model, params, np.array([[0.2]]))
    for i in range(5):
        for j in range(i + 1):
            pieces = [(-np.inf, 0.2), (0.2, 0.9), (0.9, np.inf)]
            value = sum(
                integrate.quad(integrand, *piece, args=(i, j), epsabs=1e-13, epsrel=1e-11)[0]
                for piece in pieces
            )
            assert matrix[i, j] == pytest.approx(value, rel=1e-6, abs=1e-9)


def test_more_nodes_change_nothing():
    design = DESIGNS["paper_b1"]
    x = normal_points(8, 5)
    coarse, fine = (
        information(design.model, design.truth(10**4), x, quadrature=q) for q in (201, 801)
    )
    np.testing.assert_allclose(coarse, fine, rtol=1e-6, atol=1e-6 * np.abs(fine).max())


def test_weights_are_shares_of_the_points():
    doubled = information(NO_INTERCEPT, no_intercept(0.5), np.concatenate([X, X[:1]]))
    weighted = information(NO_INTERCEPT, no_intercept(0.5), X, weights=np.array([2.0, 1.0, 1.0]))
    np.testing.assert_allclose(doubled, weighted, rtol=1e-12)


def no_intercept(distance):
    params = linear_params(eta=(1.0 + distance, 0.0))
    del params["intercept"]
    return params


def test_merged_experts_are_reported_as_singular():
    with pytest.raises(ValueError, match="information is singular"):
        cramer_rao(information(NO_INTERCEPT, no_intercept(0.0), X))


def test_density_that_is_not_normalised_is_refused():
    frozen = FrozenLogProb(
        lambda x, y: stats.norm.logpdf(y) + 0.3,
        mean_fn=lambda x: np.zeros(len(x)),
        variance_fn=lambda x: np.ones(len(x)),
    )
    model = ContaminatedMoE(frozen, expert=GaussianLinear())
    with pytest.raises(ValueError, match="integrates to 1.1"):
        information(model, linear_params(), X)


def test_direction_must_name_parameters():
    with pytest.raises(ValueError, match=r"direction names \['gamma'\]"):
        exponents(NO_INTERCEPT, no_intercept(0.0), X, {"gamma": 1.0})


def test_multinomial_information_is_the_sum_over_classes():
    logits = np.array([[0.3, -0.2], [0.1, 0.5]])
    frozen = FrozenClassifier(lambda x: np.concatenate([x @ logits.T, np.zeros((len(x), 1))], 1))
    model = ContaminatedMoE(frozen, expert=Multinomial(3))
    params = {
        "beta": [0.4, 0.1],
        "tau": 0.2,
        "coef": np.array([[1.0, 0.0], [-0.5, 0.7]]),
        "intercept": np.array([0.2, -0.1]),
    }
    expected = np.zeros((9, 9))
    for x in X:
        design = np.append(x, 1.0)
        frozen_p = np.exp([*(logits @ x), 0.0])
        expert_p = np.exp([*(params["coef"] @ x + params["intercept"]), 0.0])
        frozen_p, expert_p = frozen_p / frozen_p.sum(), expert_p / expert_p.sum()
        w = 1 / (1 + np.exp(-(x @ params["beta"] + 0.2)))
        p = (1 - w) * frozen_p + w * expert_p
        for label in range(3):
            r = w * expert_p[label] / p[label]
            residual = (np.arange(3) == label)[:2] - expert_p[:2]
            g = np.concatenate(
                [(r - w) * design, (r * residual[:, None] * x).ravel(), r * residual]
            )
            expected += p[label] * np.outer(g, g) / len(X)
    np.testing.assert_allclose(information(model, params, X), expected, rtol=1e-9, atol=1e-12)


def test_hermite_nodes_have_the_normal_moments():
    np.testing.assert_allclose(WEIGHTS @ POINTS, 0.0, atol=1e-12)
    np.testing.assert_allclose((WEIGHTS[:, None] * POINTS).T @ POINTS, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(WEIGHTS @ POINTS**4, 3.0, rtol=1e-10)


def test_sobol_points_are_nearly_normal():
    points = normal_points(8, 12)
    assert points.shape == (4096, 8) and np.isfinite(points).all()
    np.testing.assert_allclose(points.mean(axis=0), 0.0, atol=2e-3)
    np.testing.assert_allclose(np.cov(points.T), np.eye(8), atol=2e-2)


def test_standard_deviation_of_a_vector_is_the_root_of_its_trace():
    params = no_intercept(2.0)
    matrix = information(NO_INTERCEPT, params, POINTS, weights=WEIGHTS)
    variances = np.diag(np.linalg.inv(matrix))
    found = standard_deviations(NO_INTERCEPT, matrix, 2)
    assert found["beta"] == pytest.approx(np.sqrt(variances[:2].sum()))
    assert found["tau"] == pytest.approx(np.sqrt(variances[2]))


@pytest.mark.parametrize("name", EXPONENTS)
def test_exponents_are_those_of_the_table(name):
    # The accept column of T4.
    expected, found = EXPONENTS[name][-1], measure_exponents(name)
    assert found.keys() == expected.keys()
    for row, exponent in expected.items():
        assert found[row] == pytest.approx(exponent, abs=EXPONENT_TOLERANCE), (row, found)
