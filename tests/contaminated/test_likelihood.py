"""Exact score and observed information against autodiff, for every family (test T7)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.contaminated_exact import (
    DERIVATIVE_TOLERANCE,
    FAMILIES,
    D,
    make_rows,
    measure_derivatives,
)
from moe_jax.contaminated import likelihood
from moe_jax.contaminated.layout import flatten, parameter_names, unflatten


@pytest.mark.parametrize("name", FAMILIES)
def test_score_and_information_are_autodiffs(name):
    for what, difference in measure_derivatives(name).items():
        assert difference < DERIVATIVE_TOLERANCE, what


def test_density_is_the_mixture_written_out():
    family = FAMILIES["two linear"]
    with jax.enable_x64(True):
        theta, rows = make_rows(family)
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
        theta, rows = make_rows(family)
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
        theta, rows = make_rows(family, rows=23)
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
