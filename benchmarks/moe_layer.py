"""Speed of the sparse layer on CPU beside a dense one, other dispatches and Hugging Face's Mixtral.

python -m benchmarks.moe_layer --output=benchmarks/results/moe_layer.json

Every round times each contestant once, so that what else the machine does strikes all alike, and
after an untimed run, so that each finds its own data in the caches. Printed are medians over rounds
and, pair by pair, how many times faster our layer was in the same round (quartiles). All compute
the same layer from the same weights, which is checked. PyTorch runs in a process of its own with as
many threads. FLOPs are those of the experts' products that are needed, 6 T K D F forward and three
times that with backward, for everyone. Takes about 13 minutes on 2 cores; install the extra `bench`
for the peer.
"""

import importlib.util
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from moe_jax.core import FeedForward, SparseMoE, combine, dispatch, sort_by_expert, top_k_routing
from moe_jax.training.memory import keep_freed_memory

OURS, DENSE = "moe_jax, no token dropped", "dense layer, equal FLOPs"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
PASSES = ("forward", "forward+backward")
# Its third, batched_mm, copies the weights once an assignment: 50 GB here.
TORCH_EXPERTS = ("eager", "grouped_mm")
# Let PyTorch's threads fall asleep: for 200 ms they wait in a busy loop.
PAUSE_SECONDS = 0.25


class Workload(NamedTuple):
    """T, D, F, E and K of a layer of gated SiLU experts."""

    tokens: int
    model: int
    hidden: int
    experts: int
    selected: int

    def gigaflop(self, which: str) -> float:
        """Of the experts' products."""
        forward = 6.0 * self.tokens * self.selected * self.model * self.hidden / 1e9
        return forward if which == "forward" else 3.0 * forward


class Contestant(NamedTuple):
    """Functions that take a pass's name and run it once, or give its bytes of temporary memory."""

    run: Callable[[str], None]
    temporary_bytes: Callable[[str], int | None]
    passes: tuple[str, ...] = PASSES


WORKLOADS = (Workload(4096, 512, 1024, 16, 2), Workload(4096, 512, 512, 64, 8))
QUICK_WORKLOADS = (Workload(512, 128, 256, 16, 2),)
SWEEP_EXPERTS = (8, 16, 32, 64, 128, 256)
SWEEPS = (Workload(4096, 512, 1024, 0, 2), Workload(16384, 512, 256, 0, 2))
QUICK_SWEEPS = (Workload(1024, 128, 64, 0, 2),)


def make_arrays(load: Workload) -> dict[str, np.ndarray]:
    """Weights and tokens, the same in every process."""
    generator = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return generator.standard_normal(shape, np.float32) * np.float32(scale)

    inner, outer = load.model**-0.5, load.hidden**-0.5
    return {
        "tokens": normal(load.tokens, load.model),
        "router": normal(load.model, load.experts, scale=inner),
        "gate": normal(load.experts, load.model, load.hidden, scale=inner),
        "up": normal(load.experts, load.model, load.hidden, scale=inner),
        "down": normal(load.experts, load.hidden, load.model, scale=outer),
    }


def make_contestants(load: Workload, dtype: str) -> dict[str, Contestant]:
    """The layers that run in this process."""
    arrays = {name: jnp.asarray(array) for name, array in make_arrays(load).items()}
    tokens = arrays.pop("tokens").astype(DTYPES[dtype])
    router = {"gate": {"kernel": arrays.pop("router")}}
    layer = partial(
        SparseMoE,
        num_experts=load.experts,
        num_selected=load.selected,
        hidden_dim=load.hidden,
        dtype=DTYPES[dtype],
    )
    variables = {"router": router, "experts": arrays}

    def sparse(**options: Any) -> Callable[..., jax.Array]:
        return lambda params, x: layer(**options).apply({"params": params}, x)[0]

    wide = FeedForward(hidden_dim=load.selected * load.hidden, dtype=DTYPES[dtype])
    joined = {
        name: jnp.concatenate(list(arrays[name][: load.selected]), axis=0 if name == "down" else 1)
        for name in arrays
    }
    contestants = {
        OURS: jax_contestant(sparse(), variables, tokens),
        DENSE: jax_contestant(lambda p, x: wide.apply({"params": p}, x), joined, tokens),
        "moe_jax, capacity factor 1.25": jax_contestant(
            sparse(capacity_factor=1.25), variables, tokens
        ),
    }
    if load.experts <= 16:
        # Tens of times slower: once forward shows it.
        contestants["jax.lax.ragged_dot"] = jax_contestant(
            sparse(implementation="ragged_dot"), variables, tokens, ("forward",)
        )
        contestants["one-hot einsum, capacity factor 1.25"] = jax_contestant(
            partial(one_hot_layer, load, DTYPES[dtype]), variables, tokens, ("forward",)
        )
    return contestants


