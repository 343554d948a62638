"""Training: from examples to a fitted model, from several starts, saved and resumed on the way."""

import dataclasses
import functools
import io
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, PyTree

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import (
    GAPS_PER_UNIT,
    MIN_STD,
    Scales,
    as_arrays,
    make_context,
    measure_scales,
    relative_times,
)
from moe_jax.symmetries.data import IrregularBatch, check_integer, fill, validate
from moe_jax.symmetries.examples import ExampleBatches, Examples, reconstruct
from moe_jax.symmetries.losses import (
    LossConfig,
    negative_log_likelihood,
    penalties,
    squared_error,
)
from moe_jax.symmetries.model import LatentMoS, answer, in_range, init_params, ready
from moe_jax.symmetries.nets import float_type
from moe_jax.training import (
    Checkpoints,
    Interrupts,
    LoopConfig,
    MetricWriter,
    OptimizerConfig,
    Progress,
    TrainState,
    init_state,
    make_schedule,
    make_train_step,
    prepare_workdir,
    restore_or_init,
    train,
    variables_of,
)

OPTIMIZER = OptimizerConfig(
    learning_rate=3e-3, warmup_steps=0, final_fraction=0.05, weight_decay=1e-4, beta2=0.999
)
UNDECAYED = ("bias", "sigma", "omega", "velocity", "drift", "logits", "start", "log_noise")
METRIC = "validation_error"


class FitResult(NamedTuple):
    """A fitted model.

    Attributes:
        model: holder of the parameters.
        variables: of the best evaluation of the best start.
        validation_error: mean squared standardised error there.
        error_over_mean: the same over that of predicting the training mean; near 1 or above, the
            model has learned nothing, and more starts or another configuration are due.
        start_errors: best validation error of every start that was finished.
        finished: False where a signal ended the training early.
    """

    model: LatentMoS
    variables: Any
    validation_error: float
    error_over_mean: float
    start_errors: tuple[float, ...]
    finished: bool


