"""Fits through the public names: methods agree, many at once are one by one, families, prompts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.flatten_util import ravel_pytree

from moe_jax.contaminated import (
    ConstantGate,
    ContaminatedMoE,
    Custom,
    FrozenClassifier,
    FrozenGaussian,
    GaussianNonlinear,
    Multinomial,
    StudentT,
    fit,
    simulate,
)
from tests.contaminated.small import MODEL, PARAMS, ROWS, data, fit_padded, fitted

SECOND = {"beta": [-1.0], "tau": -0.5, "eta": [0.0], "intercept": -5.0, "log_nu": 0.0}
TWO = dataclasses.replace(MODEL, n_prompts=2)
TWO_PARAMS = {name: np.stack([PARAMS[name], SECOND[name]]) for name in PARAMS}


@pytest.mark.parametrize("method", ["em", "squarem", "newton", "lbfgs"])
def test_every_method_finds_the_optimum(method):
    result = fit(MODEL, *data(), method=method, starts=PARAMS, max_iter=2000)
    assert result.status == "ok" and result.converged
    np.testing.assert_allclose(result.loglik, fitted().loglik, rtol=1e-9)
    np.testing.assert_allclose(result.theta, fitted().theta, atol=2e-5)
    # The trace ends at the optimum and never falls by more than rounding.
    assert result.trace[-1] == pytest.approx(result.loglik, rel=1e-10)
    assert np.all(np.diff(result.trace) >= -1e-10 * (1 + np.abs(result.trace[1:])))


def test_many_fits_at_once_are_those_one_by_one():
    x = np.random.default_rng(7).normal(size=(3, ROWS, 1))
    keys = jax.random.split(jax.random.key(2), 3)
    y = np.stack([simulate(k, MODEL, PARAMS, one) for k, one in zip(keys, x, strict=True)])
    mask = np.ones((3, ROWS), bool)
    # The second data set is shorter, and absent rows may hold anything.
    mask[1, 40:], y[1, 40:] = False, np.nan
    many = MODEL.fit_many(x, y, mask=mask)
    for k in range(3):
        single = fit_padded(MODEL, x[k][mask[k]], y[k][mask[k]])
        np.testing.assert_allclose(many.theta[k], single.theta, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(many.cov[k], single.cov(), rtol=1e-7, atol=1e-9)
        assert many.status[k] == single.status and many.n_agree[k] == single.n_agree
        for name in PARAMS:
            np.testing.assert_array_equal(many.params[name][k].shape, single.params[name].shape)
    order = [0, 1, 2, 2, 1]
    chunked = MODEL.fit_many(x[order], y[order], mask=mask[order], chunk_rows=3 * ROWS)
    np.testing.assert_array_equal(chunked.theta, many.theta[order])


def test_summary_names_every_parameter_with_its_error_and_interval():
    result = fitted()
    lines = {line.split()[0]: line for line in result.summary().splitlines()[3:]}
    assert list(lines) == [*result.names, "exp(tau)", "nu"]
    errors = dict(zip(result.names, result.standard_errors(), strict=True))
    cells = lines["exp(tau)"].split()
    odds = np.exp(result.params["tau"])
    np.testing.assert_allclose(float(cells[1]), odds, rtol=1e-5)
    np.testing.assert_allclose(float(cells[2]), odds * errors["tau"], rtol=1e-3)
    low, high = map(float, cells[3:])
    np.testing.assert_allclose(low * high, odds**2, rtol=1e-3)
    assert result.summary().startswith("status ok\nlog-likelihood ")
    assert "starts that agree 4/4" in result.summary()


def test_predictions_of_a_fit_are_those_of_its_model():
    result, (x, y) = fitted(), data()
    np.testing.assert_array_equal(result.responsibilities(), result.responsibilities(x, y))
    w, r = result.gate(), result.responsibilities()
    frozen = MODEL.frozen.mean(x)
    line = x[:, 0] * result.params["eta"][0] + result.params["intercept"]
    np.testing.assert_allclose(result.mean(), (1 - w) * frozen + w * line, rtol=1e-12)
    expert = -0.5 * (y - line) ** 2 / np.exp(result.params["log_nu"])
    expert -= 0.5 * (np.log(2 * np.pi) + result.params["log_nu"])
    np.testing.assert_allclose(np.log(w) + expert - result.log_prob(x, y), np.log(r), atol=1e-9)


def tanh_mean(eta, x):
    return jnp.tanh(x @ eta)


def laplace(params, x, y):
    scale = jnp.exp(params["log_scale"])
    return -jnp.abs(y - params["centre"]) / scale - jnp.log(2 * scale)


FAMILIES = {
    "tanh": (
        ContaminatedMoE(
            FrozenGaussian(lambda x: np.full(len(x), 3.0), 0.1),
            GaussianNonlinear(tanh_mean, np.zeros(1)),
            ConstantGate(),
        ),
        {"tau": 0.0, "eta": [2.0], "log_nu": -3.0},
    ),
    "t": (
        ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], 1.0), StudentT(df=4.0), ConstantGate()),
        {"tau": 0.0, "eta": [0.0], "intercept": 9.0, "log_nu": -1.0},
    ),
    "multinomial": (
        ContaminatedMoE(
            FrozenClassifier(lambda x: np.stack([4 * x[:, 0], 0 * x[:, 0]], 1)), Multinomial(2)
        ),
        {"beta": [0.0], "tau": 0.0, "coef": [[-4.0]], "intercept": [0.0]},
    ),
    "custom": (
        ContaminatedMoE(
            FrozenGaussian(lambda x: x[:, 0], 1.0),
            Custom(
                laplace,
                {"centre": 0.0, "log_scale": 0.0},
                sample_fn=lambda key, p, x: (
                    p["centre"] + jnp.exp(p["log_scale"]) * jax.random.laplace(key, x.shape[:1])
                ),
                mean_fn=lambda p, x: jnp.full(x.shape[0], p["centre"]),
            ),
            ConstantGate(),
        ),
        {"tau": 0.0, "eta": [9.0, -0.5]},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_finds_its_prompt(name):
    model, truth = FAMILIES[name]
    x = np.random.default_rng(1).normal(size=(400, 1))
    y = simulate(jax.random.key(1), model, truth, x)
    method = "squarem" if name == "custom" else "em+newton"
    start = {key: 0.8 * np.asarray(value) for key, value in truth.items()}
    result = model.fit(
        x, y, method=method, starts=start if name == "custom" else "tail", n_starts=1
    )
    assert result.converged, result.message
    assert result.loglik >= np.sum(model.log_prob(truth, x, y))
    if name == "custom":
        # Of Laplace's density the log has no curvature in its centre.
        np.testing.assert_allclose(result.theta, [0.0, 9.0, -0.5], atol=0.5)
        return
    assert result.status == "ok"
    target = np.concatenate([np.ravel(truth[key]) for key in result.params])
    # Every entry is within 5 standard errors, a false alarm once in a million.
    assert np.all(np.abs(result.theta - target) < 5 * result.standard_errors())


@pytest.fixture(scope="module")
def two():
    x = np.random.default_rng(8).normal(size=(120, 1))
    y = simulate(jax.random.key(8), TWO, TWO_PARAMS, x)
    return TWO.fit(x, y)


def test_two_prompts_are_found(two):
    assert two.status == "ok" and two.names[:2] == ("beta[0,0]", "tau[0]")
    order = np.argsort(-two.params["intercept"])
    for name, value in TWO_PARAMS.items():
        error = np.abs(two.params[name][order] - value)
        errors = dict(zip(two.names, two.standard_errors(), strict=True))
        width = [v for n, v in errors.items() if n.partition("[")[0] == name]
        assert np.all(error < 5 * np.reshape(width, (2, -1))[order].reshape(error.shape)), name
    assert two.responsibilities().shape == two.gate().shape == (2, 120)
    assert np.all(two.responsibilities().sum(axis=0) <= 1 + 1e-12)
    # The intercepts' score equations, one a prompt.
    difference = np.mean(two.responsibilities() - two.gate(), axis=1)
    np.testing.assert_allclose(difference, 0.0, atol=1e-8)


def test_bootstrap_keeps_the_prompts_apart(two):
    # Report 16: the bootstrap of a mixture is refused because labels switch (ferx-core#1145).
    found = two.bootstrap(jax.random.key(0), n_boot=12)
    column = [two.names.index(f"intercept[{j}]") for j in (0, 1)]
    high, low = np.sort(two.theta[column])[::-1]
    first, second = (
        found.theta[:, column].T if two.theta[column[0]] == high else found.theta[:, column[::-1]].T
    )
    assert np.all(np.abs(first - high) < 2.0) and np.all(np.abs(second - low) < 2.0)


def test_more_prompts_than_clusters_end_with_a_status(two):
    # Report 9: many components, tiny clusters and float32 give NaN (pycave#56).
    x = np.random.default_rng(9).normal(size=(120, 1)).astype(np.float32)
    y = (x[:, 0] + 0.01 * np.arange(120) % 3).astype(np.float32)
    result = TWO.fit(x, y)
    assert np.all(np.isfinite(result.theta)) and np.isfinite(result.loglik)
    assert result.status != "ok" and result.message


def independent_loglik(model, x, y, means):
    """Log-likelihood of Gaussian prompts with linear gates as JAX would be told to write it.

    `means` takes eta and x; parameters are one vector a prompt: beta, tau, eta, log nu.
    """
    log_frozen = jax.scipy.stats.norm.logpdf(jnp.asarray(y), model.frozen.mean(x), 1.0)

    def loglik(theta):
        logits, joint = [jnp.zeros(len(y))], [log_frozen]
        for block in theta.reshape(model.n_prompts, -1):
            gate = x[:, 0] * block[0] + block[1]
            scale = jnp.exp(0.5 * block[-1])
            logits.append(gate)
            joint.append(gate + jax.scipy.stats.norm.logpdf(y, means(block[2:-1], x), scale))
        total = jax.scipy.special.logsumexp(jnp.stack(logits), axis=0)
        return jnp.sum(jax.scipy.special.logsumexp(jnp.stack(joint), axis=0) - total)

    return loglik


def assert_covariance_is_of(result, means):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        loglik = independent_loglik(result.model, result.x, result.y, means)
        theta = jnp.asarray(result.theta)
        value, gradient = map(np.asarray, jax.jit(jax.value_and_grad(loglik))(theta))
        hessian = np.asarray(jax.jit(jax.hessian(loglik))(theta))
    assert value == pytest.approx(result.loglik, rel=1e-10)
    np.testing.assert_allclose(result.information, -hessian, rtol=1e-6, atol=1e-6)
    errors = result.standard_errors()
    np.testing.assert_allclose(errors, np.sqrt(np.diagonal(np.linalg.inv(-hessian))), rtol=1e-5)
    # At the maximum the gradient is a negligible part of a standard error away from zero.
    assert np.max(np.abs(gradient * errors)) < 1e-5


def test_three_prompts_have_the_covariance_of_their_hessian():
    model = dataclasses.replace(MODEL, n_prompts=3)
    truth = {
        "beta": np.array([[1.0], [-1.0], [0.5]]),
        "tau": np.array([-0.3, -0.5, 0.0]),
        "eta": np.array([[-1.0], [0.0], [2.0]]),
        "intercept": np.array([6.0, -6.0, 14.0]),
        "log_nu": np.array([-0.5, 0.0, 0.4]),
    }
    x = np.random.default_rng(8).normal(size=(256, 1))
    y = simulate(jax.random.key(8), model, truth, x)
    result = model.fit(x, y, starts=truth)
    assert result.status == "ok" and result.responsibilities().shape == (3, 256)
    assert_covariance_is_of(result, lambda eta, x: x[:, 0] * eta[0] + eta[1])
    # Every entry is within 5 standard errors, a false alarm once in a million.
    target = np.stack([np.ravel(truth[name][j]) for j in range(3) for name in truth])
    assert np.all(np.abs(result.theta - target[:, 0]) < 5 * result.standard_errors())
    assert np.all(np.linalg.eigvalsh(result.cov("sandwich")) > 0)
    assert np.all(np.linalg.eigvalsh(result.cov("opg")) > 0)


class Network(linen.Module):
    """Two tanh units and a bias."""

    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(2, use_bias=False)(x))
        return linen.Dense(1)(hidden)[:, 0]


def test_a_flax_network_is_a_prompt_and_a_frozen_model():
    network = Network()
    x = np.random.default_rng(4).normal(size=(512, 1))
    variables = network.init(jax.random.key(0), np.zeros((1, 1), np.float32))
    frozen = FrozenGaussian(lambda x: network.apply(variables, x.astype(np.float32)), var=1.0)
    layers = {
        "Dense_0": {"kernel": np.array([[1.0, 4.0]])},
        "Dense_1": {"kernel": np.array([[5.0], [1.5]]), "bias": np.array([6.0])},
    }
    expert = GaussianNonlinear(network.apply, {"params": layers})
    model = ContaminatedMoE(frozen, expert)
    # Ravelled by name: hidden kernel, bias, output kernel.
    eta = np.array([1.0, 4.0, 6.0, 5.0, 1.5])
    truth = {"beta": [1.0], "tau": 0.0, "eta": eta, "log_nu": -3.0}
    y = simulate(jax.random.key(4), model, truth, x)
    result = model.fit(x, y, starts=truth | {"eta": 1.1 * eta, "tau": 0.5})
    assert result.status == "ok" and result.converged
    assert np.all(np.abs(result.params["eta"] - eta) < 5 * result.standard_errors()[2:-1])
    weights = expert.unravel(result.params["eta"])["params"]
    assert weights["Dense_0"]["kernel"].dtype == np.float64
    np.testing.assert_array_equal(weights["Dense_1"]["bias"], result.params["eta"][2])
    with jax.enable_x64(True):
        unravel = ravel_pytree(jax.tree.map(jnp.asarray, {"params": layers}))[1]
    assert_covariance_is_of(result, lambda eta, x: network.apply(unravel(eta), x))
    # The intercept's score equation.
    assert abs(np.mean(result.responsibilities()) - np.mean(result.gate())) < 1e-8
