"""A pendulum from 20 noisy, irregular observations a trajectory.

python -m moe_jax.symmetries.main --config=configs/symmetries/pendulum.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "pendulum"},
        train={"planes": (1, 2)},
    )
