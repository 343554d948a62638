"""Real loads through the capacity: OLMoE-1B-7B on c4; the source is in the data file."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import Routing, expert_capacity, limit_capacity, routing_metrics

RECORD = json.loads((Path(__file__).parent / "data" / "olmoe_c4_counts.json").read_text())
TOKENS, SELECTED = RECORD["num_tokens"], RECORD["num_selected"]
LOADS = {int(layer): np.array(counts) for layer, counts in RECORD["counts"].items()}
EXPERTS = 64
# layer, capacity factor: share of the assignments that is dropped.
DROPPED = {
    (0, 1.0): 0.091,
    (0, 1.25): 0.040,
    (0, 2.0): 0.016,
    (15, 1.0): 0.212,
    (15, 1.25): 0.113,
    (15, 2.0): 0.012,
}


def replay(load):
    """A routing of all the tokens with exactly these assignments to each expert."""
    # An expert has at most one assignment a token, so its run, wrapped at T, hits no token twice.
    expert_index = np.repeat(np.arange(EXPERTS, dtype=np.int32), load).reshape(SELECTED, TOKENS).T
    return Routing(
        expert_index=jnp.asarray(expert_index),
        combine_weight=jnp.full((TOKENS, SELECTED), 1.0 / SELECTED),
        gate_logits=jnp.zeros((TOKENS, EXPERTS)),
        keep=jnp.ones((TOKENS, SELECTED), bool),
        mask=jnp.ones(TOKENS, bool),
        load_balance_loss=jnp.zeros(()),
        router_z_loss=jnp.zeros(()),
    )


@functools.partial(jax.jit, static_argnums=1, static_argnames="priority")
def dropped_and_load(routing, capacity, priority="position"):
    limited = limit_capacity(routing, capacity, priority=priority)
    metrics = routing_metrics(limited)
    return metrics.dropped, metrics.load, metrics.balance


@pytest.mark.parametrize(("layer", "factor"), DROPPED)
def test_share_dropped_is_that_of_the_real_loads(layer, factor):
    capacity = expert_capacity(TOKENS, SELECTED, EXPERTS, factor)
    assert capacity == factor * TOKENS * SELECTED / EXPERTS
    dropped, load, _ = dropped_and_load(replay(LOADS[layer]), capacity)
    exact = np.maximum(LOADS[layer] - capacity, 0).sum() / LOADS[layer].sum()
    assert dropped == pytest.approx(exact, abs=1e-6)
    assert float(dropped) == pytest.approx(DROPPED[layer, factor], abs=5e-4)
    kept = np.minimum(LOADS[layer], capacity)
    np.testing.assert_allclose(load, kept / kept.sum(), rtol=1e-5)


def test_share_dropped_does_not_depend_on_who_is_kept():
    capacity = expert_capacity(TOKENS, SELECTED, EXPERTS, 1.25)
    dropped, _, _ = dropped_and_load(replay(LOADS[15]), capacity, priority="score")
    assert float(dropped) == pytest.approx(DROPPED[15, 1.25], abs=5e-4)


def test_busiest_expert_over_the_mean_is_what_the_counts_say():
    for load in LOADS.values():
        _, _, balance = dropped_and_load(replay(load), TOKENS)
        assert balance == pytest.approx(EXPERTS * load.max() / load.sum(), rel=1e-5)
        assert len(load) == EXPERTS and load.sum() == TOKENS * SELECTED
