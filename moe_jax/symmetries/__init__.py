"""Latent mixture of symmetries: dynamics from few, irregular, low-resolution measurements."""

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.data import IrregularBatch, Report, from_ragged, take_rows, validate
from moe_jax.symmetries.model import LatentMoS, MoSOutput, predict

__all__ = [
    "IrregularBatch",
    "LatentMoS",
    "LatentMoSConfig",
    "MoSOutput",
    "Report",
    "from_ragged",
    "predict",
    "take_rows",
    "validate",
]
