"""The layer compiled for TPUs that are not there.

In processes of their own: the TPU library takes over signals and prints as it loads.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'moe_jax[tpu]'",
)


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_layer_compiles_for_v6e_with_little_more_than_the_ideal_work(tmp_path):
    output = tmp_path / "layer.json"
    arguments = ("--chips=v6e", "--implementations=default", "--tiles_of=", f"--output={output}")
    table = run("-m", "benchmarks.moe_layer_tpu", *arguments)
    rows = json.loads(output.read_text())["layers"]
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert row["implementation"] == "pallas" and row["default"]
        # 8192 rows are 256 steps of 32, and each of the 15 boundaries costs one step more.
        assert row["kernel_flops_over_ideal"] == 271 / 256
        # The rest is the router, the activation and the combination.
        assert 271 / 256 < row["flops_over_ideal"] <= 1.1
        # Below that of the rows laid out once for each expert: 16 x 8192 x 512 bfloat16.
        assert 0 < row["temporary_mib"] < 128
        assert f"{row['flops_over_ideal']:.3f}" in table


SHARDED = """
from benchmarks.moe_layer_tpu import TOPOLOGIES
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from moe_jax.core import grouped_matmul

devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES["v5e"]).devices
mesh = jax.sharding.Mesh(np.array(devices), ("x",))

def loss(lhs, rhs, sizes):
    return jnp.sum(grouped_matmul(lhs, rhs, sizes).astype(jnp.float32), keepdims=True)[:, 0]

def value_and_gradients(lhs, rhs, sizes):
    out, pullback = jax.vjp(lambda lhs, rhs: loss(lhs, rhs[0], sizes[0]), lhs, rhs)
    return out, *pullback(jnp.ones_like(out))

spec = PartitionSpec("x")
sharded = jax.shard_map(value_and_gradients, mesh=mesh, in_specs=spec, out_specs=spec)
shapes = ((256, 128), jnp.bfloat16), ((4, 3, 128, 256), jnp.bfloat16), ((4, 3), jnp.int32)
with jax.set_mesh(mesh):
    compiled = jax.jit(sharded).lower(
        *[jax.ShapeDtypeStruct(*s, sharding=NamedSharding(mesh, spec)) for s in shapes]
    ).compile()
print(sorted({
    name for name in ("grouped_matmul_rows", "grouped_matmul_groups", "ragged")
    if name in compiled.as_text()
}))
"""


def test_kernels_compile_under_shard_map_on_four_chips_and_default_is_theirs():
    assert run("-c", SHARDED).split("\n")[0] == "['grouped_matmul_groups', 'grouped_matmul_rows']"
