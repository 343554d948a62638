"""Gantt pictures of simulated schedules."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

from moe_jax.sharding.simulator import Timeline

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.patches import Patch  # noqa: E402

COLORS = {
    "attention": "#4477aa",
    "experts": "#66ccee",
    "dispatch": "#ee6677",
    "combine": "#ccbb44",
    "reduction": "#bbbbbb",
    "weights": "#aa3377",
}
MAX_LABELLED = 60


def plot_schedules(
    timelines: Mapping[str, Timeline], path: Path, *, unit: tuple[str, float] = ("ms", 1e-3)
) -> None:
    """One panel a schedule, one row a resource, all on one axis of time.

    Tasks of schedules with few tasks are labelled with the layer and part in their names.

    Args:
        timelines: by title.
        path: where the picture goes.
        unit: name and seconds of the axis's unit.

    Raises:
        ValueError: if there is nothing to draw, or a task's kind has no colour.
    """
    if not timelines:
        raise ValueError("timelines is empty")
    rows = [list(dict.fromkeys(task.resource for task in t.tasks)) for t in timelines.values()]
    figure, panels = plt.subplots(
        len(timelines),
        figsize=(11.0, sum(0.42 * len(names) + 0.55 for names in rows)),
        height_ratios=[len(names) for names in rows],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    longest = max(timeline.seconds for timeline in timelines.values()) / unit[1]
    kinds = set()
    for axes, names, (title, timeline) in zip(panels[:, 0], rows, timelines.items(), strict=True):
        _draw(axes, names, timeline, unit[1], longest)
        kinds |= {task.kind for task in timeline.tasks}
        axes.set_title(f"{title}: {timeline.seconds / unit[1]:.1f} {unit[0]}", fontsize=10)
    panels[-1, 0].set_xlabel(unit[0])
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in kinds],
        loc="outside lower center",
        ncols=len(kinds),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(
    axes: plt.Axes, names: list[str], timeline: Timeline, unit: float, longest: float
) -> None:
    is_labelled = len(timeline.tasks) <= MAX_LABELLED
    for task in timeline.tasks:
        if task.kind not in COLORS:
            raise ValueError(f"task {task.name!r} is of kind={task.kind!r}, not in {list(COLORS)}")
        row, start = names.index(task.resource), timeline.start[task.name] / unit
        width = task.seconds / unit
        axes.barh(row, width, left=start, height=0.8, color=COLORS[task.kind], edgecolor="white")
        # In a narrower one the name would run over its neighbours.
        if is_labelled and width > 0.0055 * len(task.name) * longest:
            axes.text(start + width / 2, row, task.name, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
