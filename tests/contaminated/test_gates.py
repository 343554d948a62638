import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.contaminated.gates import Columns, ConstantGate, CustomGate, LinearGate

X = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, 4.0], [2.0, 1.0, -1.0], [5.0, 0.5, 0.0]])


def columns():
    """Standardisation of X's columns; call it where float64 is enabled."""
    return Columns(jnp.array([1.0, -0.5, 2.0]), jnp.array([2.0, 0.1, 3.0]))


def bent(params, x):
    return params["a"] * jnp.tanh(x[:, 0]) + params["b"] ** 2


@pytest.mark.parametrize("gate", [LinearGate(), LinearGate(features=(2, 0)), ConstantGate()])
def test_standardising_and_mapping_back_leaves_the_log_odds(gate):
    with jax.enable_x64(True):
        design = gate.design(jnp.asarray(X), columns())
        gamma = jnp.linspace(-1.0, 2.0, design.shape[1])
        user = gate.to_user(gamma, columns())
        plain = gate.logit(user, gate.design(jnp.asarray(X), None))
        np.testing.assert_allclose(plain, gate.logit(gamma, design), rtol=1e-12)
        np.testing.assert_allclose(gate.from_user(user, columns()), gamma, rtol=1e-12)
        assert user.size == sum(int(np.prod(shape)) for _, shape in gate.layout(3))


def test_features_choose_columns():
    with jax.enable_x64(True):
        gate = LinearGate(features=(2, 0))
        logit = gate.logit(jnp.array([10.0, 1.0, 0.25]), gate.design(jnp.asarray(X), None))
    # 10 * third column + first column + 0.25.
    np.testing.assert_allclose(logit, [6.25, 40.25, -7.75, 5.25])


def test_a_feature_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"features=\(0, 3\) of LinearGate"):
        LinearGate(features=(0, 3)).layout(3)


def test_custom_gate_ravels_its_parameters_and_equal_shapes_are_one_program():
    gate, other = CustomGate(bent, {"a": 1.0, "b": 2.0}), CustomGate(bent, {"a": 5.0, "b": 0.0})
    assert gate == other and hash(gate) == hash(other)
    assert gate != CustomGate(bent, {"a": np.ones(2), "b": 2.0})
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        np.testing.assert_allclose(
            gate.logit(gate.initial(3), gate.design(x, columns())), np.tanh(X[:, 0]) + 4.0
        )
        # d/da = tanh x, d/db = 2 b; the second derivative by b is 2 a row.
        slopes = gate.jacobian(gate.initial(3), x)
        np.testing.assert_allclose(slopes, np.stack([np.tanh(X[:, 0]), np.full(4, 4.0)], axis=1))
        weight = jnp.array([1.0, 2.0, 3.0, 4.0])
        expected = np.array([[0.0, 0.0], [0.0, 20.0]])
        np.testing.assert_allclose(gate.curvature(gate.initial(3), x, weight), expected)


def test_a_gate_that_does_not_give_one_value_a_row_is_named():
    with jax.enable_x64(True):
        gate = CustomGate(lambda params, x: params * x[:2, 0], np.ones(()))
        with pytest.raises(ValueError, match="the gate returns shape"):
            gate.logit(jnp.ones(1), jnp.asarray(X))
