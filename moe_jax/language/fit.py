"""The language-model loss and what a step reports."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from moe_jax.core import (
    Routing,
    importance_loss,
    routing_metrics,
    sequence_load_balance_loss,
    update_balance_bias,
)
from moe_jax.core.gates import STATE
from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.model import LanguageModel, layer_runs
from moe_jax.training.step import LossFunction

Batch = dict[str, Array]
"""inputs, targets, segment_ids, positions: int32[batch, length]; loss_mask: bool[batch, length]."""


BALANCE_SCOPES = ("batch", "sequence")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the auxiliary losses, each an average over the sparse layers; validates itself.

    Attributes:
        load_balance_weight: of the load-balance loss, which is 1 at perfect balance.
        router_z_weight: of the router z-loss.
        importance_weight: of the squared coefficient of variation of the experts' importance.
        load_balance_scope: balance the load of a `batch`, or within every `sequence`. Where the
            batch is accumulated, each micro-batch is balanced by itself and counts by its tokens.
        balance_bias_rate: step of the balance bias of the `sigmoid` router, once an optimiser step
            from the load of the whole batch.
    """

    load_balance_weight: float = 0.01
    router_z_weight: float = 0.001
    importance_weight: float = 0.0
    load_balance_scope: str = "batch"
    balance_bias_rate: float = 0.001

    def __post_init__(self) -> None:
        if self.load_balance_scope not in BALANCE_SCOPES:
            raise ValueError(
                f"load_balance_scope={self.load_balance_scope!r} is not one of {BALANCE_SCOPES}"
            )
        for name, value in dataclasses.asdict(self).items():
            if name != "load_balance_scope" and not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")


def make_loss_function(
    model: LanguageModel, config: LossConfig, *, tokens_per_byte: float
) -> LossFunction:
    """Mean cross-entropy per counted token, plus the auxiliary losses averaged over sparse layers.

    The metrics are `bits_per_byte`, the cross-entropy at the corpus's `tokens_per_byte`, and, with
    sparse layers, `load_balance_loss` and `router_z_loss` (averages over layers), and per layer
    `load` [layers, experts], `balance`, `entropy` and `dropped` [layers]. The totals are then
    `expert_counts` [layers, experts].
    """
    bits_per_byte = tokens_per_byte / math.log(2.0)

    def loss_function(
        params: PyTree, model_state: PyTree, batch: Batch, share: Array, key: Array
    ) -> tuple[Array, tuple[dict[str, Array], dict[str, Array]]]:
        logits, routing = forward(model, {"params": params, **model_state}, batch, key)
        losses = token_losses(logits, batch["targets"], batch["loss_mask"])
        cross_entropy = jnp.sum(losses) / jnp.maximum(batch_weight(batch), 1.0)
        metrics = {"bits_per_byte": cross_entropy * bits_per_byte}
        if routing is None:
            return cross_entropy * share, (metrics, {})
        balance = jnp.mean(_load_balance_losses(routing, config, batch["inputs"].shape[0]))
        z_loss = jnp.mean(routing.router_z_loss)
        loss = cross_entropy
        loss = loss + config.load_balance_weight * balance + config.router_z_weight * z_loss
        if config.importance_weight:
            importance = jax.vmap(importance_loss)(routing.gate_logits, routing.mask)
            loss = loss + config.importance_weight * jnp.mean(importance)
        metrics |= {"load_balance_loss": balance, "router_z_loss": z_loss}
        metrics |= dataclasses.asdict(routing_metrics(routing))
        totals = {"expert_counts": metrics.pop("counts")}
        return loss * share, (metrics, totals)

    return loss_function


def make_model_state_update(
    model_config: LanguageModelConfig, config: LossConfig
) -> Callable[[PyTree, PyTree], PyTree] | None:
    """The update of the routers' balance biases for `make_train_step`; None if there are none."""
    if model_config.router != "sigmoid" or not model_config.num_sparse_layers:
        return None

    def update(model_state: PyTree, totals: PyTree) -> PyTree:
        load = totals["expert_counts"].astype(jnp.float32)

        def new_bias(path: tuple[Any, ...], leaf: Array) -> Array:
            names = [entry.key for entry in path]
            if names[-1] != "balance_bias":
                return leaf
            layers = sparse_layers_of(model_config, names[0], names[1])
            return update_balance_bias(leaf, load[jnp.asarray(layers)], config.balance_bias_rate)

        return model_state | {STATE: jax.tree.map_with_path(new_bias, model_state[STATE])}

    return update


def sparse_layers_of(config: LanguageModelConfig, block: str, layer: str) -> list[int]:
    """Places, among the sparse layers, of the repetitions of `blocks_i` / `layer_j`."""
    run, index = int(block.removeprefix("blocks_")), int(layer.removeprefix("layer_"))
    runs = layer_runs(config.layer_kinds)
    kinds, repeats = runs[run]
    before = sum(kinds.count("sparse") * repeats for kinds, repeats in runs[:run])
    per_period = kinds.count("sparse")
    first = before + kinds[:index].count("sparse")
    return [first + repeat * per_period for repeat in range(repeats)]


def forward(
    model: LanguageModel, variables: PyTree, batch: Batch, key: Array | None = None
) -> tuple[Float[Array, "batch length vocab"], Routing | None]:
    """Logits and routing of a batch; with a key, those of training, which may draw."""
    rngs = None
    if key is not None:
        router_key, dropout_key = jax.random.split(key)
        rngs = {"router": router_key, "dropout": dropout_key}
    outputs: Any = model.apply(
        variables,
        batch["inputs"],
        batch["segment_ids"],
        batch["positions"],
        deterministic=key is None,
        rngs=rngs,
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


def _load_balance_losses(
    routing: Routing, config: LossConfig, num_sequences: int
) -> Float[Array, " layers"]:
    if config.load_balance_scope == "batch":
        return routing.load_balance_loss

    def one_layer(gate_logits: Array, expert_index: Array, mask: Array) -> Array:
        return sequence_load_balance_loss(gate_logits, expert_index, num_sequences, mask)

    return jax.vmap(one_layer)(routing.gate_logits, routing.expert_index, routing.mask)
