"""The sparse layer compiled ahead of time for TPU chips: its work over the ideal, its memory.

python -m benchmarks.moe_layer_tpu --output=benchmarks/results/moe_layer_tpu.json

Needs no TPU but its compiler: `pip install 'moe_jax[tpu]'`. A product of `jax.lax.ragged_dot`
counts what the compiler says; a Pallas kernel, whose cost the compiler only repeats, counts what
its grid does at the worst sizes of its groups (`pallas_flops`). Ideal are the products of the rows
with their experts' matrices alone, 6 T K D F, and three times that with the backward pass.

A second table asks how large the steps and tiles of the kernel should be: FLOPs over the ideal, and
instruction bundles over those of full products, at random sizes of the groups. A bundle is a cycle
unless the core waits; they are counted in the compiler's final schedule of `pallas_rows`.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# No TPU is looked for, neither on this host nor by asking the network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# A program from the cache would have no compile time, and leaves no schedule.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import topologies

from moe_jax.core import SparseMoE
from moe_jax.core.grouped_matmul import default_implementation
from moe_jax.core.pallas_matmul import pallas_rows
from moe_jax.core.pallas_tiles import Tiles, pallas_flops

# The smallest topologies that the compiler accepts; one chip of each is used.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TOKENS, MODEL, HIDDEN, EXPERTS, SELECTED = 4096, 512, 1024, 16, 2
# Rows of a tile and of a step.
CANDIDATES = ((32, 32), (128, 128), (256, 256), (512, 512), (128, 32), (256, 32), (512, 32))


def chip_mesh(chip: str) -> jax.sharding.Mesh:
    """One chip of a generation; while it is set, its default implementation is chosen."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return jax.sharding.Mesh(np.array(topology.devices[:1]), ("chip",))


def compile_for(mesh: jax.sharding.Mesh, function: Any, *shapes: Any) -> tuple[Any, Any]:
    """What a jitted function becomes for a chip: (traced, compiled)."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes
    )
    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*placed)
        return traced, traced.lower().compile()


def measure_layer(chip: str, implementation: str | None, backward: bool) -> dict[str, Any]:
    """Compiles one layer in bfloat16; its FLOPs over the ideal, and its temporary memory."""
    mesh = chip_mesh(chip)
    layer = SparseMoE(
        num_experts=EXPERTS,
        num_selected=SELECTED,
        hidden_dim=HIDDEN,
        dtype=jnp.bfloat16,
        implementation=implementation,
    )
    x = jax.ShapeDtypeStruct((TOKENS, MODEL), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def forward(variables: Any, x: jax.Array) -> jax.Array:
        return layer.apply(variables, x)[0]

    def forward_and_backward(variables: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(forward, variables, x)
        return out, pullback(cotangent)

    start = time.process_time()
    if backward:
        traced, compiled = compile_for(mesh, forward_and_backward, variables, x, x)
    else:
        traced, compiled = compile_for(mesh, forward, variables, x)
    ideal = 6 * TOKENS * SELECTED * MODEL * HIDDEN * (3 if backward else 1)
    total, kernels = compiled.cost_analysis()["flops"], sum(kernel_flops(traced.jaxpr.jaxpr))
    with jax.set_mesh(mesh):
        default = default_implementation()
    return {
        "chip": chip,
        "implementation": implementation or default,
        "default": implementation in (None, default),
        "pass": "forward+backward" if backward else "forward",
        "flops_over_ideal": total / ideal,
        "kernel_flops_over_ideal": kernels / ideal,
        "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "compile_cpu_seconds": round(time.process_time() - start, 1),
    }


def kernel_flops(jaxpr: Any) -> Iterator[int]:
    """What each kernel to be compiled declares as its cost; tests hold it to `pallas_flops`."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            if not equation.params["interpret"]:
                yield equation.params["cost_estimate"].flops
        else:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from kernel_flops(inner)


def measure_tiles(chip: str, seeds: int = 20) -> list[dict[str, Any]]:
    """FLOPs and scheduled bundles of the rows kernel, over the ideal, for each candidate."""
    bundles = {tiles: scheduled_bundles(chip, *tiles) for tiles in CANDIDATES}
    rows = TOKENS * SELECTED
    full = bundles[512, 512][512] * rows / 512
    results = []
    for tile_rows, step in CANDIDATES:
        tiles = Tiles(tile_rows, step, MODEL, HIDDEN)
        flops, cycles = [], []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            sizes = rng.multinomial(rows, np.full(EXPERTS, 1 / EXPERTS))
            flops.append(pallas_flops(rows, MODEL, HIDDEN, sizes, tiles))
            cycles.append(sum(bundles[tile_rows, step][h] for h in heights(sizes, tiles)))
        results.append(
            {
                "chip": chip,
                "tile_rows": tile_rows,
                "step": step,
                "flops_over_ideal": float(np.mean(flops)) / (2 * rows * MODEL * HIDDEN),
                "bundles_over_full_products": float(np.mean(cycles)) / full,
                "bundles_by_height": bundles[tile_rows, step],
            }
        )
    return results


