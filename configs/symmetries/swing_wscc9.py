"""Rotor swings of the three machines of the 9-bus grid.

python -m moe_jax.symmetries.main --config=configs/symmetries/swing_wscc9.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "swing"},
        train={"planes": (2, 4)},
    )
