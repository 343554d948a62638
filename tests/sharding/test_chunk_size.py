"""The search for the chunk size against the exhaustive best."""

import dataclasses
import functools

import numpy as np
import pytest

from moe_jax.sharding import Cost, Schedule, StepWork, simulate_step
from moe_jax.sharding.chunk_size import search_chunk_bytes

LOW, HIGH = 128 * 2.0**10, 16 * 2.0**20
FLOW = Schedule(parts=2, splits_attention=True, chunk_bytes=1.0)


@functools.cache
def exhaustive(startup, reduction):
    sizes = np.geomspace(LOW, HIGH, 60)
    return min(step_seconds(size, startup, reduction) for size in sizes)


def step_seconds(chunk_bytes, startup, reduction):
    work = StepWork(3, 1.0, 1.0, {"linear": Cost(0.0, 2.0)}, Cost(startup, reduction), 24 * 2.0**20)
    return simulate_step(work, dataclasses.replace(FLOW, chunk_bytes=chunk_bytes)).seconds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("startup", "reduction"), [(0.0, 4.0), (0.02, 4.0), (0.3, 3.0)])
def test_search_is_within_five_percent_of_the_exhaustive_best(startup, reduction, seed):
    found = search_chunk_bytes(
        functools.partial(step_seconds, startup=startup, reduction=reduction), seed=seed
    )
    assert found.seconds <= 1.05 * exhaustive(startup, reduction)
    assert found.tried.shape == (8, 2)
    assert found.seconds == found.tried[:, 1].min()
    assert LOW <= found.tried[:, 0].min() and found.tried[:, 0].max() <= HIGH


def test_search_beats_as_many_random_sizes_on_a_sharp_valley():
    def seconds(chunk_bytes):
        return 1.0 + min(abs(np.log2(chunk_bytes / 2.0**21)), 3.0)

    found = [search_chunk_bytes(seconds, seed=seed).seconds for seed in range(20)]
    rng = np.random.default_rng(0)
    drawn = [min(seconds(LOW * (HIGH / LOW) ** u) for u in rng.uniform(size=8)) for _ in range(20)]
    assert np.mean(found) - 1 < 0.5 * (np.mean(drawn) - 1)


def test_search_bears_noise_and_a_constant():
    rng = np.random.default_rng(3)
    found = search_chunk_bytes(lambda size: step_seconds(size, 0.3, 3.0) * rng.normal(1, 0.01))
    # Noise of 1% on eight measurements; 3% of margin is three deviations.
    assert step_seconds(found.chunk_bytes, 0.3, 3.0) <= 1.08 * exhaustive(0.3, 3.0)
    assert search_chunk_bytes(lambda size: 1.0).seconds == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 2.0, "high": 1.0}, "low=2.0"),
        ({"num_starts": 9}, "num_starts=9"),
        ({"num_starts": 0}, "num_starts=0"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        search_chunk_bytes(lambda size: 1.0, **options)
