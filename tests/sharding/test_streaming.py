"""Streaming of tokens and experts: hand-computed times, bounds, and the order of the ablation."""

import dataclasses
import itertools

import numpy as np
import pytest

from moe_jax.sharding.placement import expert_use, place_in_tree
from moe_jax.sharding.streaming import Package, StreamedModel, Streaming, simulate_streaming

TINY = Package(2, 1, 1.0, 1.0, 1.0, 1.0, 2.0)
MODEL = StreamedModel(2, 4, 0.5, 1.0, 3.0, 1.0, 1.0)
# Two experts, each on a chiplet of its own: two tokens go to both and two to expert 0 only.
USE = np.array([[True, True], [True, True], [True, False], [True, False]])
ORDER = np.arange(2)


def seconds(streaming, package=TINY, model=MODEL, use=USE, order=ORDER):
    return simulate_streaming(package, model, streaming, use, order).seconds


def test_one_thing_after_the_other_by_hand():
    # Attention's weights 3, attention 4 x 0.5; then weights 1 beside the trunk's 4 tokens, 4; the
    # busier chiplet's 4 rows, 4; back over the trunk, 4. Two layers.
    assert seconds(Streaming()) == 2 * (3 + 2 + 4 + 4 + 4)


def test_streams_by_hand():
    # Weights of the second layer's attention come while the first one's experts work.
    assert seconds(Streaming(streams_weights=True)) == 3 + 2 * (2 + 4 + 4 + 4)
    timeline = simulate_streaming(TINY, MODEL, Streaming(2, True), USE, ORDER)
    # Two tokens a part: attention 3-4, 4-5; trunk 4-6, 6-8; experts 6-8, 8-10; back 8-10, 10-12.
    assert timeline.end["C0.1.g0"] == 12.0
    assert timeline.start["A1.0"] == 10.0 and timeline.start["W1.0"] == 10.0


def test_copies_that_are_merged_cross_a_link_once():
    package = Package(1, 2, 1.0, 1.0, 1.0, 1.0, 1.0)
    apart = simulate_streaming(package, MODEL, Streaming(), USE, ORDER)
    merged = simulate_streaming(package, MODEL, Streaming(merges_copies=True), USE, ORDER)
    for timeline, tokens in ((apart, 6.0), (merged, 4.0)):
        trunk = [task.seconds for task in timeline.tasks if task.resource == "down 0"]
        assert trunk == [tokens, tokens]
        leaves = {t.resource: t.seconds for t in timeline.tasks if t.resource.startswith("leaf ")}
        assert leaves["leaf 0"] == 4.0 and leaves["leaf 1"] == 2.0


def clustered(seed, tokens=1500, experts=32, k=4, topics=8):
    rng = np.random.default_rng(seed)
    topic_of = rng.permutation(np.arange(experts) % topics)
    topic = rng.integers(topics, size=tokens)
    score = 2.5 * (topic_of[None, :] == topic[:, None]) + rng.gumbel(size=(tokens, experts))
    return expert_use(np.argsort(-score, axis=1)[:, :k], experts)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_each_part_helps_and_the_order_of_the_ablation_is_mozarts(scale):
    use = clustered(0)
    package = Package()
    model = StreamedModel(3, 8192, 40e6, 12e6, 30e6, 12e6, 4096.0 * scale)
    placed = place_in_tree(use, (4, 4))
    contiguous = np.arange(use.shape[1])
    baseline = seconds(Streaming(), package, model, use, contiguous)
    overlap = seconds(Streaming(4, True), package, model, use, contiguous)
    merged = seconds(Streaming(4, True, True), package, model, use, contiguous)
    full = seconds(Streaming(4, True, True), package, model, use, placed)
    assert baseline > overlap > merged > full
    for one in (Streaming(4), Streaming(1, True), Streaming(1, False, True)):
        assert seconds(one, package, model, use, contiguous) < baseline


def test_no_schedule_is_faster_than_its_busiest_resource():
    use = clustered(1)
    package = Package()
    model = StreamedModel(2, 4096, 40e6, 12e6, 30e6, 12e6, 4096.0)
    for parts, weights, merges in itertools.product((1, 4), (False, True), (False, True)):
        timeline = simulate_streaming(
            package, model, Streaming(parts, weights, merges), use, np.arange(32)
        )
        resources = {task.resource for task in timeline.tasks}
        assert max(timeline.busy(name) for name in resources) <= timeline.seconds
        # Every expert's weights are read once a layer, whatever the schedule.
        read = sum(timeline.busy(f"memory {group}") for group in range(4))
        assert read == pytest.approx(2 * 32 * 12e6 / package.memory_bandwidth)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Streaming(micro_batches=0), "micro_batches=0"),
        (lambda: Package(groups=0), "groups=0"),
        (lambda: dataclasses.replace(MODEL, token_bytes=0.0), "token_bytes=0.0"),
        (lambda: seconds(Streaming(), Package(3, 1)), "does not divide"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
