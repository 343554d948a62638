"""L5: experts behind an encoder of few dimensions, with and without reconstruction.

python -m theory.main --config=configs/theory/encoders.py --workdir=runs/theory/encoders
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration; --full replaces entries by those of section `full`."""
    return ConfigDict(
        {
            "experiment": "encoders",
            "seed": 0,
            "data": {"num_train": 8192, "num_test": 4096},
            "train": {
                "num_seeds": 8,
                "num_steps": 2000,
                "batch_size": 128,
                "learning_rate": 1e-2,
                "num_pieces": 10,
                "scale_start": 1.0,
                "scale_end": 0.1,
            },
            "start_learning_rate": 1e-4,
            "options": {
                "manifold": "sphere",
                "dim": 16,
                "codes": [1, 2, 3, 4, 8],
                "weights": [0.0, 0.1],
                "experts": 4,
                "width": 16,
            },
            "full": {
                "options": {"codes": [1, 2, 3, 4, 5, 6, 7, 8], "dim": 64, "experts": 16},
                "train": {"num_steps": 10_000, "batch_size": 512},
            },
        }
    )
