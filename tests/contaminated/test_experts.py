"""Densities, M-steps, units and draws of the trainable experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from moe_jax.contaminated.custom import Custom
from moe_jax.contaminated.discrete import Multinomial
from moe_jax.contaminated.expert import Units
from moe_jax.contaminated.location_scale import GaussianLinear, GaussianNonlinear, StudentT

RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 2)) * [3.0, 0.2] + [1.0, -4.0]
Y = X @ [0.5, -1.0] + 2.0 + RNG.normal(size=40)
BOUNDED = np.tanh(X @ [0.3, 0.2]) + 0.3 * RNG.normal(size=40)
LABELS = RNG.integers(3, size=40).astype(float)
WEIGHT = RNG.uniform(0.1, 1.0, size=40)


def tanh_mean(eta, x):
    return jnp.tanh(x @ eta)


def exponential(params, x, y):
    rate = params["log_rate"] + x[:, 0] * params["slope"]
    return rate - jnp.exp(rate) * jnp.abs(y)


EXPONENTIAL = Custom(exponential, {"log_rate": 0.0, "slope": 0.0})
EXPERTS = {
    "linear": GaussianLinear(),
    "no intercept": GaussianLinear(intercept=False),
    "tanh": GaussianNonlinear(tanh_mean, np.zeros(2)),
    "t": StudentT(df=3.0),
    "t, df free": StudentT(df=None),
    "multinomial": Multinomial(3),
    "custom": EXPONENTIAL,
}


def at(expert, seed=0):
    """Parameters, design and response in the user's units."""
    y = LABELS if expert.labels else BOUNDED if expert == EXPERTS["tanh"] else Y
    phi = 0.3 * np.random.default_rng(seed).normal(size=expert.initial(2).size)
    return jnp.asarray(phi), expert.design(jnp.asarray(X), None), jnp.asarray(y)


def test_densities_are_scipys():
    with jax.enable_x64(True):
        phi, design, y = at(GaussianLinear())
        mean = X @ np.asarray(phi[:2]) + float(phi[2])
        scale = float(jnp.exp(0.5 * phi[3]))
        ours = GaussianLinear().log_prob(phi, design, y)
        np.testing.assert_allclose(ours, stats.norm.logpdf(Y, mean, scale), rtol=1e-11)
        ours = StudentT(df=3.0).log_prob(phi, design, y)
        np.testing.assert_allclose(ours, stats.t.logpdf(Y, 3.0, mean, scale), rtol=1e-11)
        free = jnp.append(phi, jnp.log(3.0))
        np.testing.assert_allclose(StudentT(df=None).log_prob(free, design, y), ours, rtol=1e-11)
        expert = Multinomial(3)
        phi, design, y = at(expert)
        coef = np.asarray(phi)
        logits = np.pad(X @ coef[:4].reshape(2, 2).T + coef[4:], ((0, 0), (0, 1)))
        expected = special.log_softmax(logits, axis=1)[np.arange(40), LABELS.astype(int)]
        np.testing.assert_allclose(expert.log_prob(phi, design, y), expected, rtol=1e-11)


@pytest.mark.parametrize("name", EXPERTS)
def test_m_steps_raise_the_weighted_log_density_to_its_maximum(name):
    expert = EXPERTS[name]
    with jax.enable_x64(True):
        phi, design, y = at(expert)
        weight, free = jnp.asarray(WEIGHT), jnp.ones(phi.size, jnp.bool_)
        step = jax.jit(lambda p: expert.m_step(p, design, y, weight, free))
        value = jax.jit(lambda p: weight @ expert.log_prob(p, design, y))
        values = [value(phi)]
        for _ in range(150 if "t" in name else 25):
            phi = step(phi)
            values.append(value(phi))
        values = np.array(values)
        assert np.all(np.diff(values) >= -1e-9 * (1 + np.abs(values[1:])))
        if name == "t, df free":
            return  # The noise is normal: df creeps towards its bound for ever.
        # In standard errors of an estimate: what is left of a linear convergence.
        score = weight @ expert.score(phi, design, y)
        curvature = jnp.diagonal(expert.information(phi, design, y, weight))
        np.testing.assert_array_less(np.abs(score) / np.sqrt(np.abs(curvature)), 1e-3)


