"""The language-model loss and what a step reports."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from moe_jax.core import Routing, routing_metrics
from moe_jax.language.model import LanguageModel
from moe_jax.training.step import LossFunction

Batch = dict[str, Array]
"""inputs, targets, segment_ids, positions: int32[batch, length]; loss_mask: bool[batch, length]."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the auxiliary losses, each an average over the sparse layers; validates itself.

    Attributes:
        load_balance_weight: of the load-balance loss, which is 1 at perfect balance.
        router_z_weight: of the router z-loss.
    """

    load_balance_weight: float = 0.01
    router_z_weight: float = 0.001

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")


def make_loss_function(
    model: LanguageModel, config: LossConfig, *, tokens_per_byte: float
) -> LossFunction:
    """Mean cross-entropy per counted token, plus the auxiliary losses averaged over sparse layers.

    The metrics are `bits_per_byte`, the cross-entropy at the corpus's `tokens_per_byte`, and, with
    sparse layers, `load_balance_loss` and `router_z_loss` (averages over layers), and per layer
    `load` [layers, experts], `balance`, `entropy` and `dropped` [layers].
    """
    bits_per_byte = tokens_per_byte / math.log(2.0)

    def loss_function(
        params: PyTree, batch: Batch, share: Array, key: Array
    ) -> tuple[Array, dict[str, Array]]:
        del key  # Nothing in this model draws during training.
        logits, routing = forward(model, params, batch)
        losses = token_losses(logits, batch["targets"], batch["loss_mask"])
        cross_entropy = jnp.sum(losses) / jnp.maximum(batch_weight(batch), 1.0)
        metrics = {"bits_per_byte": cross_entropy * bits_per_byte}
        loss = cross_entropy
        if routing is not None:
            balance, z_loss = jnp.mean(routing.load_balance_loss), jnp.mean(routing.router_z_loss)
            loss = loss + config.load_balance_weight * balance + config.router_z_weight * z_loss
            metrics |= {"load_balance_loss": balance, "router_z_loss": z_loss}
            metrics |= dataclasses.asdict(jax.vmap(routing_metrics)(routing))
        return loss * share, metrics

    return loss_function


def forward(
    model: LanguageModel, params: PyTree, batch: Batch
) -> tuple[Float[Array, "batch length vocab"], Routing | None]:
    """Logits and routing of a batch."""
    outputs: Any = model.apply(
        {"params": params}, batch["inputs"], batch["segment_ids"], batch["positions"]
    )
    return outputs


def batch_weight(batch: Batch) -> Float[Array, ""]:
    """Number of tokens that count in the loss."""
    return jnp.sum(batch["loss_mask"], dtype=jnp.float32)


def token_losses(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    loss_mask: Bool[Array, "batch length"],
) -> Float[Array, "batch length"]:
    """Cross-entropy of each target in nats; 0 where it does not count."""
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(loss_mask, log_partition - chosen, 0.0)
