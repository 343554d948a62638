"""A double pendulum at small angles: two modes.

python -m moe_jax.symmetries.main --config=configs/symmetries/double_pendulum.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "double_pendulum"},
        train={"planes": (2, 4)},
    )
