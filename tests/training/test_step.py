import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.training.state import init_state
from moe_jax.training.step import make_train_step

OPTIMIZER = optax.adam(0.1)


@jax.custom_vjp
def with_gradient(w, gradient):
    """0, with any gradient one wishes for."""
    return jnp.zeros((), jnp.float32)


with_gradient.defvjp(
    lambda w, gradient: (with_gradient(w, gradient), gradient),
    lambda gradient, out_gradient: (gradient * out_gradient, None),
)


def loss_function(params, model_state, batch, share, key):
    """Weighted mean of squared distances to the rows of x, plus what spoils it."""
    weight = batch["weight"]
    distance = jnp.sum(jnp.square(params["w"][None, :] - batch["x"]), axis=1)
    mean = jnp.sum(distance * weight) / jnp.maximum(jnp.sum(weight), 1e-9)
    loss = mean + jnp.sum(batch["poison"]) + with_gradient(params["w"], batch["slope"][0])
    metrics = {"mean": mean, "draw": jax.random.uniform(key, (), jnp.float32)}
    return loss * share, (metrics, {"rows": jnp.sum(batch["weight"] > 0, dtype=jnp.int32)})


def batch_weight(batch):
    return jnp.sum(batch["weight"])


def count_rows(model_state, totals):
    return {"rows": model_state["rows"] + totals["rows"], "steps": model_state["steps"] + 1}


def make_step(accumulate=1, optimizer=OPTIMIZER):
    return make_train_step(
        loss_function,
        optimizer,
        batch_weight=batch_weight,
        accumulate=accumulate,
        update_model_state=count_rows,
    )


STEP = make_step()
STEP_IN_PARTS = make_step(4)


def init(optimizer=OPTIMIZER):
    params = {"w": jnp.asarray([0.5, -1.0], jnp.float32)}
    model_state = {"rows": jnp.int32(0), "steps": jnp.int32(0)}
    return init_state(jax.random.key(7), params, optimizer, model_state)


def batch_of(seed=0, weight=(1.0, 1.0, 1.0, 1.0), loss=0.0, slope=0.0, row=2):
    """Four rows; `loss` and `slope` are added to the loss and gradient at one of them."""
    rng = np.random.default_rng(seed)
    at_row = (np.arange(4) == row).astype(np.float32)
    return {
        "x": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32),
        "weight": jnp.asarray(weight, jnp.float32),
        "poison": jnp.asarray(np.where(at_row, loss, 0.0), jnp.float32),
        "slope": jnp.full((4, 2), slope, jnp.float32),
    }


