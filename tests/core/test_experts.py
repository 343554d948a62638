import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import ExpertFFN, FeedForward, matmul

EXPERTS, MODEL, HIDDEN = 3, 4, 5
GROUP_SIZES = jnp.array([3, 0, 2])
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def reference(weights, x, activation="silu"):
    """down(activation(gate x) * (up x)) in float64."""
    x, gate, up, down = (
        np.asarray(array, np.float64)
        for array in (x, weights["gate"], weights["up"], weights["down"])
    )
    z = x @ gate
    if activation == "silu":
        activated = z / (1 + np.exp(-z))
    else:
        activated = z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    return (activated * (x @ up)) @ down


def random_weights(*leading, hidden=HIDDEN):
    generator = np.random.default_rng(0)
    shapes = {"gate": (MODEL, hidden), "up": (MODEL, hidden), "down": (hidden, MODEL)}
    return {
        name: jnp.asarray(generator.standard_normal(leading + shape), jnp.float32)
        for name, shape in shapes.items()
    }


def random_rows(num_rows=7):
    return jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, MODEL)), jnp.float32)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@functools.partial(jax.jit, static_argnums=0)
def answers_and_gradients(layer, weights, rows):
    def loss(weights, rows):
        out = layer.apply({"params": weights}, rows, GROUP_SIZES)
        # The rows past the sum count too, as they would under a bias.
        return jnp.sum(jnp.sin(out.astype(jnp.float32) + 1.0)), out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, rows)
    return out, gradients


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("silu", jnp.float32), ("gelu", jnp.float32), ("silu", jnp.bfloat16)],
)
def test_each_group_is_answered_by_its_expert_and_the_rest_by_0(activation, dtype):
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, activation=activation, dtype=dtype)
    weights, rows = random_weights(EXPERTS), random_rows()
    out, _ = answers_and_gradients(layer, weights, rows)
    expected = np.zeros((7, MODEL))
    for expert, group in ((0, slice(0, 3)), (2, slice(3, 5))):
        mine = {name: leaf[expert] for name, leaf in weights.items()}
        expected[group] = reference(mine, rows[group], activation)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert not np.any(out[5:])


def test_rows_past_the_sum_and_empty_groups_give_no_gradient():
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN)
    weights, rows = random_weights(EXPERTS), random_rows()
    clean = answers_and_gradients(layer, weights, rows)
    dirty = answers_and_gradients(layer, weights, rows.at[5:].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    _, (weight_gradients, row_gradient) = dirty
    assert not np.any(row_gradient[5:]) and np.all(row_gradient[:5] != 0.0)
    for leaf in weight_gradients.values():
        assert not np.any(leaf[1]) and np.all(leaf[0] != 0.0) and np.all(leaf[2] != 0.0)


def test_products_take_rows_cast_to_their_type():
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, dtype=jnp.bfloat16)
    weights, rows = random_weights(EXPERTS), random_rows()
    rounded = rows.astype(jnp.bfloat16).astype(jnp.float32)
    assert np.any(rounded != rows)
    np.testing.assert_array_equal(
        answers_and_gradients(layer, weights, rows)[0],
        answers_and_gradients(layer, weights, rounded)[0],
    )


@pytest.mark.parametrize(("activation", "dtype"), [("silu", jnp.float32), ("gelu", jnp.bfloat16)])
def test_feed_forward_agrees_with_a_plain_reference_whatever_the_leading_axes(activation, dtype):
    layer = FeedForward(hidden_dim=HIDDEN, activation=activation, dtype=dtype)
    weights, x = random_weights(), random_rows(6)
    out = jax.jit(layer.apply)({"params": weights}, x.reshape(2, 3, 1, MODEL))
    assert out.dtype == dtype
    expected = reference(weights, x, activation).reshape(2, 3, 1, MODEL)
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_hidden_units_do_not_interact():
    # What lets several shared experts be one network of their joint width.
    weights, x = random_weights(hidden=2 * HIDDEN), random_rows()
    halves = [
        {name: leaf[part] if name == "down" else leaf[:, part] for name, leaf in weights.items()}
        for part in (slice(HIDDEN), slice(HIDDEN, None))
    ]
    out = jax.jit(FeedForward(hidden_dim=2 * HIDDEN).apply)({"params": weights}, x)
    assert relative_error(out, sum(reference(half, x) for half in halves)) < 1e-5


def test_parameters_start_at_the_scale_of_their_fan_in_and_differ_between_experts():
    model, hidden, scale = 64, 128, 0.25
    options = {"hidden_dim": hidden, "down_scale": scale, "dtype": jnp.bfloat16}
    rows = jnp.zeros((8, model))

    @jax.jit
    def init(key):
        experts = ExpertFFN(num_experts=4, **options).init(key, rows, jnp.array([8, 0, 0, 0]))
        return experts["params"], FeedForward(**options).init(key, rows)["params"]

    experts, alone = init(jax.random.key(0))
    shapes = {"gate": (model, hidden), "up": (model, hidden), "down": (hidden, model)}
    deviations = {"gate": model**-0.5, "up": model**-0.5, "down": scale * hidden**-0.5}
    for name, shape in shapes.items():
        assert experts[name].shape == (4, *shape) and alone[name].shape == shape
        assert experts[name].dtype == alone[name].dtype == jnp.float32
        for matrix in (*experts[name], alone[name]):
            # 8192 draws estimate a standard deviation to 0.8 %; 5 % is six times that.
            assert np.std(matrix) == pytest.approx(deviations[name], rel=0.05)
        assert np.unique(experts[name], axis=0).shape[0] == 4


def test_matmul_accumulates_in_float32_and_keeps_the_type_of_its_input():
    # Counting in bfloat16 sticks at 256.
    out = matmul(jnp.ones((2, 3, 512), jnp.bfloat16), jnp.ones((512, 1), jnp.bfloat16))
    assert out.dtype == jnp.bfloat16 and out.shape == (2, 3, 1)
    np.testing.assert_array_equal(out.astype(jnp.float32), 512.0)


@pytest.mark.parametrize(
    ("layer", "group_sizes"),
    [
        (ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, activation="tanh"), (GROUP_SIZES,)),
        (FeedForward(hidden_dim=HIDDEN, activation="tanh"), ()),
    ],
)
def test_unknown_activation_is_refused(layer, group_sizes):
    with pytest.raises(ValueError) as error:
        layer.init(jax.random.key(0), random_rows(), *group_sizes)
    assert str(error.value) == "activation='tanh' is not one of ('silu', 'gelu', 'relu')"


def test_group_sizes_of_another_number_of_experts_are_refused():
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN)
    # Outside the tests nothing checks annotations.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError) as error:
            layer.apply({"params": random_weights(EXPERTS)}, random_rows(), jnp.array([3, 4]))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert str(error.value) == (
        "lhs (7, 4), rhs (3, 4, 5) and group_sizes (2,) do not fit: "
        "expected [rows, inner], [groups, inner, outer] and [groups]"
    )
