"""What a program compiled for a TPU topology computes while it exchanges, in parts of the batch.

python -m benchmarks.compiled_overlap     # no TPU needed; extra `tpu`
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.doc_tables import markdown_table, write_tables
from moe_jax.sharding.compiled_report import CHIPS, report_compiled
from moe_jax.sharding.hlo_schedule import covered_share, read_schedule

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compiled_overlap.json"
DOC = ROOT / "docs" / "sharding.md"
TOPOLOGY = "v5e:2x4"
ASYNCHRONOUS = {"xla_tpu_enable_async_all_to_all": "true"}
CASES = ((1, True), (2, True), (2, False))
CHIP = CHIPS["v5e"]


def layers(x: jax.Array, w: jax.Array, parts: int) -> jax.Array:
    """Two layers of product, dispatch, product, combine, part by part."""
    pieces = jnp.split(x, parts)
    for _ in range(4):
        pieces = [jnp.tanh(piece @ w) for piece in pieces]
        pieces = [jax.lax.all_to_all(piece, "expert", 0, 0, tiled=True) for piece in pieces]
    return jnp.concatenate(pieces)


def compile_case(parts: int, asynchronous: bool) -> dict[str, Any]:
    """Compiles the layers for the topology and reads the schedule."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("expert",))
    rows, all_of_it = PartitionSpec("expert"), PartitionSpec()
    sharded = jax.shard_map(
        lambda x, w: layers(x, w, parts), mesh=mesh, in_specs=(rows, all_of_it), out_specs=rows
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((4096, 1024), rows), ((1024, 1024), all_of_it))
    ]
    options = ASYNCHRONOUS if asynchronous else None
    compiled = jax.jit(sharded).lower(*arguments).compile(compiler_options=options)
    report = read_schedule(compiled.as_text())
    needs = report_compiled(compiled, mesh.shape, CHIP)
    return {
        "parts": parts,
        "asynchronous": asynchronous,
        "flops": report.flops,
        "exchanges": len(report.collectives),
        "bytes": sum(one.times * one.num_bytes for one in report.collectives),
        "async": sum(one.is_async for one in report.collectives),
        "covered": covered_share(report.collectives),
        "covered_at_rates": needs.covered,
        "argument_bytes": needs.argument_bytes,
        "temporary_bytes": needs.temporary_bytes,
        "kinds": [f"{kind} along {axes}" for kind, axes in needs.exchanged],
        "predicted_microseconds": 1e6 * needs.step_seconds,
    }


def tables(results: list[dict[str, Any]]) -> dict[str, str]:
    """The table of the documentation."""
    rows = [
        [
            f"{row['parts']}",
            "on" if row["asynchronous"] else "off",
            f"{row['async']} of {row['exchanges']}",
            f"{row['covered']:.0%}",
            f"{row['covered_at_rates']:.0%}",
            f"{row['predicted_microseconds']:.1f}",
        ]
        for row in results
    ]
    option = f"`{next(iter(ASYNCHRONOUS))}`"
    head = [
        "parts",
        option,
        "with start and done",
        "bytes covered",
        "by enough FLOPs",
        "µs",
    ]
    return {"compiled": markdown_table(head, rows)}


def main(_: Any) -> None:
    """Compiles every case; writes the results, and the table unless the output is elsewhere."""
    # A cache would keep programs that no process without a TPU can read back.
    jax.config.update("jax_enable_compilation_cache", False)
    results = [compile_case(*case) for case in CASES]
    output = Path(flags.FLAGS.output)
    output.write_text(json.dumps(results, indent=1) + "\n")
    if output == RESULTS:
        write_tables(DOC, tables(results))


if __name__ == "__main__":
    flags.DEFINE_string("output", str(RESULTS), "where the results go")
    app.run(main)
