"""Two of the paper's experiments on small data sets: tables and figures in two minutes.

python -m moe_jax.contaminated.main --config=configs/contaminated/rates.py --workdir=runs/rates
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "study": {
                "seed": 0,
                "designs": (
                    "paper_a",
                    "paper_b1",
                ),
                "sizes": (1000, 2000, 4000, 8000, 16_000),
                "replicates": 40,
                "start": "truth",
                "chunk_rows": 200_000,
                "bootstrap": 2000,
                "level": 0.95,
            },
        }
    )
