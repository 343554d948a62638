"""AdamW with decoupled decay on matrices, global-norm clipping, and learning-rate schedules."""

import dataclasses

import jax
import optax
from jaxtyping import PyTree

SCHEDULES = ("cosine", "stable")
UNDECAYED = ("scale", "bias", "embedding")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; validates itself.

    Attributes:
        learning_rate: peak of the schedule.
        schedule: `cosine` after the warm-up, or `stable`: constant, then linear (warm-up-stable-
            decay, arXiv 2404.06395).
        warmup_steps: linear from 0; cut to num_steps.
        decay_fraction: share of the steps after the warm-up in the final decay of `stable`.
        final_fraction: learning rate at the end over its peak.
        weight_decay: decoupled (arXiv 1711.05101), on leaves not named scale, bias or embedding.
        beta1, beta2, epsilon: of Adam.
        max_gradient_norm: the gradient is scaled down to this global norm.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """

    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    final_fraction: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not one of {SCHEDULES}")
        for name in ("learning_rate", "epsilon", "max_gradient_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1]")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate as a function of the applied steps, from 0 to num_steps."""
    warmup = min(config.warmup_steps, num_steps)
    rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    rest = max(num_steps - warmup, 1)
    floor = config.final_fraction * config.learning_rate
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(config.learning_rate, rest, config.final_fraction)
        return optax.join_schedules([rise, fall], [warmup])
    decay = max(round(config.decay_fraction * rest), 1)
    return optax.join_schedules(
        [
            rise,
            optax.constant_schedule(config.learning_rate),
            optax.linear_schedule(config.learning_rate, floor, decay),
        ],
        [warmup, warmup + rest - decay],
    )


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping, Adam, decoupled decay and the schedule, in this order."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(
            make_schedule(config, num_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params: PyTree) -> PyTree:
    """True for the leaves that weight decay shrinks: all but scales, biases and embeddings.

    By name, not by rank: a stack of layers gives every scale a leading axis.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "key", None) not in UNDECAYED, params
    )
