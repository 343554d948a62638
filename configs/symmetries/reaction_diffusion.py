"""Spiral waves on a 32 x 32 grid.

python -m moe_jax.symmetries.main --config=configs/symmetries/reaction_diffusion.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "reaction_diffusion", "rows": 16, "val_rows": 16, "test_rows": 16},
        train={"steps": 600, "planes": (1, 2)},
    )
