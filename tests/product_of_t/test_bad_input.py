"""Targets and arguments that a fit must refuse, survive or warn of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from moe_jax.product_of_t import SAFEGUARDED, FitSettings, fit_product_of_t, full_experts
from tests.product_of_t.test_fit import SMALL, fit_given, in_family

KEY = jax.random.key(0)


def standard_normal(z):
    return -0.5 * z @ z


def test_target_without_a_value_at_some_samples():
    """NaN on one side, +inf on another: no weight there, counted, said, and the rest is right."""

    def broken(z):
        value = jnp.where(z[0] > 3.5, jnp.nan, in_family(z))
        return jnp.where(z[1] < -2.5, jnp.inf, value)

    with pytest.warns(UserWarning, match="not finite at .* samples, which got no weight"):
        result = fit_given(broken)
    assert 0 < result.history.num_nonfinite.sum() < 0.2 * 60 * 128
    assert not result.trusted
    # Weights that depend on z alone leave the truth the minimiser.
    np.testing.assert_allclose(result.history.exponents[-1], [1.2, 0.9, 0.8, 1.6], atol=0.02)
    assert np.all(np.isfinite(result.draws)) and np.isfinite(result.log_evidence)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_target_without_a_value_anywhere(value):
    with pytest.raises(ValueError, match="target is not finite at any of the 8 starts"):
        fit_product_of_t(KEY, lambda z: value + 0.0 * z[0], 2)


def test_improper_target_is_said_to_be():
    """A constant density: the exponents sink to their bound, where q has no moments."""
    with pytest.warns(UserWarning, match="") as caught:
        result = fit_given(lambda z: 0.0 * z[0])
    assert tuple(str(each.message) for each in caught) == result.warnings
    assert any("the target may be improper" in sentence for sentence in result.warnings)
    assert any("k-hat" in sentence for sentence in result.warnings) and not result.trusted
    # nu = 2 A - D at its least, 0.5.
    assert result.history.exponent_sum[-1] == pytest.approx(0.5 * (2 + 0.5), rel=1e-6)


def test_single_precision_target_with_one_expert_in_one_dimension():
    """Student's t in float32 arithmetic, K = 1, D = 1: exponent 2.5 is found."""
    scale = jnp.float32(0.5)

    def target(z):
        total, _ = jax.lax.scan(lambda c, x: (c + x, None), jnp.float32(0), z[None, 0] * scale)
        return -jnp.float32(2.5) * jnp.log1p(total**2)

    result = fit_product_of_t(
        KEY,
        target,
        1,
        experts=full_experts(jnp.zeros((1, 1)), jnp.full((1, 1, 1), 0.25)),
        settings=dataclasses.replace(SMALL, num_draws=400),
    )
    assert result.history.exponents[-1, 0] == pytest.approx(2.5, abs=1e-3)
    assert result.draws.dtype == np.float64 and result.draws.shape == (400, 1)


def test_identical_experts_share_their_exponent():
    loc = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    precision = np.tile(np.eye(2), (4, 1, 1))
    # Two experts are not the target's four, which the weights tell.
    with np.errstate(all="raise"), pytest.warns(UserWarning, match="take result.pool's"):
        result = fit_given(in_family, loc=loc, precision=precision)
    exponents = result.history.exponents
    assert np.all(np.isfinite(exponents))
    np.testing.assert_allclose(exponents[-1, 0], exponents[-1, 1], rtol=1e-3)
    np.testing.assert_allclose(exponents[-1, 2], exponents[-1, 3], rtol=1e-3)


@pytest.mark.parametrize(
    "target, message",
    [
        (lambda z: z, r"returns shape \(2,\) for an argument of shape \(2,\)"),
        (lambda z: jnp.zeros(1) + z[0], r"returns shape \(1,\)"),
    ],
)
def test_log_density_of_the_wrong_shape(target, message):
    with pytest.raises(ValueError, match=message):
        fit_product_of_t(KEY, target, 2)


def test_models_without_a_density():
    def discrete():
        kind = numpyro.sample("kind", dist.Bernoulli(0.3))
        numpyro.sample("x", dist.Normal(kind, 1.0))

    def nothing():
        numpyro.sample("x", dist.Normal(0.0, 1.0), obs=1.0)

    with pytest.raises(ValueError, match=r"discrete latent sites \['kind'\]"):
        fit_product_of_t(KEY, discrete)
    with pytest.raises(ValueError, match="no latent site"):
        fit_product_of_t(KEY, nothing)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dim": 0}, "dim=0: expected at least 1"),
        ({"dim": 3, "starts": np.zeros((4, 2))}, r"starts of shape \(4, 2\)"),
        ({"starts": np.full((4, 2), np.nan)}, "starts has an entry that is not finite"),
        ({"dim": 2, "model_args": (1.0,)}, "expected none with a log density"),
        ({"dim": 2, "exponents": np.ones(3)}, "exponents are given without experts"),
        (
            {"dim": 3, "experts": full_experts(jnp.zeros((1, 2)), jnp.eye(2)[None])},
            "experts of dimension 2: expected the target's, 3",
        ),
        (
            {
                "dim": 2,
                "experts": full_experts(jnp.zeros((1, 2)), jnp.eye(2)[None]),
                "exponents": np.array([1.0]),
            },
            "sum to 1: expected more than D / 2",
        ),
        (
            {
                "dim": 2,
                "settings": dataclasses.replace(SAFEGUARDED, ladder=False, local_experts=0),
            },
            "no positive definite expert is left",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    dim = arguments.pop("dim", None)
    with pytest.raises(ValueError, match=message):
        fit_product_of_t(KEY, standard_normal, dim, **arguments)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rounds": 0}, "rounds=0: expected at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: expected more than 0"),
        ({"score_clip": -1.0}, "score_clip=-1.0"),
        ({"sampler": "nuts"}, "sampler='nuts': expected one of"),
        ({"local_scales": ()}, "local_scales"),
        ({"value_weight": -0.1}, "value_weight=-0.1: expected at least 0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        FitSettings(**settings)
