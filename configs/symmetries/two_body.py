"""Two bodies on ellipses.

python -m moe_jax.symmetries.main --config=configs/symmetries/two_body.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "two_body"},
        train={"planes": (1, 2, 4)},
    )
