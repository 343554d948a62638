"""Figures of the gallery that are cheap to draw; what theory/README.md shows runs as printed."""

import json
import re
from pathlib import Path

import jax
import pytest

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


README = Path(__file__).parents[2] / "theory" / "README.md"


def test_the_readme_s_python_runs_and_its_links_exist(capsys):
    text = README.read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    # A reader has JAX's own rules of promotion.
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(block, "theory/README.md", "exec"), {"__name__": "readme"})
    coarse, fine, by_hand = capsys.readouterr().out.splitlines()[:3]
    errors = [float(line.split()[1]) for line in (coarse, fine)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
    assert float(by_hand.split()[0]) == pytest.approx(errors[1])
    drawn = set(re.findall(r"\]\((gallery/[^)]+)\)", text))
    # Every figure of the gallery is shown, and no other.
    assert drawn == {f"gallery/{path.name}" for path in (README.parent / "gallery").glob("*.png")}