def copied(tree):
    """Host copies, for the step deletes what it is given."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(first, second):
    assert len(first) == len(second)
    for left, right in zip(first, second, strict=True):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes()


def test_step_is_the_optimisers():
    batch = batch_of()
    state, metrics = STEP(init(), batch)
    params = init().params
    difference = np.asarray(params["w"])[None] - np.asarray(batch["x"])
    gradient = {"w": jnp.asarray(2 * difference.mean(axis=0))}
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = OPTIMIZER.update(gradient, OPTIMIZER.init(params), params)
    np.testing.assert_allclose(state.params["w"], params["w"] + updates["w"], rtol=1e-5)
    for got, expected in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(opt_state), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4)
    loss = (difference**2).sum(axis=1).mean()
    np.testing.assert_allclose([metrics["loss"], metrics["mean"]], loss, rtol=1e-6)
    assert metrics["gradient_norm"] == pytest.approx(np.linalg.norm(gradient["w"]), rel=1e-5)
    assert metrics["update_applied"] and metrics["skipped"] == metrics["skipped_in_row"] == 0
    assert int(state.step) == 1


@pytest.mark.parametrize("weight", [(1, 1, 1, 1), (3, 0, 1, 6), (0, 0, 0, 2), (0.1, 0.2, 0, 0.1)])
def test_accumulation_sums_parts_by_their_share_of_the_weight(weight):
    optimizer = optax.sgd(1.0)
    whole, whole_metrics = make_step(1, optimizer)(init(optimizer), batch_of(weight=weight))
    for accumulate in (2, 4):
        step = make_step(accumulate, optimizer)
        state, metrics = step(init(optimizer), batch_of(weight=weight))
        np.testing.assert_allclose(state.params["w"], whole.params["w"], rtol=1e-5)
        for name in ("loss", "mean", "gradient_norm"):
            np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-5, err_msg=name)


def test_model_state_is_updated_once_a_step_from_totals_over_all_parts():
    for accumulate in (1, 2, 4):
        state, _ = make_step(accumulate)(init(), batch_of(weight=(3, 0, 1, 6)))
        assert int(state.model_state["rows"]) == 3 and int(state.model_state["steps"]) == 1


def test_model_state_without_an_update_stays():
    step = make_train_step(loss_function, OPTIMIZER, batch_weight=batch_weight)
    state, _ = step(init(), batch_of())
    assert int(state.model_state["rows"]) == int(state.model_state["steps"]) == 0


def test_batch_without_weight_has_no_gradient():
    state, metrics = STEP_IN_PARTS(init(), batch_of(weight=(0, 0, 0, 0)))
    assert metrics["loss"] == 0.0 and metrics["gradient_norm"] == 0.0
    np.testing.assert_array_equal(state.params["w"], init().params["w"])


@pytest.mark.parametrize("step", [STEP, STEP_IN_PARTS], ids=["whole", "in_parts"])
@pytest.mark.parametrize(
    "fault",
    [{"loss": np.nan}, {"loss": np.inf}, {"loss": -np.inf}, {"slope": np.inf}, {"slope": np.nan}],
    ids=lambda fault: "-".join(f"{name}={value}" for name, value in fault.items()),
)
def test_non_finite_step_changes_no_bit_of_parameters_and_optimiser(step, fault):
    state, _ = step(init(), batch_of(0))
    params, opt_state = copied(state.params), copied(state.opt_state)
    model_state = copied(state.model_state)
    for skipped in (1, 2):
        state, metrics = step(state, batch_of(skipped, **fault))
        assert_same_bits(copied(state.params), params)
        assert_same_bits(copied(state.opt_state), opt_state)
        assert_same_bits(copied(state.model_state), model_state)
        assert not metrics["update_applied"]
        assert metrics["skipped"] == metrics["skipped_in_row"] == skipped
        assert int(state.step) == 1 + skipped
        assert not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["gradient_norm"]))
    state, metrics = step(state, batch_of(3))
    assert metrics["update_applied"] and metrics["skipped"] == 2
    assert metrics["skipped_in_row"] == int(state.skipped_in_row) == 0
    assert int(state.step) == 4 and int(state.skipped) == 2
    assert not np.array_equal(state.params["w"], params[0])


def test_infinite_gradient_of_a_finite_loss_is_caught():
    _, metrics = STEP(init(), batch_of(slope=np.inf))
    assert np.isfinite(metrics["loss"]) and not metrics["update_applied"]


def test_skipped_step_leaves_no_trace_in_the_next():
    direct, _ = STEP(init(), batch_of(1))
    state, _ = STEP(init(), batch_of(0, loss=np.nan))
    state, _ = STEP(state, batch_of(1))
    assert_same_bits(copied(direct.params), copied(state.params))


def test_state_is_donated():
    state = init()
    leaves = jax.tree.leaves(state)
    # A buffer that cannot be reused is a warning, and a warning is an error here.
    STEP(state, batch_of())
    assert all(leaf.is_deleted() for leaf in leaves)


def test_draws_differ_between_steps_and_parts_and_repeat_with_the_key():
    key = jax.random.key(7)
    state, draws = init(), []
    for seed in range(3):
        state, metrics = STEP(state, batch_of(seed))
        draws.append(float(metrics["draw"]))
        expected = jax.random.uniform(jax.random.fold_in(key, seed), (), jnp.float32)
        assert draws[-1] == pytest.approx(float(expected), rel=1e-6)
    assert len(set(draws)) == 3
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(key))
    step_key = jax.random.fold_in(key, 0)
    parts = [jax.random.uniform(jax.random.fold_in(step_key, part), ()) for part in range(4)]
    _, metrics = STEP_IN_PARTS(init(), batch_of())
    assert metrics["draw"] == pytest.approx(float(np.mean(parts)), rel=1e-6)


def test_later_steps_compile_nothing():
    state = init()
    before = STEP._cache_size()
    for seed in range(3):
        state, _ = STEP(state, batch_of(seed))
    assert STEP._cache_size() <= max(before, 1)


def test_batch_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="batch of 4 is not divisible by accumulate=3"):
        make_step(3)(init(), batch_of())


@pytest.mark.parametrize("accumulate", [0, -2])
def test_number_of_parts_must_be_positive(accumulate):
    with pytest.raises(ValueError, match=f"accumulate={accumulate} must be at least 1"):
        make_step(accumulate)
