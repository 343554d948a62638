"""Held-out bits per byte: the default sparse model, a dense one as active, and compressors.

python -m benchmarks.language_quality --output=benchmarks/results/language_quality.json

Trains each model once a seed with `moe_jax.language.main`: the default configuration, and the same
with dense layers of the sparse layers' active width. Three seeds of both take about 40 minutes on 2
cores. Then compares, file by file, with `xz -9e`, `bzip2 -9` and PPMd, which get each held-out file
whole and by itself. A run whose workdir is complete is not repeated; remaining arguments go to
every run. Writes the figures of the first sparse run beside the JSON.
"""

import bz2
import importlib.util
import json
import lzma
import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.corpus import held_out_texts
from moe_jax.language.counts import count_parameters
from moe_jax.language.plots import plot_expert_load, plot_loss
from moe_jax.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/language/stdlib_moe.py"
MODELS = {"sparse": [], "dense": ["--config.model.layer_pattern=('dense',)"]}
# Two-sided 97.5% quantiles of Student's t with n - 1 degrees of freedom, by n.
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def compressed_bits(texts: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Bits of each text under each compressor."""
    sizes = {
        # lzma and bz2 write what the command-line tools write, byte for byte.
        "xz -9e": [len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in texts],
        "bzip2 -9": [len(bz2.compress(text, 9)) for text in texts],
    }
    if importlib.util.find_spec("pyppmd"):
        import pyppmd

        sizes["PPMd7, order 6"] = [
            len(pyppmd.compress(text, max_order=6, mem_size=16 << 20)) for text in texts
        ]
    return {name: 8.0 * np.array(values) for name, values in sizes.items()}


def run_training(name: str, seed: int, folder: Path, extra: Sequence[str]) -> Path:
    """Trains one model unless its workdir is complete; returns the workdir."""
    workdir = folder / f"{name}_{seed}"
    if not (workdir / "evaluation.json").exists():
        command = [sys.executable, "-m", "moe_jax.language.main", f"--config={CONFIG}"]
        command += [f"--workdir={workdir}", f"--config.seed={seed}", *MODELS[name], *extra]
        subprocess.run(command, cwd=ROOT, check=True)
    return workdir


def summarize(workdir: Path) -> dict[str, Any]:
    """Figures of one finished run."""
    records = read_metrics(workdir / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    evaluation = json.loads((workdir / "evaluation.json").read_text())
    rates = [record["tokens_per_second"] for record in train if "tokens_per_second" in record]
    summary = {
        "bits_per_byte": evaluation["bits_per_byte"],
        "document_bits": [document["bits"] for document in evaluation["documents"]],
        "document_names": [document["name"] for document in evaluation["documents"]],
        "steps": train[-1]["step"],
        "median_tokens_per_second": float(np.median(rates)),
        "training_minutes": sum(record["seconds"] for record in train) / 60.0,
    }
    if "load" in train[-1]:
        last = np.mean([record["load"] for record in train[-10:]], axis=0)
        summary["least_load_over_mean"] = (last.min(axis=1) * last.shape[1]).tolist()
    return summary


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of the 95% t interval over seeds; width nan for one seed."""
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    half = T_QUANTILE[len(values)] * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(half)


def print_table(results: dict[str, Any]) -> None:
    """Prints the comparison as a Markdown table."""
    num_bytes = np.array(results["document_bytes"])
    seeds = len(results["seeds"])
    print(f"\nheld out: {len(num_bytes)} files, {num_bytes.sum():,} bytes; {seeds} seeds\n")
    print("| method | parameters (active) | bits per byte | files won by sparse |")
    print("| --- | --- | --- | --- |")
    sparse = np.mean([run["document_bits"] for run in results["sparse"]], axis=0)
    for name in MODELS:
        mean, half = interval([run["bits_per_byte"] for run in results[name]])
        total, active = results["parameters"][name]
        other = np.mean([run["document_bits"] for run in results[name]], axis=0)
        won = "" if name == "sparse" else f"{np.sum(sparse < other)} of {len(other)}"
        size = f"{total / 1e6:.2f}M ({active / 1e6:.2f}M)"
        steps = results[name][0]["steps"]
        print(f"| {name}, {steps} steps | {size} | {mean:.3f} ± {half:.3f} | {won} |")
    for name, bits in results["compressors"].items():
        won = f"{np.sum(sparse < np.array(bits))} of {len(bits)}"
        print(f"| {name} | | {np.sum(bits) / num_bytes.sum():.3f} | {won} |")
    least = np.min([run["least_load_over_mean"] for run in results["sparse"]])
    print(f"\nleast-loaded expert / mean load, worst layer and seed, last ten records: {least:.2f}")
    for name in MODELS:
        minutes = np.median([run["training_minutes"] for run in results[name]])
        rate = np.median([run["median_tokens_per_second"] for run in results[name]])
        print(f"{name}: {minutes:.1f} minutes in steps, {rate:,.0f} tokens/s (medians over seeds)")


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    extra = argv[1:]
    spec = importlib.util.spec_from_file_location("config", ROOT / CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    texts = held_out_texts(None, held_out_fraction=config.data.held_out_fraction)
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "seeds": list(range(_SEEDS.value)),
        "document_names": [name for name, _ in texts],
        "document_bytes": [len(text) for _, text in texts],
        "compressors": {
            name: bits.tolist() for name, bits in compressed_bits([t for _, t in texts]).items()
        },
        "parameters": {
            name: count_parameters(
                LanguageModelConfig(**{**config.model, "vocab_size": 259, "layer_pattern": (name,)})
            )
            for name in MODELS
        },
    }
    for seed in results["seeds"]:
        for name in MODELS:
            workdir = run_training(name, seed, Path(_RUNS.value).absolute(), extra)
            results.setdefault(name, []).append(summarize(workdir))
    print_table(results)
    output = Path(_OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    draw_figures(results, Path(_RUNS.value) / "sparse_0", output)


def draw_figures(results: dict[str, Any], workdir: Path, output: Path) -> None:
    """Draws loss, with the peers as lines, and expert load of one run beside the JSON file."""
    records = read_metrics(workdir / "metrics.jsonl")
    num_bytes = sum(results["document_bytes"])
    references = {name: sum(bits) / num_bytes for name, bits in results["compressors"].items()}
    references["dense, all files"] = interval([run["bits_per_byte"] for run in results["dense"]])[0]
    plot_loss(records, output.with_name(f"{output.stem}_loss.png"), references)
    plot_expert_load(records, output.with_name(f"{output.stem}_load.png"))


_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1, upper_bound=5)
_RUNS = flags.DEFINE_string("runs", "runs/language_quality", "Folder of the workdirs.")
_OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/language_quality.json", "File to write."
)

if __name__ == "__main__":
    app.run(main)
