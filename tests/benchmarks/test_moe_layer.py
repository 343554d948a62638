import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.moe_layer import (
    DENSE,
    OURS,
    PASSES,
    TorchPeer,
    Workload,
    check_same,
    make_arrays,
    make_contestants,
    one_hot_layer,
    print_sweep,
    print_table,
    summarize,
    sweep,
)
from moe_jax.core import SparseMoE

LOAD = Workload(tokens=24, model=8, hidden=12, experts=4, selected=2)
BENCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def our_output(load):
    arrays = {name: jnp.asarray(array) for name, array in make_arrays(load).items()}
    tokens = arrays.pop("tokens")
    params = {"router": {"gate": {"kernel": arrays.pop("router")}}, "experts": arrays}
    layer = SparseMoE(num_experts=load.experts, num_selected=load.selected, hidden_dim=load.hidden)
    return np.asarray(layer.apply({"params": params}, tokens)[0]), params, tokens


def test_one_hot_dispatch_computes_the_same_layer_if_its_capacity_suffices():
    # One expert of four selected by all: 24 assignments of one expert against a capacity of 15.
    ours, params, tokens = our_output(LOAD)
    theirs = one_hot_layer(LOAD, jnp.float32, params, tokens)
    same = np.all(np.isclose(ours, theirs, rtol=1e-4, atol=1e-5), axis=1)
    # Dropping leaves an answer of one expert or none; most tokens keep both.
    assert np.mean(same) > 0.8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_contestant_runs_the_passes_it_names(dtype):
    contestants = make_contestants(LOAD, dtype)
    assert set(contestants[OURS].passes) == set(contestants[DENSE].passes) == set(PASSES)
    for contestant in contestants.values():
        for which in contestant.passes:
            contestant.run(which)
            assert contestant.temporary_bytes(which) >= 0


def test_speed_is_that_of_the_needed_products_and_ratios_are_pair_by_pair(capsys):
    # 6 T K D F = 27648 FLOPs forward.
    assert LOAD.gigaflop("forward") == pytest.approx(27648e-9)
    seconds = {
        OURS: {which: [1.0, 2.0, 4.0] for which in PASSES},
        "other": {"forward": [3.0, 4.0, 4.0]},
        "moves": {which: [0.1, 0.2, 0.4] for which in PASSES},
    }
    result = {
        "workload": LOAD._asdict(),
        "dtype": "float32",
        "seconds": seconds,
        "temporary": {OURS: {"forward": 5_000_000}},
    }
    summary = summarize(result)
    assert summary["other"]["forward"]["quartiles"] == pytest.approx([1.5, 2.0, 2.5])
    assert summary[OURS]["forward"]["gigaflop_per_second"] == pytest.approx(27648e-9 / 2.0)
    assert summary[OURS]["forward"]["temporary_megabytes"] == 5.0
    print_table(result)
    printed = capsys.readouterr().out
    assert "| other | 0 | 2.00 (1.50 to 2.50) |" in printed
    assert "alone: 10.0% of forward, 10.0% of forward+backward" in printed


def test_sweep_reports_every_number_of_experts(capsys):
    result = sweep(LOAD, 1, (2, 4))
    assert {key: set(value) for key, value in result["seconds"].items()} == {
        experts: {*PASSES, "copy"} for experts in (2, 4)
    }
    print_sweep(result)
    assert "| 4 | 12 |" in capsys.readouterr().out


def test_a_layer_that_answers_otherwise_is_refused():
    ours, _, _ = our_output(LOAD)
    check_same(LOAD, "float32", ours)
    with pytest.raises(ValueError, match="not the same layer"):
        check_same(LOAD, "float32", ours * 1.01)


@pytest.mark.skipif(not BENCH, reason="the extra `bench` is not installed")
def test_the_peer_answers_as_our_layer_does():
    peer = TorchPeer(LOAD, "float32")
    check_same(LOAD, "float32", peer.output)
    assert all(peer.seconds("grouped_mm", which) > 0.0 for which in PASSES)
    peer.close()
