"""Rotor swings of the ten machines of the 39-bus grid.

python -m moe_jax.symmetries.main --config=configs/symmetries/swing_ne39.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "swing", "options": {"case": "ne39"}},
        train={"planes": (4, 9)},
    )
