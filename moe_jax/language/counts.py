"""Parameters and floating-point operations of a decoder, counted from its shape."""

from typing import NamedTuple

from moe_jax.language.config import LanguageModelConfig


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
    """Parameters of `LanguageModel(config)`."""
    width, head_dim = config.model_dim, config.head_dim
    num_dense = config.num_layers - config.num_sparse_layers
    query = width * config.num_heads * head_dim
    key_value = 2 * width * config.num_kv_heads * head_dim
    norms = 2 * width + (2 * head_dim if config.qk_norm else 0)
    shared = config.num_layers * (2 * query + key_value + norms) + width
    shared += num_dense * 3 * width * config.hidden_dim
    expert = 3 * width * config.expert_hidden_dim
    shared += config.num_sparse_layers * (
        width * config.num_experts + config.num_shared_experts * expert
    )
    embedding = config.vocab_size * width
    head = 0 if config.tie_embeddings else embedding
    experts = config.num_sparse_layers * expert
    return ParameterCounts(
        total=shared + embedding + head + experts * config.num_experts,
        active=shared + embedding + experts * config.num_selected,
    )


def training_flops_per_token(config: LanguageModelConfig, sequence_length: int) -> float:
    """Model FLOPs of a training step per token: forward, and twice that backward.

    6 for each active parameter, and 12 heads head_dim (sequence_length + 1) / 2 a layer for the
    scores and the weighted values over the causal half. What an implementation recomputes or
    wastes is not counted.
    """
    attended = (sequence_length + 1) / 2
    attention = 12.0 * config.num_layers * config.num_heads * config.head_dim * attended
    return 6.0 * count_parameters(config).active + attention
