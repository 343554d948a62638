"""Mixture of two Gaussians of posteriordb.

python -m moe_jax.product_of_t.main --config=configs/product_of_t/low_dim_gauss_mix.py \
    --workdir=runs/low_dim_gauss_mix
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "seed": 0,
            "target": {"name": "low_dim_gauss_mix", "dim": 0},
            # Entries of moe_jax.product_of_t.settings.FitSettings.
            "fit": {
                "rounds": 2,
                "iterations": 60,
                "batch_size": 256,
                "sweeps": 1,
                "learning_rate": 1.0,
                "score_clip": 5.0,
                "local_experts": 60,
            },
            # Fit a Gaussian with as many scores beside it.
            "compare": True,
        }
    )
