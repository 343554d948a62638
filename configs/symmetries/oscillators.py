"""Two oscillators seen through a random tanh map: the spectrum is known.

python -m moe_jax.symmetries.main --config=configs/symmetries/oscillators.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "oscillators", "options": {"frequencies": (0.7, 1.3)}},
        train={"planes": (2,)},
    )