def jax_contestant(
    function: Callable[..., jax.Array],
    params: Any,
    tokens: jax.Array,
    passes: tuple[str, ...] = PASSES,
) -> Contestant:
    """Compiles function(params, tokens), and its derivative in both for a cotangent of ones."""

    def both(params: Any, tokens: jax.Array) -> Any:
        out, pullback = jax.vjp(function, params, tokens)
        return out, pullback(jnp.ones_like(out))

    compiled = {
        name: jax.jit(program).lower(params, tokens).compile()
        for name, program in zip(PASSES, (function, both), strict=True)
        if name in passes
    }

    def temporary_bytes(which: str) -> int | None:
        return compiled[which].memory_analysis().temp_size_in_bytes if which in passes else None

    return Contestant(
        lambda which: jax.block_until_ready(compiled[which](params, tokens)),
        temporary_bytes,
        passes,
    )


def one_hot_layer(load: Workload, dtype: Any, params: Any, x: jax.Array) -> jax.Array:
    """Dispatch and combination as products with one-hot [tokens, experts, capacity] (GShard)."""
    capacity = -(-5 * load.tokens * load.selected // (4 * load.experts))
    logits = x.astype(jnp.float32) @ params["router"]["gate"]["kernel"]
    routing = top_k_routing(logits, load.selected)
    chosen = jax.nn.one_hot(routing.expert_index, load.experts)
    taken = jnp.cumsum(jnp.sum(chosen, axis=1), axis=0) - jnp.sum(chosen, axis=1)
    place = jnp.einsum("tke,te->tk", chosen, taken).astype(jnp.int32)
    place = jax.nn.one_hot(place, capacity)
    combined = jnp.einsum("tke,tkc,tk->tec", chosen, place, routing.combine_weight).astype(dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = {name: weight.astype(dtype) for name, weight in params["experts"].items()}
    slots = product("tec,td->ecd", (combined > 0).astype(dtype), x).astype(dtype)
    hidden = jax.nn.silu(product("ecd,edf->ecf", slots, weights["gate"]))
    hidden = (hidden * product("ecd,edf->ecf", slots, weights["up"])).astype(dtype)
    answers = product("ecf,efd->ecd", hidden, weights["down"]).astype(dtype)
    return product("tec,ecd->td", combined, answers).astype(x.dtype)


def moves_share(load: Workload, dtype: str) -> Contestant:
    """All of the layer but the experts: gate, routing, sort, dispatch and combination."""
    arrays = make_arrays(load)
    tokens = jnp.asarray(arrays["tokens"], DTYPES[dtype])

    def moves(router: jax.Array, x: jax.Array) -> jax.Array:
        routing = top_k_routing(x.astype(jnp.float32) @ router, load.selected)
        order = sort_by_expert(routing)
        return combine(dispatch(x, order), routing.combine_weight, order)

    return jax_contestant(moves, jnp.asarray(arrays["router"]), tokens)


class TorchPeer:
    """Hugging Face's Mixtral block in a process of its own."""

    def __init__(self, load: Workload, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve_torch, args=(theirs, load, dtype), daemon=True)
        self.process.start()
        self.output = self.connection.recv()

    def seconds(self, experts: str, which: str) -> float:
        """Runs one pass."""
        self.connection.send((experts, which))
        seconds = self.connection.recv()
        time.sleep(PAUSE_SECONDS)
        return seconds

    def close(self) -> None:
        """Ends the process."""
        self.connection.send(None)
        self.process.join()


def serve_torch(connection: Any, load: Workload, dtype: str) -> None:
    """Times the passes asked for, until None is; sends first what the block answers."""
    keep_freed_memory()
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.set_num_threads(os.cpu_count() or 1)
    arrays = {name: torch.from_numpy(array) for name, array in make_arrays(load).items()}
    blocks = {}
    for experts in TORCH_EXPERTS:
        config = MixtralConfig(
            hidden_size=load.model,
            intermediate_size=load.hidden,
            num_local_experts=load.experts,
            num_experts_per_tok=load.selected,
            experts_implementation=experts,
        )
        block = MixtralSparseMoeBlock(config)
        inner = torch.cat([arrays["gate"], arrays["up"]], dim=2).transpose(1, 2)
        block.gate.weight.data = arrays["router"].T.contiguous()
        block.experts.gate_up_proj.data = inner.contiguous()
        block.experts.down_proj.data = arrays["down"].transpose(1, 2).contiguous()
        blocks[experts] = block.to(getattr(torch, dtype))
    tokens = arrays["tokens"][None].to(getattr(torch, dtype))

    def forward(block: Any) -> Any:
        with torch.inference_mode():
            return block(tokens)

    def both(block: Any) -> None:
        leaf = tokens.clone().requires_grad_()
        block.zero_grad(set_to_none=True)
        out = block(leaf)
        out.backward(torch.ones_like(out))

    passes = dict(zip(PASSES, (forward, both), strict=True))
    connection.send(forward(blocks["eager"])[0].float().numpy())
    while (asked := connection.recv()) is not None:
        experts, which = asked
        connection.send(timed(passes[which], blocks[experts]))


def measure(load: Workload, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of every contestant and pass in each round, and temporary memory."""
    contestants = make_contestants(load, dtype)
    contestants["moves"] = moves_share(load, dtype)
    runs: dict[str, dict[str, Callable[[], float]]] = {
        name: {which: partial(timed, contestant.run, which) for which in contestant.passes}
        for name, contestant in contestants.items()
    }
    peer = TorchPeer(load, dtype) if has_peer() else None
    if peer is not None:
        check_same(load, dtype, peer.output)
        for experts in TORCH_EXPERTS:
            runs[f"Hugging Face Mixtral, {experts}"] = {
                which: partial(peer.seconds, experts, which) for which in PASSES
            }
    seconds: dict[str, dict[str, list[float]]] = {
        name: {which: [] for which in passes} for name, passes in runs.items()
    }
    for number in range(rounds):
        for name, passes in runs.items():
            # One round of the slow ones is enough.
            if len(passes) == len(PASSES) or number == 0:
                for which, run in passes.items():
                    seconds[name][which].append(run())
    if peer is not None:
        peer.close()
    memory = {
        name: {which: contestant.temporary_bytes(which) for which in contestant.passes}
        for name, contestant in contestants.items()
    }
    return {"workload": load._asdict(), "dtype": dtype, "seconds": seconds, "temporary": memory}


def sweep(load: Workload, rounds: int, num_experts: Sequence[int]) -> dict[str, Any]:
    """Seconds of our layer by number of experts, float32, at equal FLOPs.

    Beside them those of copying all weights once, which no layer that slices them can undercut.
    """
    seconds: dict[int, dict[str, float]] = {}
    add_one = jax.jit(lambda weights: jax.tree.map(lambda weight: weight + 1.0, weights))

    def copy(weights: Any) -> None:
        jax.block_until_ready(add_one(weights))

    for experts in num_experts:
        wanted = load._replace(experts=experts)
        arrays = {name: jnp.asarray(array) for name, array in make_arrays(wanted).items()}
        tokens, router = arrays.pop("tokens"), {"gate": {"kernel": arrays.pop("router")}}
        layer = SparseMoE(num_experts=experts, num_selected=load.selected, hidden_dim=load.hidden)
        contestant = jax_contestant(
            lambda params, x, layer=layer: layer.apply({"params": params}, x)[0],
            {"router": router, "experts": arrays},
            tokens,
        )
        seconds[experts] = {}
        for which in PASSES:
            values = [timed(contestant.run, which) for _ in range(rounds)]
            seconds[experts][which] = float(np.median(values))
        values = [timed(copy, arrays) for _ in range(rounds)]
        seconds[experts]["copy"] = float(np.median(values))
    return {"workload": load._asdict(), "seconds": seconds}


def timed(run: Callable[..., Any], *args: Any) -> float:
    """Seconds of one run, after an untimed one that finds the caches as others left them."""
    run(*args)
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def has_peer() -> bool:
    """Whether the extra `bench` is installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def check_same(load: Workload, dtype: str, theirs: np.ndarray) -> None:
    """Raises ValueError unless both libraries answer alike.

    In bfloat16 their gate is too, so that a few tokens go to other experts.
    """
    arrays = {name: jnp.asarray(array) for name, array in make_arrays(load).items()}
    tokens, router = arrays.pop("tokens"), {"gate": {"kernel": arrays.pop("router")}}
    layer = SparseMoE(
        num_experts=load.experts,
        num_selected=load.selected,
        hidden_dim=load.hidden,
        dtype=DTYPES[dtype],
    )
    params = {"router": router, "experts": arrays}
    ours = layer.apply({"params": params}, tokens.astype(DTYPES[dtype]))[0].astype(jnp.float32)
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    limit = 1e-3 if dtype == "float32" else 0.3
    if not error < limit:
        raise ValueError(f"outputs differ by {error}, more than {limit}: not the same layer")


def summarize(result: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By contestant and pass: GFLOP/s, our speed over theirs in quartiles, temporary MB."""
    load = Workload(**result["workload"])
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for name, passes in result["seconds"].items():
        for which, values in passes.items():
            ours = np.array(result["seconds"][OURS][which][: len(values)])
            quartiles = np.quantile(np.array(values) / ours, (0.25, 0.5, 0.75))
            entry = {
                "gigaflop_per_second": load.gigaflop(which) / float(np.median(values)),
                "milliseconds": 1e3 * float(np.median(values)),
                "quartiles": quartiles.tolist(),
            }
            temporary = result["temporary"].get(name, {}).get(which)
            if temporary is not None:
                entry["temporary_megabytes"] = temporary / 1e6
            summary.setdefault(name, {})[which] = entry
    return summary


def print_table(result: dict[str, Any]) -> None:
    """Prints one workload and type as a Markdown table."""
    load, summary = Workload(**result["workload"]), summarize(result)
    sizes = ", ".join(f"{value} {name}" for name, value in load._asdict().items())
    rounds = len(result["seconds"][OURS]["forward"])
    print(f"\n{result['dtype']}: {sizes}; medians of {rounds} rounds\n")
    print("| | " + " | ".join(f"{which} GFLOP/s | moe_jax is faster x" for which in PASSES), end="")
    print(" | temporary MB |\n| --- |" + " --- |" * 5)
    for name, passes in summary.items():
        if name == "moves":
            continue
        cells = [name]
        for which in PASSES:
            if which not in passes:
                cells += ["", ""]
                continue
            low, middle, high = passes[which]["quartiles"]
            cells.append(f"{passes[which]['gigaflop_per_second']:.0f}")
            cells.append("" if name == OURS else f"{middle:.2f} ({low:.2f} to {high:.2f})")
        cells.append(
            ", ".join(
                f"{entry['temporary_megabytes']:.0f}"
                for entry in passes.values()
                if "temporary_megabytes" in entry
            )
        )
        print("| " + " | ".join(cells) + " |")
    shares = (f"{summary['moves'][which]['quartiles'][1]:.1%} of {which}" for which in PASSES)
    print(f"\nrouting, sorting, dispatch and combination alone: {', '.join(shares)}")


def print_sweep(result: dict[str, Any]) -> None:
    """Prints the cost by number of experts over that of the fewest."""
    load = Workload(**result["workload"])
    least = result["seconds"][min(result["seconds"])]
    print(f"\nfloat32, {load.tokens} tokens, hidden {load.hidden}, top {load.selected}:", end=" ")
    print("cost by number of experts, equal FLOPs\n")
    print(
        "| experts | rows an expert | weights MB | copying them ms | forward ms | x | both ms | x |"
    )
    print("| --- |" + " --- |" * 7)
    for experts, passes in result["seconds"].items():
        cells = [f"{experts}", f"{load.tokens * load.selected / experts:.0f}"]
        cells.append(f"{12e-6 * experts * load.model * load.hidden:.0f}")
        cells.append(f"{1e3 * passes['copy']:.0f}")
        for which in PASSES:
            cells += [f"{1e3 * passes[which]:.0f}", f"{passes[which] / least[which]:.2f}"]
        print("| " + " | ".join(cells) + " |")


def main(argv: Sequence[str]) -> None:
    """Runs the benchmark."""
    del argv
    keep_freed_memory()
    quick = _QUICK.value
    rounds = 3 if quick else _ROUNDS.value
    if not has_peer():
        print("without Hugging Face: torch and transformers are not installed (extra `bench`)")
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "layers": [],
        "sweeps": [],
    }
    for load in QUICK_WORKLOADS if quick else WORKLOADS:
        for dtype in DTYPES:
            result = measure(load, dtype, rounds)
            print_table(result)
            results["layers"].append({**result, "summary": summarize(result)})
    for load in QUICK_SWEEPS if quick else SWEEPS:
        result = sweep(load, 3 if quick else 5, SWEEP_EXPERTS[:3] if quick else SWEEP_EXPERTS)
        print_sweep(result)
        results["sweeps"].append(result)
    output = Path(_OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")


_QUICK = flags.DEFINE_bool("quick", False, "Small layers and few rounds: a check, no measurement.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Number of rounds.", lower_bound=1)
# The tests import several benchmarks, each with an output, into one process.
_OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/moe_layer.json", "File to write.", allow_override=True
)

if __name__ == "__main__":
    app.run(main)
