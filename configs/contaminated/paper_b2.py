r"""The paper's experiment (b-ii) as printed, where the two experts do not near each other.

python -m moe_jax.contaminated.main --config=configs/contaminated/paper_b2.py \
  --workdir=runs/paper_b2
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "study": {
                "seed": 0,
                "designs": ("paper_b2",),
                "sizes": (1000, 2154, 4642, 10_000, 21_544, 46_416, 100_000),
                "replicates": 40,
                "start": "truth",
                "chunk_rows": 200_000,
                "bootstrap": 2000,
                "level": 0.95,
            },
        }
    )
