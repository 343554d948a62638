"""Parameters and floating-point operations of a decoder."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.model import LanguageModel


class ParameterCounts(NamedTuple):
    """Numbers of scalars.

    Attributes:
        total: all parameters.
        active: those that a token's forward pass multiplies with: all but the unselected experts
            and the rows of an untied input embedding.
    """

    total: int
    active: int


def count_parameters(config: LanguageModelConfig) -> ParameterCounts:
    """Parameters of `LanguageModel(config)`, from its shapes alone."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = jax.eval_shape(LanguageModel(config).init, jax.random.key(0), tokens)["params"]
    total = idle = 0
    for path, leaf in jax.tree.leaves_with_path(shapes):
        size = math.prod(leaf.shape)
        total += size
        if any(entry.key == "experts" for entry in path):
            idle += size // config.num_experts * (config.num_experts - config.num_selected)
    if not config.tie_embeddings:
        idle += config.vocab_size * config.model_dim
    return ParameterCounts(total=total, active=total - idle)


def training_flops_per_token(config: LanguageModelConfig, sequence_length: int) -> float:
    """Model FLOPs of a training step per token: forward, and twice that backward.

    6 for each active parameter, and 12 heads head_dim (sequence_length + 1) / 2 a layer for the
    scores and the weighted values over the causal half. What an implementation recomputes or
    wastes is not counted.
    """
    attended = (sequence_length + 1) / 2
    attention = 12.0 * config.num_layers * config.num_heads * config.head_dim * attended
    return 6.0 * count_parameters(config).active + attention
