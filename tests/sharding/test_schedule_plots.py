"""The picture shows every task of every schedule once, at its time."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from moe_jax.sharding import (
    SCHEDULES,
    Cost,
    StepWork,
    Task,
    schedule_plots,
    simulate,
    simulate_step,
)

WORK = StepWork(
    2,
    1e-3,
    2e-3,
    {name: Cost(0.0, 1e-3) for name in ("linear", "adaptive", "two_level")},
    Cost(0.0, 1e-3),
    2.0**23,
)


def test_every_task_is_a_bar_at_its_time(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    timelines = {name: simulate_step(WORK, schedule) for name, schedule in SCHEDULES.items()}
    schedule_plots.plot_schedules(timelines, tmp_path / "schedules.png")
    monkeypatch.undo()
    (figure,) = figures
    assert (tmp_path / "schedules.png").stat().st_size > 10_000
    for axes, (title, timeline) in zip(figure.axes, timelines.items(), strict=True):
        assert axes.get_title().startswith(title)
        bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
        wanted = sorted((1e3 * timeline.start[t.name], 1e3 * t.seconds) for t in timeline.tasks)
        np.testing.assert_allclose(bars, wanted, rtol=1e-9)
        assert {text.get_text() for text in axes.get_yticklabels()} == {"compute", "network"}
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {"experts", "reduction"}
    plt.close(figure)


def test_nothing_to_draw_and_unknown_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="timelines is empty"):
        schedule_plots.plot_schedules({}, tmp_path / "none.png")
    with pytest.raises(ValueError, match="kind='other'"):
        schedule_plots.plot_schedules(
            {"one": simulate([Task("a", "compute", 1.0, kind="other")])}, tmp_path / "none.png"
        )
    plt.close("all")