def fit(
    config: LatentMoSConfig,
    train_examples: Examples | IrregularBatch,
    val_examples: Examples | IrregularBatch,
    *,
    seed: int = 0,
    steps: int = 2000,
    batch_size: int = 64,
    drop: tuple[float, float] = (0.0, 0.5),
    multistart: int = 1,
    loss: LossConfig = LossConfig(),  # noqa: B008  (frozen)
    optimizer: OptimizerConfig = OPTIMIZER,
    workdir: str | os.PathLike[str] | None = None,
    interrupts: Interrupts | None = None,
    show: bool = False,
) -> FitResult:
    """Fits a model and keeps what did best on the validation examples.

    Args:
        config: of the model.
        train_examples: or a batch, which is then to be reconstructed.
        val_examples: decide between steps and starts; no gradient sees them.
        seed: of parameters, batches and what is hidden.
        steps: optimiser steps of each start.
        batch_size: rows of a step, at most those there are.
        drop: lowest and highest share of a row's observations hidden in a step.
        multistart: number of starts, each with parameters and batches of its own.
        loss: weights of the loss's terms.
        optimizer: AdamW and its schedule.
        workdir: where each start keeps checkpoints and metrics, from which the same call resumes;
            None for a temporary one.
        interrupts: asks the training to stop, after which the result is that of the best so far.
        show: whether progress is shown on stderr.

    Raises:
        ValueError: for unusable data, options out of range or a workdir that cannot be used.
        TrainingDivergedError: if losses stop being finite.
    """
    if not isinstance(config, LatentMoSConfig):
        raise ValueError(f"config must be a LatentMoSConfig, not {type(config).__name__}")
    drop = as_shares(drop)
    check_integer("seed", seed, 0)
    check_integer("multistart", multistart, 1)
    check_integer("batch_size", batch_size, 1)
    workdir = None if workdir is None else prepare_workdir(workdir)
    every = max(steps // 10, 1)
    loop = LoopConfig(
        num_steps=steps, log_every=max(steps // 100, 1), eval_every=every, checkpoint_every=every
    )
    for name, given in (("train_examples", train_examples), ("val_examples", val_examples)):
        if not isinstance(given, Examples | IrregularBatch):
            raise ValueError(
                f"{name} must be Examples or an IrregularBatch, not {type(given).__name__}; "
                "from_ragged returns a batch and its notes"
            )
    _warn_of_offsets(train_examples)
    train_examples, val_examples = prepare(train_examples), prepare(val_examples)
    for name, examples in (("train_examples", train_examples), ("val_examples", val_examples)):
        check_channels(name, examples, config)
    scales = _scales(train_examples.context)
    over_mean = float(_mean_error(val_examples, scales))
    interrupts = Interrupts() if interrupts is None else interrupts
    best: tuple[float, Any] = (math.inf, None)
    errors = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if workdir is None else workdir)
        for start in range(multistart):
            found = _fit_once(
                config,
                train_examples,
                val_examples,
                scales,
                seed=(seed, start),
                batch_size=min(batch_size, len(train_examples.context.lengths)),
                drop=drop,
                loss=loss,
                optimizer=optimizer,
                loop=loop,
                folder=folder / f"start_{start}",
                interrupts=interrupts,
                show=show,
            )
            errors.append(found[0])
            # A first start whose error is NaN still gives variables.
            best = found if start == 0 or found[0] < best[0] else best
            if interrupts.requested is not None:
                break
    if best[0] > 0.9 * over_mean:
        logging.warning(
            "validation error %.3g is no better than the mean's %.3g", best[0], over_mean
        )
    return FitResult(
        model=LatentMoS(config),
        variables=best[1],
        validation_error=best[0],
        error_over_mean=best[0] / over_mean if over_mean > 0 else math.inf,
        start_errors=tuple(errors),
        finished=interrupts.requested is None,
    )


def as_shares(drop: Any) -> tuple[float, float]:
    """Lowest and highest share of rows to hide; raises ValueError unless they are that."""
    shares = np.asarray(drop)
    if (
        shares.shape != (2,)
        or shares.dtype.kind not in "iuf"
        or not (0 <= shares[0] <= shares[1] < 1)
    ):
        raise ValueError(f"drop={drop} must be two increasing numbers within [0, 1)")
    return float(shares[0]), float(shares[1])


def prepare(examples: Examples | IrregularBatch) -> Examples:
    """Checked examples whose times count from each row's first observation, in session precision.

    Raises:
        ValueError: see `moe_jax.symmetries.model.predict`; or if the numbers of rows differ.
    """
    if isinstance(examples, IrregularBatch):
        examples = reconstruct(examples)
    targets = fill(examples.targets)
    validate(targets)
    if len(targets.lengths) != len(examples.context.times):
        raise ValueError(
            f"context has {len(examples.context.times)} rows, targets {len(targets.lengths)}"
        )
    context, times = ready(examples.context, targets.times)
    dtype = float_type()
    values = in_range("targets", targets.values, dtype)
    targets = dataclasses.replace(targets, times=times, values=values, inputs=None)
    return Examples(context=context, targets=targets)


def check_channels(name: str, examples: Examples, config: LatentMoSConfig) -> None:
    """Raises ValueError unless prepared examples have the channels that a model expects."""
    for part, batch in (("context", examples.context), ("targets", examples.targets)):
        if batch.values.shape[-1] != config.obs_dim:
            raise ValueError(
                f"{name}: {part} has {batch.values.shape[-1]} channels, but {config.obs_dim=}"
            )
    inputs = 0 if examples.context.inputs is None else examples.context.inputs.shape[-1]
    if inputs != config.input_dim:
        raise ValueError(f"{name}: context has {inputs} input channels, but {config.input_dim=}")


def make_loss_function(
    config: LatentMoSConfig, loss: LossConfig, drop: tuple[float, float]
) -> Callable[..., Any]:
    """The loss of a batch of `Examples` for `moe_jax.training.make_train_step`."""
    model = LatentMoS(config)

    def loss_function(
        params: PyTree, model_state: PyTree, batch: Examples, share: Array, key: Array
    ) -> tuple[Array, tuple[dict[str, Array], dict[str, Array]]]:
        variables = {"params": params, "scales": model_state["scales"]}
        scales = model_state["scales"]["scales"]
        targets = batch.targets
        output = answer(model, variables, batch.context, targets.times, key=key, drop=drop)
        error = squared_error(output, targets.values, targets.mask, scales)
        total = error
        if config.likelihood == "gaussian":
            total = negative_log_likelihood(output, targets.values, targets.mask, scales)
        times = make_context(as_arrays(batch.context), scales).times
        step = model_state["progress"]["step"].astype(error.dtype)
        rise = jnp.minimum((step + 1.0) / max(loss.divergence_steps, 1), 1.0)
        divergence = loss.divergence * rise
        total = total + penalties(params, config, output, times, loss, divergence)
        return (total * share.astype(total.dtype)).astype(jnp.float32), ({"error": error}, {})

    return loss_function


def examples_weight(batch: Examples) -> Array:
    """Number of observed targets."""
    return jnp.sum(batch.targets.mask, dtype=jnp.float32)


@functools.cache
def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW that decays kernels only: no bias, no rate of a generator.

    Rates stand per ten gaps, where frequencies are of order 10 and kernels are of order 1, but
    Adam's steps are absolute. They are made per gap: the sum of all steps of 3e-3 of a run of 1,000
    is 1.6, which a frequency that starts a factor of 2 off would not survive.
    """

    def is_decayed(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: getattr(path[-1], "key", None) not in UNDECAYED, params
        )

    def is_rate(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(getattr(key, "key", None) == "generators" for key in path), params
        )

    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(
            make_schedule(config, num_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=is_decayed,
        ),
        optax.masked(optax.scale(GAPS_PER_UNIT), is_rate),
    )


@functools.cache
def _train_step(
    config: LatentMoSConfig,
    loss: LossConfig,
    drop: tuple[float, float],
    optimizer: OptimizerConfig,
    num_steps: int,
) -> Callable[..., Any]:
    # Kept, so that starts and repeated fits of one configuration compile once.
    return make_train_step(
        make_loss_function(config, loss, drop),
        make_optimizer(optimizer, num_steps),
        batch_weight=examples_weight,
        update_model_state=lambda state, _: (
            state | {"progress": {"step": state["progress"]["step"] + 1}}
        ),
    )


def _fit_once(
    config: LatentMoSConfig,
    train_examples: Examples,
    val_examples: Examples,
    scales: Scales,
    *,
    seed: tuple[int, int],
    batch_size: int,
    drop: tuple[float, float],
    loss: LossConfig,
    optimizer: OptimizerConfig,
    loop: LoopConfig,
    folder: Path,
    interrupts: Interrupts,
    show: bool,
) -> tuple[float, Any]:
    transformation = make_optimizer(optimizer, loop.num_steps)

    def init() -> TrainState:
        init_key, run_key = jax.random.split(jax.random.fold_in(jax.random.key(seed[0]), seed[1]))
        params = init_params(init_key, config, scales)
        state = {
            "scales": {"scales": jax.tree.map(jnp.copy, scales)},
            "progress": {"step": jnp.zeros((), jnp.int32)},
        }
        return init_state(run_key, params, transformation, state)

    def evaluate(state: TrainState) -> dict[str, float]:
        error = validation_error(LatentMoS(config), _variables(state), val_examples)
        return {METRIC: float(error)}

    batches = ExampleBatches(train_examples, batch_size, seed=seed[0] * 1009 + seed[1])
    stream = None if show else io.StringIO()
    with Checkpoints(folder / "checkpoints", keep=2, best_metric=METRIC) as checkpoints:
        state = restore_or_init(checkpoints, init, batches)
        first_step = int(state.step)
        with (
            MetricWriter(folder, resume_step=first_step or None) as writer,
            Progress(
                loop.num_steps, first_step, show=("loss", "error", "rows_per_second"), stream=stream
            ) as progress,
        ):
            state, _ = train(
                state,
                batches,
                _train_step(config, loss, drop, optimizer, loop.num_steps),
                evaluate,
                loop,
                checkpoints=checkpoints,
                writer=writer,
                progress=progress,
                interrupts=interrupts,
                per_step={"rows": float(batch_size)},
            )
        best_step = checkpoints.best_step()
        if best_step is not None and best_step != int(state.step):
            restored = checkpoints.restore(jax.eval_shape(lambda: state), step=best_step)
            state = state if restored is None else restored.state
    error = validation_error(LatentMoS(config), _variables(state), val_examples)
    return float(error), _variables(state)


def _variables(state: TrainState) -> dict[str, Any]:
    variables = variables_of(state)
    return {"params": variables["params"], "scales": variables["scales"]}


@functools.partial(jax.jit, static_argnums=0)
def validation_error(model: LatentMoS, variables: Any, examples: Examples) -> Array:
    """Mean squared standardised error of prepared examples, nothing hidden."""
    targets = examples.targets
    output = answer(model, variables, examples.context, targets.times)
    return squared_error(output, targets.values, targets.mask, variables["scales"]["scales"])


@jax.jit
def _scales(context: IrregularBatch) -> Scales:
    return measure_scales(as_arrays(relative_times(context, context.times)[0]))


def _warn_of_offsets(examples: Examples | IrregularBatch) -> None:
    """Names channels whose variation the session's precision would lose."""
    batch = fill(examples if isinstance(examples, IrregularBatch) else examples.context)
    for channel in range(batch.values.shape[-1]):
        values = batch.values[..., channel][batch.mask[..., channel]].astype(np.float64)
        if values.size and 0 < values.std() <= MIN_STD * np.abs(values).max():
            logging.warning(
                "channel %d varies by less than %g of its largest value and counts as constant; "
                "subtract its offset",
                channel,
                MIN_STD,
            )


def _mean_error(examples: Examples, scales: Scales) -> np.floating[Any]:
    targets = examples.targets
    error = (targets.values - np.asarray(scales.mean)) / np.asarray(scales.std)
    return np.mean(np.square(error)[targets.mask])
