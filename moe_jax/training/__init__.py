"""Training shared by every family: optimiser, step, loop, checkpoints, metrics, progress.

A model of one's own needs a loss, and a weight by which micro-batches share in it. Here a linear
regression whose last rows are padding, in two micro-batches a step:

    import jax
    import jax.numpy as jnp
    import optax
    from moe_jax.training import init_state, make_train_step

    def batch_weight(batch):
        return jnp.sum(batch["mask"], dtype=jnp.float32)

    def loss_function(params, model_state, batch, share, key):
        error = jnp.where(batch["mask"], batch["x"] @ params["w"] - batch["y"], 0.0)
        loss = jnp.sum(jnp.square(error)) / jnp.maximum(batch_weight(batch), 1.0)
        metrics = {"largest_error": jnp.max(jnp.abs(error))}  # averaged over micro-batches
        totals = {}  # summed over them, for update_model_state
        return loss * share, (metrics, totals)

    optimizer = optax.adam(0.1)
    train_step = make_train_step(loss_function, optimizer, batch_weight=batch_weight, accumulate=2)
    state = init_state(jax.random.key(0), {"w": jnp.zeros(3)}, optimizer)
    x = jax.random.normal(jax.random.key(1), (64, 3))
    batch = {"x": x, "y": x @ jnp.array([1.0, -2.0, 0.5]), "mask": jnp.arange(64) < 60}
    for _ in range(100):
        state, metrics = train_step(state, batch)
    print(metrics["loss"], state.params["w"])

A Flax model's variables become parameters and model state by `split_variables`, and variables again
by `variables_of(state)`. `train` is the loop around the step, with metrics, evaluations and
checkpoints; `moe_jax.language.main` shows it at work.
"""

from moe_jax.training.checkpoints import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    Checkpoints,
    CheckpointSaveError,
    Restored,
)
from moe_jax.training.compilation import keep_compiled_programs
from moe_jax.training.configs import from_mapping
from moe_jax.training.interrupts import Interrupts, exit_code
from moe_jax.training.loop import (
    Batches,
    LoopConfig,
    TrainingDivergedError,
    restore_or_init,
    train,
)
from moe_jax.training.memory import keep_freed_memory
from moe_jax.training.metrics import MetricWriter, read_metrics
from moe_jax.training.optimizer import OptimizerConfig, decay_mask, make_optimizer, make_schedule
from moe_jax.training.program import run_program
from moe_jax.training.progress import Progress
from moe_jax.training.state import TrainState, init_state, split_variables, variables_of
from moe_jax.training.step import LossFunction, make_train_step
from moe_jax.training.workdir import WorkdirError, lock_workdir, prepare_workdir

__all__ = [
    "Batches",
    "CheckpointCorruptError",
    "CheckpointMismatchError",
    "CheckpointSaveError",
    "Checkpoints",
    "Interrupts",
    "LoopConfig",
    "LossFunction",
    "MetricWriter",
    "OptimizerConfig",
    "Progress",
    "Restored",
    "TrainState",
    "TrainingDivergedError",
    "WorkdirError",
    "decay_mask",
    "exit_code",
    "from_mapping",
    "init_state",
    "keep_compiled_programs",
    "keep_freed_memory",
    "lock_workdir",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "prepare_workdir",
    "read_metrics",
    "restore_or_init",
    "run_program",
    "split_variables",
    "train",
    "variables_of",
]
