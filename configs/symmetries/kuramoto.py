"""Ten coupled phase oscillators, seen as cosines and sines.

python -m moe_jax.symmetries.main --config=configs/symmetries/kuramoto.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "seed": 0,
            "system": {
                "name": "kuramoto",
                "options": {"coupling": 1.0},
                "rows": 64,
                "val_rows": 64,
                "test_rows": 200,
                "fraction": 0.25,
                "noise": 0.02,
            },
            "model": {
                "experts": 4,
                "generator": "rst",
                "mixing": "algebra",
                "gate": "invariant",
                "encoder": "bigru",
                "anchors": "local",
                "levels": 1,
                "decoder": "mlp",
                "hidden": 32,
            },
            "train": {
                "steps": 1500,
                "batch_size": 64,
                "drop": (0.0, 0.5),
                "multistart": 1,
                "planes": (4,),
                "linear_latent": True,
            },
            "loss": {"consistency": 1.0, "growth": 0.1},
            "optimizer": {"learning_rate": 3e-3},
        }
    )
