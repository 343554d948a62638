"""Exact score and observed information against autodiff, for every family (test T7)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.custom import Custom
from moe_jax.contaminated.discrete import Multinomial
from moe_jax.contaminated.gates import ConstantGate, CustomGate, LinearGate
from moe_jax.contaminated.layout import Family, flatten, parameter_names, unflatten
from moe_jax.contaminated.location_scale import GaussianLinear, GaussianNonlinear, StudentT

D = 2
ROWS = 7


def tanh_mean(eta, x):
    return jnp.tanh(x @ eta)


def folded(params, x, y):
    # Normal in log(1 + y^2), unnormalised: any function will do for derivatives.
    mean = x @ params["slope"] + params["level"]
    z = (jnp.log1p(jnp.square(y)) - mean) * jnp.exp(-params["log_scale"])
    return -0.5 * jnp.square(z) - params["log_scale"]


def bent(params, x):
    return params["a"] * jnp.sin(x[:, 0]) + params["b"] * jnp.square(x[:, 1]) * params["a"]


CUSTOM = Custom(folded, {"level": 0.0, "log_scale": 0.0, "slope": np.zeros(D)})
BENT = CustomGate(bent, {"a": 0.0, "b": 0.0})
FAMILIES = {
    "linear": Family(GaussianLinear(), LinearGate()),
    "linear, no intercept": Family(GaussianLinear(intercept=False), LinearGate(features=(1,))),
    "tanh": Family(GaussianNonlinear(tanh_mean, np.zeros(D)), LinearGate()),
    "t": Family(StudentT(), ConstantGate()),
    "t, df free": Family(StudentT(df=None), LinearGate()),
    "t around tanh": Family(StudentT(GaussianNonlinear(tanh_mean, np.zeros(D))), BENT),
    "multinomial": Family(Multinomial(3), LinearGate()),
    "custom": Family(CUSTOM, LinearGate()),
    "two linear": Family(GaussianLinear(), LinearGate(), 2),
    "two t, custom gate": Family(StudentT(df=None), BENT, 2),
    "three multinomial": Family(Multinomial(3), ConstantGate(), 3),
}


def data(family, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D))
    labels = family.expert.labels
    y = rng.integers(labels, size=rows).astype(float) if labels else rng.normal(size=rows)
    log_frozen = -0.5 * (y - x[:, 0]) ** 2
    theta = 0.7 * rng.normal(size=family.size(D))
    weight = rng.uniform(0.5, 2.0, size=rows)
    return jnp.asarray(theta), likelihood.make_rows(
        family, jnp.asarray(x), jnp.asarray(y), jnp.asarray(log_frozen), jnp.asarray(weight)
    )


@partial(jax.jit, static_argnums=0)
def both_ways(family, theta, rows):
    """Analytic and autodiff rows' scores and information."""
    by_hand = likelihood.row_scores(family, theta, rows), likelihood.moments(family, theta, rows)
    return by_hand, (
        jax.jacfwd(lambda t: likelihood.row_loglik(family, t, rows))(theta),
        -jax.hessian(lambda t: likelihood.loglik(family, t, rows))(theta),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_score_and_information_are_autodiffs(name):
    family = FAMILIES[name]
    with jax.enable_x64(True):
        theta, rows = data(family)
        (scores, moments), (auto_scores, auto_information) = both_ways(family, theta, rows)
        # The accept column of T7: 1e-10, relative to the largest entry.
        for ours, theirs in (
            (scores, auto_scores),
            (moments.score, rows.weight @ auto_scores),
            (moments.information, auto_information),
        ):
            tolerance = 1e-10 * np.max(np.abs(theirs))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
        np.testing.assert_allclose(moments.information, moments.information.T, atol=1e-12)


def test_density_is_the_mixture_written_out():
    family = FAMILIES["two linear"]
    with jax.enable_x64(True):
        theta, rows = data(family)
        terms = likelihood.row_terms(family, theta, rows)
    params = unflatten(family, np.asarray(theta), D)
    x, y = np.asarray(rows.gate_design[:, :D]), np.asarray(rows.response)
    odds = np.exp(x @ params["beta"].T + params["tau"])
    gate = odds / (1 + odds.sum(1, keepdims=True))
    mean = x @ params["eta"].T + params["intercept"]
    nu = np.exp(params["log_nu"])
    density = np.exp(-((y[:, None] - mean) ** 2) / (2 * nu)) / np.sqrt(2 * np.pi * nu)
    joint = gate * density
    total = joint.sum(1) + (1 - gate.sum(1)) * np.exp(np.asarray(rows.log_frozen))
    np.testing.assert_allclose(terms.loglik, np.log(total), rtol=1e-12)
    np.testing.assert_allclose(terms.responsibility, (joint / total[:, None]).T, rtol=1e-11)
    np.testing.assert_allclose(terms.gate, gate.T, rtol=1e-12)


def test_row_ruled_out_by_the_frozen_model_belongs_to_the_prompt():
    family = FAMILIES["linear"]
    with jax.enable_x64(True):
        theta, rows = data(family)
        x, y = rows.gate_design[:, :D], rows.response
        rows = likelihood.make_rows(family, x, y, rows.log_frozen.at[2].set(-jnp.inf))
        terms = jax.tree.map(np.asarray, likelihood.row_terms(family, theta, rows))
        moments = likelihood.moments(family, theta, rows)
    assert terms.responsibility[0, 2] == 1.0
    expected = np.log(terms.gate[0, 2]) + terms.log_expert[0, 2]
    np.testing.assert_allclose(terms.loglik[2], expected, rtol=1e-12)
    assert np.all(np.isfinite(moments.score)) and np.all(np.isfinite(moments.information))


def test_passing_over_blocks_of_rows_changes_nothing(monkeypatch):
    family = FAMILIES["linear"]
    with jax.enable_x64(True):
        theta, rows = data(family, rows=23)
        whole = likelihood.moments(family, theta, rows)
        outer = likelihood.outer_product(family, theta, rows)
        monkeypatch.setattr(likelihood, "BLOCK_ROWS", 5)
        blocks = likelihood.moments(family, theta, rows)
        # Sums in another order: rounding only.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11),
            (whole, outer),
            (blocks, likelihood.outer_product(family, theta, rows)),
        )


def test_flat_vector_and_names_agree():
    for family in FAMILIES.values():
        theta = np.arange(family.size(D), dtype=np.float64)
        params = unflatten(family, theta, D)
        with jax.enable_x64(True):
            np.testing.assert_array_equal(flatten(family, params, D), theta)
        names = parameter_names(family, D)
        assert len(set(names)) == len(names) == theta.size
        for position, name in enumerate(names):
            base, _, index = name.partition("[")
            place = tuple(int(i) for i in index.rstrip("]").split(",")) if index else ()
            assert params[base][place] == position


def test_a_wrong_shape_or_name_is_named():
    family = FAMILIES["linear"]
    with jax.enable_x64(True):
        params = unflatten(family, np.zeros(family.size(D)), D)
        with pytest.raises(ValueError, match=r"params\['beta'\] has shape \(3,\)"):
            flatten(family, params | {"beta": np.zeros(3)}, D)
        with pytest.raises(ValueError, match="params names"):
            flatten(family, {"beta": np.zeros(D)}, D)
