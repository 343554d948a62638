"""What a training run carries from step to step."""

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
        opt_state: the optimiser's state.
        key: typed random key of the run; step keys are folded from it.
        skipped: int32[], updates skipped because loss or gradient was not finite.
        skipped_in_row: int32[], those since the last update that was applied.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    key: Array
    skipped: Array
    skipped_in_row: Array


def init_state(key: Array, params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step; `key` is kept for the run's own draws.

    A step that donates the state deletes `params` and `key` with it.
    """
    return TrainState(
        # Separate arrays: the step donates the state, and one buffer cannot be donated twice.
        step=jnp.zeros((), dtype=jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=key,
        skipped=jnp.zeros((), dtype=jnp.int32),
        skipped_in_row=jnp.zeros((), dtype=jnp.int32),
    )
