import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.training.optimizer import OptimizerConfig, decay_mask, make_optimizer, make_schedule

COSINE = OptimizerConfig(learning_rate=2.0, schedule="cosine", warmup_steps=10, final_fraction=0.1)
STABLE = dataclasses.replace(COSINE, schedule="stable", decay_fraction=0.2)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax mixes its integer counter with Python floats, as `make_train_step` lets it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("config", "num_steps", "points"),
    [
        # 2 (0.1 + 0.9 (1 + cos(pi x)) / 2) at x = 0, 1/2 and 1 of the 100 steps after warm-up.
        (COSINE, 110, {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.1, 110: 0.2}),
        # The last 20 of the 100 steps after warm-up fall from 2 to 0.2.
        (STABLE, 110, {0: 0.0, 5: 1.0, 10: 2.0, 50: 2.0, 90: 2.0, 100: 1.1, 110: 0.2}),
        (dataclasses.replace(STABLE, decay_fraction=0.0), 110, {10: 2.0, 108: 2.0, 109: 2.0}),
        (dataclasses.replace(STABLE, decay_fraction=1.0), 110, {10: 2.0, 60: 1.1, 110: 0.2}),
        (dataclasses.replace(COSINE, warmup_steps=0), 100, {0: 2.0, 50: 1.1, 100: 0.2}),
        (dataclasses.replace(STABLE, warmup_steps=0), 100, {0: 2.0, 79: 2.0, 90: 1.1, 100: 0.2}),
        # The warm-up is cut to the run: no step is left to fall in.
        (COSINE, 4, {0: 0.0, 1: 0.5, 3: 1.5, 4: 2.0}),
        (STABLE, 4, {0: 0.0, 1: 0.5, 3: 1.5, 4: 2.0}),
        (COSINE, 1, {0: 0.0, 1: 2.0}),
    ],
    ids=lambda value: value.schedule if isinstance(value, OptimizerConfig) else None,
)
def test_schedule_at_points_by_hand(config, num_steps, points):
    schedule = make_schedule(config, num_steps)
    for step, rate in points.items():
        assert schedule(jnp.int32(step)) == pytest.approx(rate, abs=1e-6), step


def test_decay_leaves_out_scales_biases_and_embeddings_however_stacked():
    leaf = jnp.zeros((3, 4), jnp.float32)
    params = {
        "embedding": leaf,
        "blocks_0": {
            "layer_0": {
                "attention_norm": {"scale": leaf},
                "attention": {"query": leaf, "query_norm": {"scale": leaf}},
                "moe": {"gate": leaf, "bias": leaf, "experts": {"down": jnp.zeros((3, 2, 4, 4))}},
            }
        },
        "head": leaf,
    }
    assert decay_mask(params) == {
        "embedding": False,
        "blocks_0": {
            "layer_0": {
                "attention_norm": {"scale": False},
                "attention": {"query": True, "query_norm": {"scale": False}},
                "moe": {"gate": True, "bias": False, "experts": {"down": True}},
            }
        },
        "head": True,
    }


def test_steps_are_those_of_adamw_with_clipping_and_decoupled_decay():
    config = OptimizerConfig(
        learning_rate=0.1,
        schedule="stable",
        warmup_steps=0,
        decay_fraction=0.0,
        weight_decay=0.5,
        beta1=0.8,
        beta2=0.9,
        epsilon=1e-3,
        max_gradient_norm=2.0,
    )
    optimizer = make_optimizer(config, num_steps=10)
    params = {"kernel": np.array([[1.0, -2.0]]), "scale": np.array([1.0, 0.5])}
    # Norms 5, which is cut to 2, and 1, which is not.
    gradients = [
        {"kernel": np.array([[3.0, 0.0]]), "scale": np.array([0.0, -4.0])},
        {"kernel": np.array([[0.6, 0.0]]), "scale": np.array([0.0, 0.8])},
    ]
    got = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    state = optimizer.init(got)
    mean, square = ({name: 0.0 for name in params} for _ in range(2))
    for step, gradient in enumerate(gradients, start=1):
        updates, state = optimizer.update(
            jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradient), state, got
        )
        got = optax.apply_updates(got, updates)
        norm = math.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
        for name, decay in (("kernel", 0.5), ("scale", 0.0)):
            clipped = gradient[name] * min(1.0, 2.0 / norm)
            mean[name] = 0.8 * mean[name] + 0.2 * clipped
            square[name] = 0.9 * square[name] + 0.1 * clipped**2
            direction = mean[name] / (1 - 0.8**step)
            direction = direction / (np.sqrt(square[name] / (1 - 0.9**step)) + 1e-3)
            params[name] = params[name] - 0.1 * (direction + decay * params[name])
            np.testing.assert_allclose(got[name], params[name], rtol=1e-5)


def test_first_step_of_a_warm_up_changes_nothing():
    optimizer = make_optimizer(COSINE, 110)
    params = {"kernel": jnp.ones((2, 2), jnp.float32)}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], 0.0)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("schedule", "linear", "is not one of"),
        ("learning_rate", 0.0, "must be positive"),
        ("learning_rate", math.nan, "must be positive"),
        ("epsilon", -1e-8, "must be positive"),
        ("max_gradient_norm", 0.0, "must be positive"),
        ("warmup_steps", -1, "must not be negative"),
        ("weight_decay", -0.1, "must not be negative"),
        ("decay_fraction", 1.5, r"must be in \[0, 1\]"),
        ("final_fraction", -0.1, r"must be in \[0, 1\]"),
        ("final_fraction", math.nan, r"must be in \[0, 1\]"),
        ("beta1", 1.0, r"must be in \[0, 1\)"),
        ("beta2", -0.1, r"must be in \[0, 1\)"),
    ],
)
def test_value_out_of_range_is_named(field, value, accepted):
    with pytest.raises(ValueError, match=f"^{field}={value!r} {accepted}"):
        OptimizerConfig(**{field: value})