def heights(sizes: np.ndarray, tiles: Tiles) -> Iterator[int]:
    """The height of every product the kernel computes, group by group."""
    ends = np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):
        if start == end:
            continue
        first, last = start // tiles.step * tiles.step, -(-end // tiles.step) * tiles.step
        cuts = [first, *range((first // tiles.rows + 1) * tiles.rows, last, tiles.rows), last]
        yield from (int(height) for height in np.diff(cuts))


def scheduled_bundles(chip: str, tile_rows: int, step: int) -> dict[int, int]:
    """Instruction bundles of a product of each height in the compiler's final schedule."""
    with tempfile.TemporaryDirectory() as folder:
        # The compiler reads where to write its schedule when it is loaded.
        options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {"LIBTPU_INIT_ARGS": options}
        arguments = f"{chip!r}, {tile_rows}, {step}"
        command = f"from benchmarks import moe_layer_tpu; moe_layer_tpu._compile_rows({arguments})"
        subprocess.run(
            [sys.executable, "-c", command], env=environment, check=True, capture_output=True
        )
        (schedule,) = Path(folder).glob("*grouped_matmul_rows*[0-9]-final_bundles.txt")
        return dict(_bundles(schedule.read_text(), step))


def _compile_rows(chip: str, tile_rows: int, step: int) -> None:
    compile_for(
        chip_mesh(chip),
        partial(pallas_rows, tiles=Tiles(tile_rows, step, MODEL, HIDDEN), interpret=False),
        jax.ShapeDtypeStruct((TOKENS * SELECTED, MODEL), jnp.bfloat16),
        jax.ShapeDtypeStruct((EXPERTS, MODEL, HIDDEN), jnp.bfloat16),
        jax.ShapeDtypeStruct((EXPERTS,), jnp.int32),
    )


def _bundles(schedule: str, step: int) -> Iterator[tuple[int, int]]:
    """(height, bundles) of each stretch of code between branches that multiplies."""
    bundles = products = height = 0
    for line in schedule.splitlines():
        if not (start := re.match(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?", line)):
            continue
        if start[1] or "sbr.rel" in line:
            if products:
                height += step
                yield height, bundles
            bundles = products = 0
        bundles, products = bundles + 1, products + line.count("vmatmul")


def print_tables(results: dict[str, Any]) -> None:
    """Prints the layers, then the tiles."""
    shape = results["shape"]
    print(
        "{tokens} tokens, model {model}, hidden {hidden}, {experts} experts, top {selected}, "
        "bfloat16; compiled for one chip".format(**shape)
    )
    print(f"{'chip':5} {'implementation':15} {'pass':17} FLOPs/ideal  temporary MiB  compile CPU s")
    for row in results["layers"]:
        name = row["implementation"] + (" *" if row["default"] else "")
        print(
            f"{row['chip']:5} {name:15} {row['pass']:17} {row['flops_over_ideal']:11.3f}"
            f" {row['temporary_mib']:14.1f} {row['compile_cpu_seconds']:14.1f}"
        )
    print("* the default on that chip")
    if results["tiles"]:
        print("\nchip  tile  step  FLOPs/ideal  bundles/full products")
    for row in results["tiles"]:
        print(
            f"{row['chip']:5} {row['tile_rows']:4} {row['step']:5} {row['flops_over_ideal']:12.3f}"
            f" {row['bundles_over_full_products']:22.2f}"
        )


def main(_: list[str]) -> None:
    """Measures, prints and writes."""
    if importlib.util.find_spec("libtpu") is None:
        raise app.UsageError("libtpu is not installed: pip install 'moe_jax[tpu]'")
    layers = [
        measure_layer(chip, None if implementation == "default" else implementation, backward)
        for chip in flags.FLAGS.chips
        for implementation in flags.FLAGS.implementations
        for backward in (False, True)
    ]
    tiles = [row for chip in flags.FLAGS.tiles_of for row in measure_tiles(chip)]
    results = {
        "shape": {
            "tokens": TOKENS,
            "model": MODEL,
            "hidden": HIDDEN,
            "experts": EXPERTS,
            "selected": SELECTED,
        },
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
        "python": platform.python_version(),
        "layers": layers,
        "tiles": tiles,
    }
    print_tables(results)
    if flags.FLAGS.output:
        Path(flags.FLAGS.output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "JSON file to write.")
    flags.DEFINE_list("chips", list(TOPOLOGIES), "Generations to compile the layer for.")
    flags.DEFINE_list(
        "implementations", ["ragged_dot", "pallas"], "See grouped_matmul; or default."
    )
    flags.DEFINE_list("tiles_of", ["v5e", "v6e"], "Generations to schedule the kernel for.")
    app.run(main)
