"""Ten coupled phase oscillators, seen as cosines and sines.

python -m moe_jax.symmetries.main --config=configs/symmetries/kuramoto.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "kuramoto", "options": {"coupling": 1.0}},
        train={"planes": (4,)},
    )
