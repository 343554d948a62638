r"""The experts merge, yet at these sizes their distance is still large beside the noise.

python -m moe_jax.contaminated.main --config=configs/contaminated/slow_low_noise.py \
  --workdir=runs/slow_low_noise
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "study": {
                "seed": 0,
                "designs": ("slow_low_noise",),
                "sizes": (1000, 1778, 3162, 5623, 10_000, 17_783, 31_623, 56_234, 100_000),
                "replicates": 100,
                "start": "truth",
                "chunk_rows": 200_000,
                "bootstrap": 2000,
                "level": 0.95,
            },
        }
    )
