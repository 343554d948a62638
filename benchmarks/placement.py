"""Device visits, load and bytes of expert placements on recorded routing; Mozart's streams.

python -m moe_jax.language.main --config=configs/language/stdlib_moe.py --workdir=runs/stdlib_moe
python -m benchmarks.placement --runs=default=runs/stdlib_moe,fine=runs/fine
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks.doc_tables import markdown_table, write_tables
from moe_jax.language.batches import evaluation_windows
from moe_jax.language.corpus import load_corpus
from moe_jax.language.fit import forward
from moe_jax.language.load import load_language_model
from moe_jax.language.model import LanguageModel
from moe_jax.language.settings import read_configuration, read_settings
from moe_jax.sharding import (
    busiest_device,
    device_visits,
    expert_use,
    permute_experts,
    place_experts,
    uninformed_device_visits,
)
from moe_jax.sharding.placement import PLACEMENTS, even_groups, place_in_tree, to_permutation
from moe_jax.sharding.streaming import Package, StreamedModel, Streaming, simulate_streaming

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "placement.json"
DOC = ROOT / "docs" / "sharding.md"
NUM_TOKENS = 16_384
RANDOM_DRAWS = 20
BATCH_ROWS = 16


def record_routing(workdir: Path) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Which experts held-out tokens of a run use, layer by layer, and facts about the run.

    Permutes the experts of every layer by its placement on 4 devices too, and compares logits.
    """
    settings = read_settings(read_configuration(workdir))
    loaded = load_language_model(workdir)
    corpus = load_corpus(
        settings.data.source,
        loaded.tokenizer,
        held_out_fraction=settings.data.held_out_fraction,
        cache_dir=settings.data.cache_dir or workdir / "cache",
        text_key=settings.data.text_key,
    )
    windows = list(
        evaluation_windows(
            corpus.held_out,
            batch_size=BATCH_ROWS,
            sequence_length=loaded.sequence_length,
            stride=loaded.sequence_length,
            pad_id=loaded.tokenizer.pad_id,
        )
    )
    for window in windows:
        window.pop("document_index")
    run = jax.jit(lambda variables, batch: forward(loaded.model, variables, batch))
    # Spread over the documents, so that placement is chosen and measured on different ones.
    wanted = -(-NUM_TOKENS // (BATCH_ROWS * loaded.sequence_length))
    chosen = np.unique(np.linspace(0, len(windows) - 1, wanted).astype(int))
    config = loaded.model.config
    uses: list[list[np.ndarray]] = [[] for _ in range(config.num_sparse_layers)]
    for index in chosen:
        _, routing = run(loaded.variables, windows[index])
        is_counted = np.asarray(windows[index]["loss_mask"]).reshape(-1)
        for layer, found in enumerate(uses):
            use = expert_use(
                np.asarray(routing.expert_index[layer]),
                config.num_experts,
                np.asarray(routing.keep[layer]),
            )
            found.append(use[is_counted])
    recorded = [np.concatenate(found) for found in uses]
    placed = np.stack([place_experts(use, 4) for use in recorded])
    # In bfloat16 the products of other blocks of rows round differently.
    wide = LanguageModel(dataclasses.replace(config, dtype="float32"))
    score = jax.jit(lambda variables, batch: forward(wide, variables, batch)[0])
    batch = {name: values[:1] for name, values in windows[0].items()}
    logits = score(loaded.variables, batch)
    moved = score(permute_experts(loaded.variables, placed), batch)
    facts = {
        "step": loaded.step,
        "experts": config.num_experts,
        "selected": config.num_selected,
        "layers": config.num_sparse_layers,
        "tokens": len(recorded[0]),
        "dtype": config.dtype,
        "largest_logit": float(np.abs(logits).max()),
        "largest_change_of_logits": float(np.abs(np.asarray(logits) - np.asarray(moved)).max()),
    }
    return recorded, facts


def measure_placements(
    recorded: list[np.ndarray], num_selected: int, num_devices: int
) -> dict[str, Any]:
    """Visits and busiest device on the second half of the tokens, placed by the first half."""
    out = {}
    for method in PLACEMENTS:
        draws = RANDOM_DRAWS if method == "random" else 1
        visits, busiest = [], []
        for use, seed in itertools.product(recorded, range(draws)):
            half = len(use) // 2
            permutation = place_experts(use[:half], num_devices, method=method, seed=seed)
            visits.append(device_visits(use[half:], permutation, num_devices))
            load = use[half:].mean(axis=0)
            busiest.append(busiest_device(load, permutation, num_devices))
        out[method] = {"visits": float(np.mean(visits)), "busiest": float(np.mean(busiest))}
    num_experts = recorded[0].shape[1]
    expected = uninformed_device_visits(num_experts, num_selected, num_devices)
    return {"methods": out, "closed_form": expected}


# Layers, experts, k, hidden width of an expert, heads of keys and values, shared experts; width
# 2048, 16 or 32 query heads of 128. Speed-ups A, B, C and visits of B and C of arXiv 2603.07006.
MODELS = {
    "Qwen3-30B-A3B": ((48, 128, 8, 768, 4, 0, 32), (1.33, 1.69, 1.92), (6.58, 5.77)),
    "OLMoE-1B-7B": ((16, 64, 8, 1024, 16, 0, 16), (1.58, 2.05, 2.37), (6.84, 5.63)),
    "DeepSeek-MoE-16B": ((28, 64, 6, 1408, 16, 2, 16), (1.49, 1.89, 2.17), (5.56, 4.32)),
}
WIDTH, LENGTH, SEQUENCES = 2048, 256, 32
STRENGTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
STEPS = {
    "baseline": (Streaming(), False),
    "tokens alone": (Streaming(4), False),
    "experts alone": (Streaming(1, True), False),
    "merged copies alone": (Streaming(1, False, True), False),
    "placement alone": (Streaming(), True),
    "A: tokens, experts": (Streaming(4, True), False),
    "B: A, merged copies": (Streaming(4, True, True), False),
    "C: B, placement": (Streaming(4, True, True), True),
}


def topical_routing(
    num_experts: int, num_selected: int, strength: float, *, tokens: int = 2000, seed: int = 0
) -> np.ndarray:
    """Invented routing: 16 topics of equally many experts, each token inclined to one of them.

    Experts differ in how often they are chosen, as those of OLMoE do.
    """
    rng = np.random.default_rng(seed)
    topic_of = rng.permutation(np.arange(num_experts) % 16)
    favour = strength * (topic_of[None, :] == rng.integers(16, size=tokens)[:, None])
    score = favour + 0.5 * rng.normal(size=num_experts) + rng.gumbel(size=(tokens, num_experts))
    return expert_use(np.argsort(-score, axis=1)[:, :num_selected], num_experts)


def run_streaming() -> dict[str, Any]:
    """The ablation, on routing as clustered as the paper's visits with its placement say."""
    package = Package()
    out = {}
    for name, (shape, speed_ups, visits) in MODELS.items():
        layers, experts, selected, hidden, kv_heads, shared, heads = shape
        weights = 2 * WIDTH * 128 * (heads + kv_heads) + 3 * WIDTH * hidden * shared
        model = StreamedModel(
            num_layers=layers,
            num_tokens=SEQUENCES * LENGTH,
            attention_flops=2.0 * weights + 4.0 * LENGTH * 128 * heads,
            expert_flops=6.0 * WIDTH * hidden,
            attention_bytes=2.0 * weights,
            expert_bytes=6.0 * WIDTH * hidden,
            token_bytes=2.0 * WIDTH,
        )
        trials = []
        for strength in STRENGTHS:
            use = topical_routing(experts, selected, strength)
            placed = place_in_tree(use, (package.groups, package.chiplets_per_group))
            trials.append((device_visits(use, placed, 16), strength, use, placed))
        _, strength, use, placed = min(trials, key=lambda trial: abs(trial[0] - visits[1]))
        contiguous = np.arange(experts)
        seconds = {
            key: simulate_streaming(
                package, model, streaming, use, placed if is_placed else contiguous
            ).seconds
            for key, (streaming, is_placed) in STEPS.items()
        }
        out[name] = {
            "seconds": seconds,
            "paper": dict(zip("ABC", speed_ups, strict=True)),
            "strength": strength,
            "visits": {
                "B": device_visits(use, contiguous, 16),
                "C": device_visits(use, placed, 16),
                "closed form": uninformed_device_visits(experts, selected, 16),
            },
        }
    return out


def run_olmoe(path: Path) -> dict[str, Any]:
    """Busiest of 8 and 16 devices over the mean, contiguous and by load, of the recorded loads."""
    domains = json.loads(path.read_text())["OLMoE-1B-7B"]
    loads = [np.array(layer, float) for layers in domains.values() for layer in layers]
    out = {}
    for devices in (8, 16):
        before = [busiest_device(load, np.arange(64), devices) for load in loads]
        after = [
            busiest_device(load, to_permutation(even_groups(load, devices)), devices)
            for load in loads
        ]
        out[f"{devices}"] = {
            key: [min(values), float(np.mean(values)), max(values)]
            for key, values in (("contiguous", before), ("load", after))
        }
    return out


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables of the documentation, by name."""
    out = {}
    if "recorded" in results:
        rows = []
        for record in results["recorded"].values():
            facts = record["facts"]
            for devices, measured in record["devices"].items():
                name = f"E {facts['experts']}, k {facts['selected']}, D {devices}"
                cells = [
                    f"{measured['methods'][method]['visits']:.2f} / "
                    f"{measured['methods'][method]['busiest']:.2f}"
                    for method in PLACEMENTS
                ]
                rows.append([name, f"{measured['closed_form']:.2f}", *cells])
        out["placements"] = markdown_table(["", "closed form", *PLACEMENTS], rows)
    if "olmoe" in results:
        rows = [
            [devices, *(" / ".join(f"{value:.2f}" for value in record[key]) for key in record)]
            for devices, record in results["olmoe"].items()
        ]
        out["olmoe"] = markdown_table(["devices", "contiguous", "load"], rows)
    rows = []
    for key in STEPS:
        cells = []
        for record in results["streaming"].values():
            gain = record["seconds"]["baseline"] / record["seconds"][key]
            paper = record["paper"].get(key[0]) if key[1] == ":" else None
            cells.append(f"{gain:.2f}" + (f" ({paper})" if paper else ""))
        rows.append([key, *cells])
    out["streaming"] = markdown_table(["", *results["streaming"]], rows)
    return out


def main(_: Any) -> None:
    """Measures what is asked for, adds it to the results, and writes the tables."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for pair in flags.FLAGS.runs:
        name, _, workdir = pair.partition("=")
        recorded, facts = record_routing(Path(workdir).expanduser())
        devices = [count for count in (4, 8) if facts["experts"] % count == 0]
        results.setdefault("recorded", {})[name] = {
            "facts": facts,
            "devices": {
                f"{count}": measure_placements(recorded, facts["selected"], count)
                for count in devices
            },
        }
    if flags.FLAGS.loads:
        results["olmoe"] = run_olmoe(Path(flags.FLAGS.loads))
    if flags.FLAGS.streaming:
        results["streaming"] = run_streaming()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_tables(DOC, tables(results))


if __name__ == "__main__":
    flags.DEFINE_list("runs", [], "name=workdir of finished runs of moe_jax.language.main")
    flags.DEFINE_boolean("streaming", True, "simulate the streams")
    flags.DEFINE_string("loads", "", "expert_counts.json of OLMoE's routing outputs")
    app.run(main)
