"""One optimiser step: accumulated gradients, and a guard that keeps non-finite ones out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from moe_jax.training.state import TrainState

LossFunction = Callable[
    [PyTree, PyTree, PyTree, Array, Array], tuple[Array, tuple[dict[str, Array], PyTree]]
]
"""(params, model_state, batch, share, key) -> (loss, (metrics, totals)); see `make_train_step`."""


def make_train_step(
    loss_function: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    batch_weight: Callable[[PyTree], Array],
    accumulate: int = 1,
    update_model_state: Callable[[PyTree, PyTree], PyTree] | None = None,
    shardings: tuple[PyTree, jax.sharding.Sharding] | None = None,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Builds the jitted step (state, batch) -> (state, metrics), which donates the state.

    With A = `accumulate` the batch's leading axis is cut into A equal parts, whose gradients are
    summed. `loss_function(params, model_state, part, share, key)` returns a part's loss, already
    scaled so that the sum over parts is the loss of the whole batch: `share` is the part's share of
    `batch_weight(batch)`, 1 without accumulation. Its metrics are averaged with the same shares,
    its totals, such as counts, are summed.

    `update_model_state(model_state, totals)` gives the model state after the step: once a step
    however many parts it has. None leaves it as it is.

    A step whose loss or gradient is not finite leaves parameters, model state and optimiser as they
    were; it is counted in `skipped` and `skipped_in_row`. The optimiser's own count, which its
    schedule and bias correction go by, is of applied steps: with s steps skipped the schedule ends
    s steps before its end. The metrics gain `loss`, `gradient_norm`, `update_applied` and both
    counters.

    `shardings` are those of the new state's leaves, in which it comes in too, and of every metric;
    None leaves them to the compiler.

    Raises:
        ValueError: at trace time, if the batch does not divide into `accumulate` parts.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} must be at least 1")
    gradient_function = jax.value_and_grad(loss_function, has_aux=True)

    def gradients(state: TrainState, batch: PyTree, key: Array) -> tuple[Any, PyTree]:
        fixed = state.params, state.model_state
        if accumulate == 1:
            return gradient_function(*fixed, batch, jnp.ones((), dtype=jnp.float32), key)
        parts = jax.tree.map(lambda leaf: _split(leaf, accumulate), batch)
        weights = jax.vmap(batch_weight)(parts).astype(jnp.float32)
        total_weight = jnp.sum(weights)
        # Without any weight every share is 0, and so are loss and gradient.
        shares = weights / jnp.where(total_weight > 0, total_weight, 1.0)

        def add_part(total: PyTree, inputs: tuple[PyTree, Array, Array]) -> tuple[PyTree, None]:
            part, share, index = inputs
            (loss, (metrics, totals)), gradient = gradient_function(
                *fixed, part, share, jax.random.fold_in(key, index)
            )
            metrics = jax.tree.map(lambda leaf: leaf * share, metrics)
            new = (loss, (metrics, totals)), gradient
            return jax.tree.map(jnp.add, total, new), None

        first = jax.tree.map(lambda leaf: leaf[0], parts)
        shapes = jax.eval_shape(gradient_function, *fixed, first, shares[0], key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        index = jnp.arange(accumulate, dtype=jnp.int32)
        return jax.lax.scan(add_part, zeros, (parts, shares, index))[0]

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(state.key, state.step)
        (loss, (metrics, totals)), gradient = gradients(state, batch, key)
        gradient_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        # Optax mixes its integer counter with Python floats, which a strict session forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        model_state = state.model_state
        if update_model_state is not None:
            model_state = update_model_state(model_state, totals)
        skipped_in_row = jnp.where(finite, 0, state.skipped_in_row + 1)
        new_state = TrainState(
            step=state.step + 1,
            params=_select(finite, params, state.params),
            model_state=_select(finite, model_state, state.model_state),
            opt_state=_select(finite, opt_state, state.opt_state),
            key=state.key,
            skipped=state.skipped + (~finite).astype(jnp.int32),
            skipped_in_row=skipped_in_row,
        )
        metrics = metrics | {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "update_applied": finite,
            "skipped": new_state.skipped,
            "skipped_in_row": skipped_in_row,
        }
        return new_state, metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


def _split(leaf: Array, parts: int) -> Array:
    if leaf.shape[0] % parts:
        raise ValueError(f"batch of {leaf.shape[0]} is not divisible by accumulate={parts}")
    return leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:])


def _select(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
