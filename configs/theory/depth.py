"""L4: layers against one layer on a product of grids, at matched active and total parameters.

python -m theory.main --config=configs/theory/depth.py --workdir=runs/theory/depth
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration; --full replaces entries by those of section `full`."""
    return ConfigDict(
        {
            "experiment": "depth",
            "seed": 0,
            "data": {"num_train": 8192, "num_test": 4096},
            "train": {
                "num_seeds": 8,
                "num_steps": 3000,
                "batch_size": 128,
                "learning_rate": 1e-2,
                "num_pieces": 10,
                "scale_start": 1.0,
                "scale_end": 0.1,
            },
            "start_learning_rate": 1e-4,
            "options": {
                "cells": [3, 4],
                "axes": 2,
                "width": 16,
                "state": 3,
                "depths": [1, 2, 3],
            },
            "full": {
                "options": {"width": 64},
                "train": {"num_steps": 10_000, "batch_size": 512},
            },
        }
    )
