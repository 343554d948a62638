r"""Slow rates that an exact fit shows: the experts merge under a gate that does not move.

python -m moe_jax.contaminated.main --config=configs/contaminated/slow_constant_gate.py \
  --workdir=runs/slow_constant_gate
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "study": {
                "seed": 0,
                "designs": ("slow_constant_gate",),
                "sizes": (3162, 7943, 19_953, 50_119, 125_893, 316_228),
                "replicates": 60,
                "start": "truth",
                "chunk_rows": 200_000,
                "bootstrap": 2000,
                "level": 0.95,
            },
        }
    )
