"""Decoder language models with dense and sparse layers: data, training, evaluation, sampling."""

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.generate import generate
from moe_jax.language.model import LanguageModel

__all__ = ["LanguageModel", "LanguageModelConfig", "generate"]
