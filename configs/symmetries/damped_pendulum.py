"""A damped pendulum: dissipative, where no gain from symmetry is expected.

python -m moe_jax.symmetries.main --config=configs/symmetries/damped_pendulum.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "damped_pendulum"},
        train={"planes": (1, 2)},
    )
