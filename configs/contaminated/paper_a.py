r"""The paper's experiment (a): a Laplace expert is frozen, a Gaussian one is fitted.

python -m moe_jax.contaminated.main --config=configs/contaminated/paper_a.py \
  --workdir=runs/paper_a
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "study": {
                "seed": 0,
                "designs": ("paper_a",),
                "sizes": (1000, 2154, 4642, 10_000, 21_544, 46_416, 100_000),
                "replicates": 40,
                "start": "truth",
                "chunk_rows": 200_000,
                "bootstrap": 2000,
                "level": 0.95,
            },
        }
    )
