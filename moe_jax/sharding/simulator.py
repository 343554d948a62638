"""Discrete-event simulation of tasks that wait for each other and for a resource."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """A piece of work that occupies one resource without interruption.

    Attributes:
        name: unique.
        resource: what it occupies, such as `compute` or `network`; each runs one task at a time.
        seconds: how long.
        after: names of the tasks that must have ended.
        gives_way: False: the resource runs such tasks in the order in which they are listed, and
            waits for the next. True: it runs whenever that next task is not ready.
        kind: what it is, for figures.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()
    gives_way: bool = False
    kind: str = ""


class Timeline(NamedTuple):
    """When every task ran.

    Attributes:
        tasks: in the order given.
        start, end: seconds by name.
        seconds: end of the last task.
    """

    tasks: tuple[Task, ...]
    start: dict[str, float]
    end: dict[str, float]
    seconds: float

    def busy(self, resource: str) -> float:
        """Seconds during which a resource worked."""
        return sum(task.seconds for task in self.tasks if task.resource == resource)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Runs tasks without interruption; whoever chooses sees all that is ready at that instant.

    The order of tasks that do not give way is fixed, so that lengthening one can make none of them
    end earlier; where a resource takes any task that is ready, it can (Graham 1969).

    Raises:
        ValueError: if a duration is negative, a name occurs twice or is unknown, or some tasks can
            never start because their order contradicts their dependencies.
    """
    place = {task.name: index for index, task in enumerate(tasks)}
    _check(tasks, place)
    waits = [len(set(task.after)) for task in tasks]
    dependents: list[list[int]] = [[] for _ in tasks]
    in_order: dict[str, list[int]] = {}
    ready_to_give_way: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        for name in set(task.after):
            dependents[place[name]].append(index)
        queue = in_order.setdefault(task.resource, [])
        ready_to_give_way.setdefault(task.resource, [])
        if not task.gives_way:
            queue.append(index)
        elif not waits[index]:
            ready_to_give_way[task.resource].append(index)
    for queue in in_order.values():
        queue.reverse()
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    ends: list[tuple[float, int]] = []
    idle = set(in_order)
    now = 0.0
    while True:
        for resource in sorted(idle):
            queue, others = in_order[resource], ready_to_give_way[resource]
            if queue and not waits[queue[-1]]:
                chosen = queue.pop()
            elif others:
                chosen = heapq.heappop(others)
            else:
                continue
            idle.remove(resource)
            start[tasks[chosen].name] = now
            heapq.heappush(ends, (now + tasks[chosen].seconds, chosen))
        if not ends:
            break
        now = ends[0][0]
        while ends and ends[0][0] == now:
            _, finished = heapq.heappop(ends)
            end[tasks[finished].name] = now
            idle.add(tasks[finished].resource)
            for index in dependents[finished]:
                waits[index] -= 1
                if not waits[index] and tasks[index].gives_way:
                    heapq.heappush(ready_to_give_way[tasks[index].resource], index)
    if len(end) < len(tasks):
        stuck = [task.name for task in tasks if task.name not in end]
        raise ValueError(f"tasks {stuck[:4]} can never start: their order contradicts `after`")
    return Timeline(tuple(tasks), start, end, now)


def _check(tasks: Sequence[Task], place: dict[str, int]) -> None:
    if len(place) < len(tasks):
        names = [task.name for task in tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"task names {twice[:4]} occur more than once")
    for task in tasks:
        if not 0 <= task.seconds < float("inf"):
            raise ValueError(f"task {task.name!r} takes seconds={task.seconds}: not in [0, inf)")
        unknown = [name for name in task.after if name not in place]
        if unknown:
            raise ValueError(f"task {task.name!r} comes after unknown tasks {unknown[:4]}")
