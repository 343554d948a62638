"""The Lorenz system: chaotic, where no gain is expected.

python -m moe_jax.symmetries.main --config=configs/symmetries/lorenz.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "lorenz"},
        train={"planes": (2, 4)},
    )
