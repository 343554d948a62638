"""What a training run carries from step to step."""

from collections.abc import Mapping

import chex
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree


@chex.dataclass(frozen=True)
class TrainState:
    """Everything a checkpoint must hold, the position in the data excepted.

    Attributes:
        step: int32[], updates attempted so far, skipped ones included.
        params: parameters, float32.
        model_state: what the model carries that no optimiser trains, such as the balance bias of a
            router: no gradient, no optimiser state, no weight decay. Empty for most models.
        opt_state: the optimiser's state.
        key: typed random key of the run; step keys are folded from it.
        skipped: int32[], updates skipped because loss or gradient was not finite.
        skipped_in_row: int32[], those since the last update that was applied.
    """

    step: Array
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    key: Array
    skipped: Array
    skipped_in_row: Array


def variables_of(state: TrainState) -> dict[str, PyTree]:
    """What a Flax module's `apply` takes: the parameters and the model state."""
    return {"params": state.params, **state.model_state}


def split_variables(variables: Mapping[str, PyTree]) -> tuple[PyTree, dict[str, PyTree]]:
    """The parameters and the model state of what a Flax module's `init` gives."""
    model_state = dict(variables)
    return model_state.pop("params"), model_state


def init_state(
    key: Array,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    model_state: PyTree | None = None,
) -> TrainState:
    """State before the first step; `key` is kept for the run's own draws.

    A step that donates the state deletes `params`, `model_state` and `key` with it.
    """
    return TrainState(
        # Separate arrays: the step donates the state, and one buffer cannot be donated twice.
        step=jnp.zeros((), dtype=jnp.int32),
        params=params,
        model_state={} if model_state is None else model_state,
        opt_state=optimizer.init(params),
        key=key,
        skipped=jnp.zeros((), dtype=jnp.int32),
        skipped_in_row=jnp.zeros((), dtype=jnp.int32),
    )
