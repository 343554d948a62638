"""L1: one function on curves and spheres in 2 to 256 dimensions, by how experts are weighed.

python -m theory.main --config=configs/theory/dimension.py --workdir=runs/theory/dimension
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration; --full replaces entries by those of section `full`."""
    return ConfigDict(
        {
            "experiment": "dimension",
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
                "dims": {"moment_curve": [2, 16, 128], "sphere": [3, 16, 128]},
                "weightings": [
                    "straight_through",
                    "switch",
                    "soft",
                    "likelihood",
                    "built",
                    "dense_active",
                    "dense_total",
                ],
                "experts": 4,
                "width": 10,
            },
            "full": {
                "options": {"dims": {"moment_curve": [2, 16, 64, 256], "sphere": [3, 16, 64, 256]}},
                "train": {"num_steps": 10_000, "batch_size": 512},
            },
        }
    )
