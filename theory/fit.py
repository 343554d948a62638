"""Training of many seeds at once, in pieces that an interrupted run takes up again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from moe_jax.training import Checkpoints, OptimizerConfig, init_state, make_optimizer
from moe_jax.training.step import make_train_step
from theory.model import Stack, apply_stack, init_stack, likelihood_loss
from theory.problems import Problem

ONCE = {"xla_backend_optimization_level": 0}
"""For programs that run once: to compile them takes longer than to run them."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How every network of an experiment is trained.

    Attributes:
        num_seeds: initialisations and orders of the data, side by side.
        num_steps: of Adam, the rate falling as a cosine.
        batch_size: points a step, drawn with replacement.
        learning_rate: at the start.
        num_pieces: parts of the run; progress is shown and a stop asked for between them.
        scale_start, scale_end: s of the likelihood, geometric over 70% of the steps.
    """

    num_seeds: int = 8
    num_steps: int = 2000
    batch_size: int = 128
    learning_rate: float = 1e-2
    num_pieces: int = 10
    scale_start: float = 1.0
    scale_end: float = 0.1

    def __post_init__(self) -> None:
        for name in ("num_seeds", "num_steps", "batch_size", "num_pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_steps % self.num_pieces:
            raise ValueError(
                f"num_steps={self.num_steps} do not divide into num_pieces={self.num_pieces}"
            )
        if not 0 < self.scale_end <= self.scale_start:
            raise ValueError(
                f"scale_end={self.scale_end} is not in (0, scale_start={self.scale_start}]"
            )


def train_seeds(
    key: Array,
    stack: Stack,
    problem: Problem,
    config: TrainConfig,
    *,
    start: list[PyTree] | None = None,
    reconstruction_weight: float = 0.0,
    checkpoints: Checkpoints | None = None,
    report: Callable[[int, float], bool] = lambda step, loss: False,
) -> list[PyTree] | None:
    """Trains all seeds and returns their parameters, each leaf with a leading axis of seeds.

    Args:
        key: seeds are split from it.
        stack: the network.
        problem: the data.
        config: lengths and rates.
        start: parameters that every seed starts from; random ones if None.
        reconstruction_weight: of the encoders' decoding error in the loss.
        checkpoints: where an interrupted run is saved and found again.
        report: gets the step and the median loss after every piece; True asks to stop.

    Returns:
        None if the run was asked to stop and is not complete.
    """
    settings = OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=0, weight_decay=0.0)
    optimizer = make_optimizer(settings, config.num_steps)

    def init(seed_key: Array) -> Any:
        init_key, run_key = jax.random.split(seed_key)
        params = init_stack(init_key, stack) if start is None else start
        return init_state(run_key, params, optimizer)

    state = jax.jit(jax.vmap(init), compiler_options=ONCE)(jax.random.split(key, config.num_seeds))
    step = 0
    if checkpoints is not None:
        restored = checkpoints.restore(jax.eval_shape(lambda: state))
        if restored is not None:
            state, step = restored.state, restored.step
    piece = _make_piece(stack, config, optimizer, reconstruction_weight)
    x, y = jnp.asarray(problem.x), jnp.asarray(problem.y)
    length = config.num_steps // config.num_pieces
    while step < config.num_steps:
        state, losses = piece(state, x, y)
        step += length
        if report(step, float(np.median(losses))) and step < config.num_steps:
            if checkpoints is not None:
                checkpoints.save(step, state, {})
                checkpoints.wait()
            return None
    return state.params


def _make_piece(
    stack: Stack, config: TrainConfig, optimizer: Any, reconstruction_weight: float
) -> Callable[..., Any]:
    def loss_function(
        params: PyTree, model_state: PyTree, batch: dict[str, Array], share: Array, key: Array
    ) -> tuple[Array, tuple[dict[str, Array], PyTree]]:
        del model_state, key
        output = apply_stack(stack, params, batch["x"])
        if stack.weighting == "likelihood":
            passed = jnp.minimum(batch["progress"] / 0.7, 1.0)
            ratio = np.log(config.scale_end / config.scale_start)
            loss = likelihood_loss(output, batch["y"], config.scale_start * jnp.exp(ratio * passed))
        else:
            loss = jnp.mean(jnp.square(output.y - batch["y"]))
        return (loss + reconstruction_weight * output.reconstruction) * share, ({}, {})

    train_step = make_train_step(
        loss_function, optimizer, batch_weight=lambda batch: jnp.ones((), jnp.float32)
    )

    def one_seed(state: Any, x: Array, y: Array) -> tuple[Any, Array]:
        def body(state: Any, _: None) -> tuple[Any, Array]:
            key = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.step)
            index = jax.random.randint(key, (config.batch_size,), 0, x.shape[0])
            progress = state.step.astype(jnp.float32) / config.num_steps
            batch = {"x": x[index], "y": y[index], "progress": progress}
            state, metrics = train_step(state, batch)
            return state, metrics["loss"]

        length = config.num_steps // config.num_pieces
        state, losses = jax.lax.scan(body, state, None, length=length)
        return state, losses[-1]

    return jax.jit(jax.vmap(one_seed, in_axes=(0, None, None)))
