"""L3: which partitions a class of gates learns, under squared error and under a likelihood.

python -m theory.main --config=configs/theory/gates.py --workdir=runs/theory/gates
"""

from ml_collections import ConfigDict

GATES = ("affine", "quadratic", "hidden_layer", "dense", "cosine")


def get_config() -> ConfigDict:
    """Returns the configuration; --full replaces entries by those of section `full`."""
    return ConfigDict(
        {
            "experiment": "gates",
            "seed": 0,
            "data": {"num_train": 8192, "num_test": 4096},
            "train": {
                "num_seeds": 8,
                "num_steps": 2500,
                "batch_size": 128,
                "learning_rate": 1e-2,
                "num_pieces": 10,
                "scale_start": 1.0,
                "scale_end": 0.1,
            },
            "start_learning_rate": 1e-4,
            "options": {
                "cases": [
                    *[
                        (partition, "likelihood", gate, "active")
                        for partition in ("rings", "arcs", "spirals", "grid")
                        for gate in GATES
                    ],
                    *[("rings", "straight_through", gate, "active") for gate in GATES],
                    *[("rings", "likelihood", gate, "width") for gate in GATES],
                ],
                "width": 4,
                "gate_dim": 16,
            },
            "full": {
                "options": {
                    "cases": [
                        (partition, weighting, gate, matched)
                        for partition in ("rings", "arcs", "spirals", "grid")
                        for weighting in ("likelihood", "straight_through")
                        for gate in GATES
                        for matched in ("active", "width")
                    ],
                },
                "train": {"num_steps": 10_000, "batch_size": 512},
            },
        }
    )
