import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import ExpertFFN, FeedForward, matmul
from moe_jax.core.experts import FUSED_EQUAL_ROWS

EXPERTS, MODEL, HIDDEN = 3, 4, 5
GROUP_SIZES = jnp.array([3, 0, 2])
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def reference(weights, x, activation="silu"):
    """down(activation(gate x) * (up x)), or down(activation(up x)) without a gate, in float64."""
    x = np.asarray(x, np.float64)
    weights = {name: np.asarray(leaf, np.float64) for name, leaf in weights.items()}
    up = x @ weights["up"]
    z = x @ weights["gate"] if "gate" in weights else up
    activated = {
        "silu": z / (1 + np.exp(-z)),
        "gelu": z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
        "relu": np.maximum(z, 0.0),
    }[activation]
    return (activated * up if "gate" in weights else activated) @ weights["down"]


def random_weights(*leading, hidden=HIDDEN, gated=True):
    generator = np.random.default_rng(0)
    shapes = {"gate": (MODEL, hidden), "up": (MODEL, hidden), "down": (hidden, MODEL)}
    return {
        name: jnp.asarray(generator.standard_normal(leading + shape), jnp.float32)
        for name, shape in shapes.items()
        if gated or name != "gate"
    }


def random_rows(num_rows=7):
    return jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, MODEL)), jnp.float32)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@functools.partial(jax.jit, static_argnums=0)
def answers_and_gradients(layer, weights, rows, group_sizes=GROUP_SIZES):
    def loss(weights, rows):
        out = layer.apply({"params": weights}, rows, group_sizes)
        # The rows past the sum count too, as they would under a bias.
        return jnp.sum(jnp.sin(out.astype(jnp.float32) + 1.0)), out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, rows)
    return out, gradients


every_kind = pytest.mark.parametrize(
    ("activation", "gated", "dtype"),
    [
        ("silu", True, jnp.float32),
        ("gelu", True, jnp.bfloat16),
        ("relu", False, jnp.float32),
    ],
)


@every_kind
def test_each_group_is_answered_by_its_expert_and_the_rest_by_0(activation, gated, dtype):
    layer = ExpertFFN(
        num_experts=EXPERTS, hidden_dim=HIDDEN, activation=activation, gated=gated, dtype=dtype
    )
    weights, rows = random_weights(EXPERTS, gated=gated), random_rows()
    out, _ = answers_and_gradients(layer, weights, rows)
    expected = np.zeros((7, MODEL))
    for expert, group in ((0, slice(0, 3)), (2, slice(3, 5))):
        mine = {name: leaf[expert] for name, leaf in weights.items()}
        expected[group] = reference(mine, rows[group], activation)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert not np.any(out[5:])


@every_kind
def test_groups_without_sizes_are_equal(activation, gated, dtype):
    layer = ExpertFFN(
        num_experts=EXPERTS, hidden_dim=HIDDEN, activation=activation, gated=gated, dtype=dtype
    )
    weights, rows = random_weights(EXPERTS, gated=gated), random_rows(2 * EXPERTS)
    equal = answers_and_gradients(layer, weights, rows, None)
    sized = answers_and_gradients(layer, weights, rows, jnp.full(EXPERTS, 2))
    assert equal[0].dtype == dtype
    for actual, expected in zip(jax.tree.leaves(equal), jax.tree.leaves(sized), strict=True):
        assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_implementation_gives_the_same(dtype):
    weights, rows = random_weights(EXPERTS), random_rows()
    first, *others = (
        answers_and_gradients(
            ExpertFFN(
                num_experts=EXPERTS, hidden_dim=HIDDEN, dtype=dtype, implementation=implementation
            ),
            weights,
            rows,
        )
        for implementation in ("loop", "dense", "ragged_dot")
    )
    for other in others:
        for actual, expected in zip(jax.tree.leaves(other), jax.tree.leaves(first), strict=True):
            assert relative_error(actual, expected) < TOLERANCE[dtype]


def test_large_equal_groups_of_bfloat16_agree_with_sized_ones():
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, dtype=jnp.bfloat16)
    weights, rows = random_weights(EXPERTS), random_rows(EXPERTS * (FUSED_EQUAL_ROWS + 1))
    equal = answers_and_gradients(layer, weights, rows, None)
    sized = answers_and_gradients(layer, weights, rows, jnp.full(EXPERTS, FUSED_EQUAL_ROWS + 1))
    for actual, expected in zip(jax.tree.leaves(equal), jax.tree.leaves(sized), strict=True):
        assert relative_error(actual, expected) < TOLERANCE[jnp.bfloat16]


def dropped(layer, rows, group_sizes, row_ids, seed=0):
    """Answers while training."""
    return jax.jit(
        lambda rows: layer.apply(
            {"params": random_weights(EXPERTS)},
            rows,
            group_sizes,
            deterministic=False,
            row_ids=row_ids,
            rngs={"dropout": jax.random.key(seed)},
        )
    )(rows)


def test_dropout_of_a_row_depends_on_the_key_and_its_number_alone():
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, dropout_rate=0.5)
    rows = jnp.tile(random_rows(1), (6, 1))
    ids = jnp.array([4, 9, 4, 7, 9, 4])
    out = dropped(layer, rows, jnp.array([6, 0, 0]), ids)
    for number in (4, 9):
        mine = out[np.asarray(ids) == number]
        np.testing.assert_array_equal(mine, np.broadcast_to(mine[0], mine.shape))
    assert np.any(out[0] != out[1])
    # Moving the rows moves the masks.
    np.testing.assert_array_equal(dropped(layer, rows, jnp.array([6, 0, 0]), ids[::-1]), out[::-1])
    assert np.any(dropped(layer, rows, jnp.array([6, 0, 0]), ids, seed=1) != out)


def test_dropout_keeps_the_mean_and_acts_in_training_only():
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, dropout_rate=0.25)
    rows = jnp.tile(random_rows(1), (3 * 4096, 1))
    kept = layer.apply({"params": random_weights(EXPERTS)}, rows[:3], None)
    out = dropped(layer, rows, None, None).reshape(EXPERTS, 4096, MODEL)
    error = np.std(out, axis=1) / math.sqrt(4096)
    # 12 means, each within 5 standard errors: false alarm rate 7e-6.
    assert np.all(np.abs(np.mean(out, axis=1) - kept) < 5.0 * error)
    assert np.all(error > 0.0)


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


@every_kind
def test_feed_forward_agrees_with_a_plain_reference_whatever_the_leading_axes(
    activation, gated, dtype
):
    layer = FeedForward(hidden_dim=HIDDEN, activation=activation, gated=gated, dtype=dtype)
    weights, x = random_weights(gated=gated), random_rows(6)
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
    assert str(error.value) == "group_sizes (2,) do not fit num_experts=3"


@pytest.mark.parametrize(
    ("options", "num_rows", "message"),
    [
        ({"dropout_rate": 1.0}, 6, "dropout_rate=1.0 is not in [0, 1)"),
        ({"dropout_rate": -0.1}, 6, "dropout_rate=-0.1 is not in [0, 1)"),
        ({}, 7, "rows=7 do not divide into num_experts=3 equal groups"),
    ],
)
def test_options_out_of_range_are_refused(options, num_rows, message):
    layer = ExpertFFN(num_experts=EXPERTS, hidden_dim=HIDDEN, **options)
    with pytest.raises(ValueError) as error:
        layer.init(jax.random.key(0), random_rows(num_rows))
    assert str(error.value) == message
