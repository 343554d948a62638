"""Predator and prey, in log populations: a nonlinear oscillation.

python -m moe_jax.symmetries.main --config=configs/symmetries/lotka_volterra.py
"""

from ml_collections import ConfigDict

from moe_jax.symmetries.settings import configuration


def get_config() -> ConfigDict:
    """What differs from the defaults of `moe_jax.symmetries.settings`."""
    return configuration(
        system={"name": "lotka_volterra"},
        train={"planes": (1, 2)},
    )
