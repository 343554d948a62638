"""L2: error against the number of experts at the same active width.

python -m theory.main --config=configs/theory/experts.py --workdir=runs/theory/experts
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration; --full replaces entries by those of section `full`."""
    return ConfigDict(
        {
            "experiment": "experts",
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
                "counts": [1, 2, 4, 8, 16],
                "weightings": ["straight_through", "soft", "built"],
                "width": 8,
            },
            "full": {
                "options": {"counts": [1, 2, 4, 8, 16, 32]},
                "train": {"num_steps": 10_000, "batch_size": 512},
            },
        }
    )
