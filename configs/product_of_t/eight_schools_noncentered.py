"""Eight schools of posteriordb, not centred.

python -m moe_jax.product_of_t.main --config=configs/product_of_t/eight_schools_noncentered.py \
    --workdir=runs/eight_schools_noncentered
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "seed": 0,
            "target": {"name": "eight_schools_noncentered", "dim": 0},
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
