"""Seconds and memory of one update: against its Gram matrix, the batch and the experts.

Seconds are the processor's, over all threads, which other programs on the machine hardly disturb.
"""

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.product_of_t import Experts, full_experts
from moe_jax.product_of_t.experts import expert_scores
from moe_jax.product_of_t.settings import SAFEGUARDED
from moe_jax.product_of_t.targets import LogDensity
from moe_jax.product_of_t.update import State, Whitening, update

BATCH_SIZES, EXPERT_COUNTS = (64, 128, 256, 512, 1024), (50, 100, 200, 400)
ROUNDS = 7


def run_cost() -> dict[str, Any]:
    """Medians of seconds; the memory of the largest update is the process's peak."""
    with jax.enable_x64(True):
        before = peak_bytes()
        run, _ = make_update(256, 500, 50)
        run()
        memory = peak_bytes() - before
        seconds = {f"256 {count}": _seconds(256, count, 10) for count in EXPERT_COUNTS}
        seconds |= {f"{batch} 200": _seconds(batch, 200, 10) for batch in BATCH_SIZES}
    return {
        "peak_bytes_of_50_dims_500_experts": memory,
        "processor_seconds_of_batch_and_experts": seconds,
    }


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_update(
    batch: int, count: int, dim: int
) -> tuple[Callable[[], object], tuple[Callable[[], object], Callable[[], object]]]:
    """An update of a standard normal target, and its Gram matrix without and with its entries."""
    experts = _experts(count, dim)
    rng = np.random.default_rng(1)
    points = jnp.asarray(rng.normal(size=(batch, dim)))
    state = State(jnp.full(count, (dim + 5.0) / (2 * count)), points)
    whitening = Whitening(jnp.zeros(dim), jnp.eye(dim))
    target = LogDensity(_log_normal)
    key = jax.random.key(0)

    def run() -> object:
        return update(key, target, SAFEGUARDED, experts, whitening, state, 0)

    scores = expert_scores(experts, points)[0]
    rows = jnp.reshape(scores, (count, batch * dim))
    return run, (lambda: _gram(rows), lambda: _scores_and_gram(experts, points))


def _log_normal(z: jax.Array) -> jax.Array:
    return -0.5 * (z @ z)


@jax.jit
def _gram(rows: jax.Array) -> jax.Array:
    return rows @ rows.T


@jax.jit
def _scores_and_gram(experts: Experts, points: jax.Array) -> jax.Array:
    scores = expert_scores(experts, points)[0]
    rows = jnp.reshape(scores, (scores.shape[0], -1))
    return rows @ rows.T


def _experts(count: int, dim: int) -> Experts:
    rng = np.random.default_rng(0)
    precision = np.tile(np.eye(dim) / (dim + 5.0), (count, 1, 1))
    return full_experts(jnp.asarray(rng.normal(size=(count, dim))), jnp.asarray(precision))


def _seconds(batch: int, count: int, dim: int) -> dict[str, float]:
    run, (gram, scores_and_gram) = make_update(batch, count, dim)
    return {
        "update": _median(run),
        "gram": _median(gram),
        "scores_and_gram": _median(scores_and_gram),
    }


def _median(run: Callable[[], object]) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - began)
    return statistics.median(times)
