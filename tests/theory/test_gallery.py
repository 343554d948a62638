"""Figures of the gallery that are cheap to draw."""

import json

from theory.gallery import RESULTS, draw_floor
from theory.plots import draw_experiment
from theory.tables import write_table


def test_the_floor_is_drawn(tmp_path):
    draw_floor(tmp_path / "floor.png")
    assert (tmp_path / "floor.png").stat().st_size > 10_000


def test_every_recorded_experiment_can_be_drawn_and_tabulated(tmp_path):
    recorded = sorted(RESULTS.glob("theory_*.json"))
    assert recorded
    for path in recorded:
        results = json.loads(path.read_text())
        assert "nan" not in write_table(results, tmp_path / "table.md")
        draw_experiment(results, tmp_path / f"{path.stem}.png")
        assert (tmp_path / f"{path.stem}.png").stat().st_size > 10_000
