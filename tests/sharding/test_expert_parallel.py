"""Numbers on meshes of simulated devices are those of one device; bad sizes are refused."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moe_jax.core import SparseMoE
from moe_jax.sharding import ExpertParallel, MeshConfig, make_mesh

ROOT = Path(__file__).parents[2]
MESHES = """
1 1 1 1
1 2 1 1
1 1 2 1
1 1 1 2
2 1 1 2
1 1 4 1
1 2 2 1
8 1 1 1
2 2 2 1
1 1 4 2
1 2 2 2
1 1 8 1
"""


def test_every_mesh_gives_the_numbers_of_one_device_and_reads_the_checkpoints_of_others(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # Compilation is nearly all of the time.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("on_eight_devices.py")
    command = [sys.executable, str(script), str(tmp_path / "checkpoints")]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr[-3000:]
    meshes = [f"mesh {line}" for line in MESHES.split("\n") if line]
    assert result.stdout.splitlines() == ["elastic", "odd tokens", *meshes, "model"]


class Split:
    """A mesh of these sizes, of which only the sizes are looked at."""

    def __init__(self, **sizes):
        self.shape = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | sizes


def apply(layer):
    return jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((4, 6)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert": 4}, "num_experts=6 is not divisible by the mesh axis expert=4; .*: 1, 2, 3, 6"),
        (
            {"tensor": 3},
            "hidden_dim=10 is not divisible by the mesh axis tensor=3; .*: 1, 2, 5, 10",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, message):
    exchange = ExpertParallel(make_mesh(MeshConfig(), jax.devices()[:1]))
    object.__setattr__(exchange, "mesh", Split(**sizes))
    with pytest.raises(ValueError, match=message):
        apply(SparseMoE(num_experts=6, num_selected=2, hidden_dim=10, exchange=exchange))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "expert_choice"}, "not router='expert_choice'"),
        ({"router": "soft"}, "not router='soft'"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1"),
    ],
)
def test_what_an_exchange_cannot_do_is_refused(options, message):
    exchange = ExpertParallel(make_mesh(MeshConfig(), jax.devices()[:1]))
    layer = SparseMoE(num_experts=4, num_selected=2, hidden_dim=8, exchange=exchange, **options)
    with pytest.raises(ValueError, match=message):
        apply(layer)


def test_unknown_exchanges_are_refused():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(ValueError, match="exchange='ring' is not one of"):
        ExpertParallel(mesh, "ring")
    with pytest.raises(ValueError, match="ragged='fast' is not one of"):
        ExpertParallel(mesh, "ragged", "fast")
