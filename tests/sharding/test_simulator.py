"""The engine on hand-computed cases, and against a slow reference that advances in small ticks."""

import random

import pytest

from moe_jax.sharding import Task, simulate


def test_hand_computed_case():
    timeline = simulate(
        [
            Task("a", "compute", 2.0),
            Task("send", "network", 3.0, ("a",)),
            Task("b", "compute", 1.0),
            Task("c", "compute", 1.0, ("send",)),
            Task("chunk 0", "network", 1.5, gives_way=True),
            Task("chunk 1", "network", 1.5, gives_way=True),
        ]
    )
    # The second chunk starts at 1.5, before `send` is ready at 2, and is not interrupted.
    assert timeline.start == {
        "a": 0.0,
        "chunk 0": 0.0,
        "chunk 1": 1.5,
        "b": 2.0,
        "send": 3.0,
        "c": 6.0,
    }
    assert timeline.end["b"] == 3.0 and timeline.seconds == 7.0
    assert timeline.busy("network") == 6.0 and timeline.busy("compute") == 4.0


def test_a_task_that_is_ready_at_the_same_instant_goes_before_one_that_gives_way():
    timeline = simulate(
        [
            Task("a", "compute", 1.0),
            Task("first", "network", 1.0, gives_way=True),
            Task("second", "network", 1.0, gives_way=True),
            Task("send", "network", 1.0, ("a",)),
        ]
    )
    assert timeline.start["send"] == 1.0 and timeline.start["second"] == 2.0


def test_the_order_given_is_kept_even_where_a_later_task_is_ready():
    timeline = simulate(
        [
            Task("slow", "a", 5.0),
            Task("first", "b", 1.0, ("slow",)),
            Task("second", "b", 1.0),
        ]
    )
    assert timeline.start["second"] == 6.0


def in_ticks(tasks):
    """The same rules for whole-numbered durations, one time unit after the other."""
    remaining = {task.name: int(task.seconds) for task in tasks}
    done, start, running, now = set(), {}, {}, 0
    queues = {task.resource: [] for task in tasks}
    for task in tasks:
        queues[task.resource].append(task)
    while len(done) < len(tasks):
        for resource, queue in queues.items():
            if resource in running:
                continue
            ready = [task for task in queue if set(task.after) <= done]
            ordered = [task for task in queue if not task.gives_way]
            choice = ordered[:1] if ordered and ordered[0] in ready else []
            choice = choice or [task for task in ready if task.gives_way][:1]
            if choice:
                running[resource] = choice[0]
                start[choice[0].name] = now
                queue.remove(choice[0])
        now += 1
        for resource, task in list(running.items()):
            remaining[task.name] -= 1
            if not remaining[task.name]:
                done.add(task.name)
                del running[resource]
        assert now < 10_000
    return start


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_agree_with_the_slow_reference(seed):
    rng = random.Random(seed)
    tasks = []
    for index in range(25):
        after = rng.sample([task.name for task in tasks], k=min(len(tasks), rng.randint(0, 2)))
        resource, seconds = rng.choice("abc"), float(rng.randint(1, 6))
        gives_way = rng.random() < 0.3
        tasks.append(Task(f"t{index}", resource, seconds, tuple(after), gives_way))
    assert simulate(tasks).start == in_ticks(tasks)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", "x", -1.0)], "seconds=-1.0"),
        ([Task("a", "x", float("nan"))], "seconds=nan"),
        ([Task("a", "x", 1.0), Task("a", "y", 1.0)], "more than once"),
        ([Task("a", "x", 1.0, ("b",))], "unknown tasks"),
        ([Task("a", "x", 1.0, ("b",)), Task("b", "x", 1.0)], "can never start"),
    ],
)
def test_bad_tasks_are_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        simulate(tasks)
