"""L6: a shared expert or none, and 1, 2 or 4 experts a point, at one active width.

python -m theory.main --config=configs/theory/sharing.py --workdir=runs/theory/sharing
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration; --full replaces entries by those of section `full`."""
    return ConfigDict(
        {
            "experiment": "sharing",
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
                "manifold": "moment_curve",
                "dim": 16,
                "selected": [1, 2, 4],
                "shared": [0, 4, 8],
                "experts": 4,
                "width": 18,
            },
            "full": {
                "options": {"dim": 64, "width": 66},
                "train": {"num_steps": 10_000, "batch_size": 512},
            },
        }
    )
