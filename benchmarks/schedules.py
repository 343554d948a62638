"""Schedules of a training step, simulated: FlowMoE's four models, its grid of layers, chunk sizes.

python -m benchmarks.schedules            # writes benchmarks/results/schedules*.{json,png}, docs
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.doc_tables import markdown_table, write_tables
from moe_jax.sharding import (
    SCHEDULES,
    Cost,
    Link,
    Network,
    Schedule,
    StepWork,
    exchange_costs,
    simulate_step,
)
from moe_jax.sharding.chunk_size import search_chunk_bytes
from moe_jax.sharding.layer_times import LayerShape, work_from_shape
from moe_jax.sharding.schedule_plots import plot_schedules
from moe_jax.sharding.schedule_simulator import MEBIBYTE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "schedules.json"
DOC = ROOT / "docs" / "sharding.md"

# Rates and start-ups are assumptions: nodes of 8 on 100 Gb/s, and nodes of 2 on 10 Gb/s, PCIe in
# the node, products in float32 at half of the cards' 35.6 and 13.4 Tflop/s.
CLUSTERS = {
    "2 x 8 RTX 3090, 100 Gb/s": (
        Network(2, 8, Link(10e-6, 10e9), Link(30e-6, 12.5e9 / 8), Link(5e-6, 10e9)),
        17.8e12,
    ),
    "4 x 2 RTX 2080 Ti, 10 Gb/s": (
        Network(4, 2, Link(10e-6, 10e9), Link(30e-6, 1.25e9 / 2), Link(5e-6, 1.25e9)),
        6.7e12,
    ),
}
# Milliseconds on 16 cards, arXiv 2510.00207: layers, attention and gate, reduction, and a step
# under each schedule.
PAPER: dict[str, tuple[int, float, float, dict[str, float]]] = {
    name: (layers, attention, reduction, dict(zip(SCHEDULES, times, strict=True)))
    for name, layers, attention, reduction, *times in (
        ("GPT2-Tiny-MoE", 12, 23.5, 32.6, 169.5, 135.3, 129.3, 116.4, 95.6),
        ("BERT-Large-MoE", 24, 61.9, 98.3, 537.8, 490.8, 501.1, 405.6, 351.9),
        ("LLaMA2-MoE", 32, 308.4, 368.8, 1987.7, 1759.1, 1534.1, 1374.3, 1124.0),
        ("DeepSeek-V2-S", 4, 870.2, 1247.8, 5843.3, 4562.5, 4481.4, 4093.7, 3205.3),
    )
}
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7)
FINE = dataclasses.replace(SCHEDULES["FlowMoE"], chunk_bytes=1.0)
ABLATION = {
    "vanilla": Schedule(),
    "parts of the experts": Schedule(parts=2),
    "+ parts of attention": Schedule(parts=2, splits_attention=True),
    "parts of the experts + reduction in chunks": Schedule(parts=2, chunk_bytes=1.0),
    "all": FINE,
}
GRID = {
    "batch": (2, 4, 8),
    "capacity_factor": (1.0, 1.1, 1.2),
    "length": (512, 1024, 2048),
    "model_dim": (512, 1024, 2048, 4096, 8192),
    "hidden_dim": (512, 1024, 2048, 4096, 8192),
}
GRID_LAYERS = 2
GRID_CHUNKS = (2, 8, 32)


def model_work(name: str, share: float) -> StepWork:
    """A model of the paper whose exchanges take `share` of the time the paper does not list.

    Attention and experts take a third of their time forwards. Start-ups are 0. The algorithms of
    the exchange differ as on the first cluster, in which a linear one takes the given time.
    """
    layers, attention, reduction, times = PAPER[name]
    rest = times["vanilla"] - attention - reduction
    network = next(iter(CLUSTERS.values()))[0]
    # Of so many bytes that the choice between algorithms does not depend on their start-ups.
    costs = exchange_costs(network, 1e15)
    scale = 1e-3 * share * rest / layers / 4 / costs["linear"].transfer
    return StepWork(
        num_layers=layers,
        attention=1e-3 * attention / layers / 3,
        experts=1e-3 * (1 - share) * rest / layers / 3,
        exchange={key: Cost(0.0, scale * cost.transfer) for key, cost in costs.items()},
        reduction=Cost(0.0, 1e-3 * reduction / layers),
        reduction_bytes=64.0,
    )


def run_models() -> dict[str, Any]:
    """Milliseconds of every schedule and ablation, by model and share."""
    schedules = SCHEDULES | {"FlowMoE": FINE}
    return {
        name: {
            f"{share}": {
                key: 1e3 * simulate_step(model_work(name, share), schedule).seconds
                for key, schedule in (schedules | ABLATION).items()
            }
            for share in SHARES
        }
        for name in PAPER
    }


def run_grid() -> dict[str, Any]:
    """Speed-ups over vanilla on every layer of the grid: quantiles, and how often each order."""
    shapes = [
        LayerShape(**dict(zip(GRID, values, strict=True)))
        for values in itertools.product(*GRID.values())
    ]
    out = {}
    for cluster, (network, rate) in CLUSTERS.items():
        rows = []
        for shape in shapes:
            work = work_from_shape(shape, network, flops_per_second=rate, num_layers=GRID_LAYERS)
            *others, flow = SCHEDULES.values()
            tuned = [
                simulate_step(work, dataclasses.replace(flow, chunk_bytes=mebibytes * MEBIBYTE))
                for mebibytes in GRID_CHUNKS
            ]
            rows.append(
                [simulate_step(work, schedule).seconds for schedule in others]
                + [min(timeline.seconds for timeline in tuned)]
            )
        seconds = np.array(rows)
        gains = seconds[:, :1] / seconds
        over = seconds[:, list(SCHEDULES).index("ScheMoE")] / seconds[:, -1]
        out[cluster] = {
            "layers": len(shapes),
            "gain": {
                name: np.quantile(gains[:, index], (0.1, 0.5, 0.9)).tolist()
                for index, name in enumerate(SCHEDULES)
            },
            "flow_over_schemoe": {
                "mean": float(np.mean(over)),
                "faster": float(np.mean(over > 1)),
            },
            "flow_fastest": float(np.mean(np.argmin(seconds, axis=1) == len(SCHEDULES) - 1)),
        }
    return out


def run_chunks() -> dict[str, Any]:
    """Chunk sizes found in 8 samples, and the best of 120, for four layers of three widths."""
    network, rate = next(iter(CLUSTERS.values()))
    out = {}
    for model_dim in (1024, 4096, 8192):
        shape = LayerShape(4, 1024, model_dim, model_dim)
        work = work_from_shape(shape, network, flops_per_second=rate, num_layers=4)

        def seconds(chunk_bytes: float, work: StepWork = work) -> float:
            schedule = dataclasses.replace(SCHEDULES["FlowMoE"], chunk_bytes=chunk_bytes)
            return simulate_step(work, schedule).seconds

        sizes = np.geomspace(MEBIBYTE / 8, 16 * MEBIBYTE, 120)
        times = [seconds(float(size)) for size in sizes]
        found = search_chunk_bytes(seconds)
        whole = simulate_step(
            work, dataclasses.replace(SCHEDULES["FlowMoE"], chunk_bytes=None)
        ).seconds
        out[f"{model_dim}"] = {
            "found_mib": found.chunk_bytes / MEBIBYTE,
            "found_ms": 1e3 * found.seconds,
            "best_mib": float(sizes[np.argmin(times)]) / MEBIBYTE,
            "best_ms": 1e3 * min(times),
            "worst_ms": 1e3 * max(times),
            "one_reduction_ms": 1e3 * whole,
        }
    return out


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables of the documentation, by name."""
    models, grid, chunks = results["models"], results["grid"], results["chunks"]
    rows = []
    for name, by_share in models.items():
        paper = PAPER[name][3]
        for key in list(SCHEDULES)[1:]:
            simulated = [times["vanilla"] / times[key] for times in by_share.values()]
            rows.append(
                [name, key, f"{paper['vanilla'] / paper[key]:.2f}"]
                + [f"{gain:.2f}" for gain in simulated]
            )
    head = ["model", "schedule", "paper", *(f"share {share}" for share in SHARES)]
    out = {"models": markdown_table(head, rows)}
    rows = [
        [key, *(f"{times['0.5']['vanilla'] / times['0.5'][key]:.2f}" for times in models.values())]
        for key in ABLATION
    ]
    out["ablation"] = markdown_table(["at share 0.5", *models], rows)
    rows = [
        [cluster, key, *(f"{gain:.2f}" for gain in gains)]
        for cluster, record in grid.items()
        for key, gains in record["gain"].items()
        if key != "vanilla"
    ]
    out["grid"] = markdown_table(["cluster", "schedule", "10%", "median", "90%"], rows)
    rows = [
        [
            cluster,
            f"{record['flow_over_schemoe']['mean']:.2f}",
            f"{record['flow_over_schemoe']['faster']:.0%}",
            f"{record['flow_fastest']:.0%}",
        ]
        for cluster, record in grid.items()
    ]
    head = ["cluster", "mean of ScheMoE's time / FlowMoE's", "FlowMoE faster", "fastest of all"]
    out["grid_pairs"] = markdown_table(head, rows)
    rows = [
        [
            width,
            f"{record['one_reduction_ms']:.1f}",
            f"{record['worst_ms']:.1f}",
            f"{record['best_ms']:.1f} at {record['best_mib']:.2f}",
            f"{record['found_ms']:.1f} at {record['found_mib']:.2f}",
        ]
        for width, record in chunks.items()
    ]
    head = ["M = H", "one reduction", "worst chunk", "best of 120 (MiB)", "found in 8 (MiB)"]
    out["chunks"] = markdown_table(head, rows)
    return out


def draw_schedules(path: Path) -> None:
    """Two layers of the smallest model under each schedule; four chunks of reduction a layer."""
    work = dataclasses.replace(model_work("GPT2-Tiny-MoE", 0.5), num_layers=2)
    coarse = dataclasses.replace(FINE, chunk_bytes=work.reduction_bytes / 4)
    timelines = {
        name: simulate_step(work, schedule)
        for name, schedule in (SCHEDULES | {"FlowMoE": coarse}).items()
    }
    plot_schedules(timelines, path)


def main(_: Any) -> None:
    """Runs what is asked for, and writes results, figure and tables."""
    if not flags.FLAGS.tables_only:
        results = {"models": run_models(), "grid": run_grid(), "chunks": run_chunks()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw_schedules(RESULTS.with_suffix(".png"))
    write_tables(DOC, tables(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    flags.DEFINE_boolean(
        "tables_only", False, "write tables and picture, with the results that there are"
    )
    app.run(main)
