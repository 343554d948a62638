r"""Only the variance differs from the frozen expert's: a fit to be detected, not a rate.

python -m moe_jax.contaminated.main --config=configs/contaminated/variance_only.py \
  --workdir=runs/variance_only
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "study": {
                "seed": 0,
                "designs": ("variance_only",),
                "sizes": (1000, 3162, 10_000, 31_623, 100_000),
                "replicates": 40,
                "start": "truth",
                "chunk_rows": 200_000,
                "bootstrap": 2000,
                "level": 0.95,
            },
        }
    )