def test_linear_m_step_is_weighted_least_squares_in_one_go():
    with jax.enable_x64(True):
        phi, design, y = at(GaussianLinear())
        free = jnp.ones(4, jnp.bool_)
        new = jax.jit(GaussianLinear().m_step)(phi, design, y, jnp.asarray(WEIGHT), free)
    root = np.sqrt(WEIGHT)
    table = np.column_stack([X, np.ones(40)])
    expected, *_ = np.linalg.lstsq(table * root[:, None], Y * root, rcond=None)
    np.testing.assert_allclose(new[:3], expected, rtol=1e-6)
    nu = np.average((Y - table @ expected) ** 2, weights=WEIGHT)
    np.testing.assert_allclose(np.exp(new[3]), nu, rtol=1e-6)


@pytest.mark.parametrize("name", EXPERTS)
def test_entries_that_are_not_free_do_not_move(name):
    expert = EXPERTS[name]
    with jax.enable_x64(True):
        phi, design, y = at(expert)
        free = jnp.arange(phi.size) % 2 == 0
        new = jax.jit(expert.m_step)(phi, design, y, jnp.asarray(WEIGHT), free)
    new, phi, free = map(np.asarray, (new, phi, free))
    np.testing.assert_array_equal(new[~free], phi[~free])
    assert np.any(new[free] != phi[free])


@pytest.mark.parametrize("name", ["linear", "t, df free", "no intercept", "multinomial"])
def test_standardised_and_user_units_give_one_density(name):
    expert = EXPERTS[name]
    mean = np.zeros(2) if name == "no intercept" else X.mean(0)
    y_mean = 0.0 if name == "no intercept" else Y.mean()
    with jax.enable_x64(True):
        units = Units(*map(jnp.asarray, (mean, X.std(0), y_mean, 7.0)))
        phi, plain, y = at(expert)
        inside = expert.from_user(phi, units)
        np.testing.assert_allclose(expert.to_user(inside, units), phi, rtol=1e-10, atol=1e-12)
        design = expert.design(jnp.asarray(X), units)
        standardised = expert.log_prob(inside, design, expert.response(y, units))
        # A density of y / 7 is 7 times larger; a probability is not.
        unit = 0.0 if expert.labels else np.log(7.0)
        expected = expert.log_prob(phi, plain, y) + unit
        np.testing.assert_allclose(standardised, expected, rtol=1e-10)


def test_draws_have_the_experts_distribution():
    # Each p-value is below 1e-6 with probability 1e-6 if the draws are right.
    with jax.enable_x64(True):
        x = jnp.full((4000, 1), 0.5)
        design = GaussianLinear().design(x, None)
        phi = jnp.array([2.0, 1.0, np.log(4.0)])
        draws = np.asarray(jax.jit(GaussianLinear().sample)(jax.random.key(0), phi, design))
        assert stats.kstest(draws, stats.norm(2.0, 2.0).cdf).pvalue > 1e-6
        draws = np.asarray(jax.jit(StudentT(df=3.0).sample)(jax.random.key(1), phi, design))
        assert stats.kstest(draws, stats.t(3.0, 2.0, 2.0).cdf).pvalue > 1e-6
        labels = Multinomial(2).sample(jax.random.key(2), jnp.array([2.0, 1.0]), design)
        chance = special.expit(2.0)
        assert stats.binomtest(int(np.sum(np.asarray(labels) == 0)), 4000, chance).pvalue > 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Multinomial(1), "n_classes=1 of Multinomial, expected at least 2"),
        (lambda: StudentT(df=-1.0), "df=-1.0 of StudentT, expected a positive number"),
    ],
)
def test_impossible_experts_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_a_custom_expert_lacks_is_named():
    with jax.enable_x64(True):
        phi, design, _ = at(EXPONENTIAL)
        with pytest.raises(ValueError, match="mean_fn=None of Custom"):
            EXPONENTIAL.mean(phi, design)
        with pytest.raises(ValueError, match="sample_fn=None of Custom"):
            EXPONENTIAL.sample(jax.random.key(0), phi, design)
