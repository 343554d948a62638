"""The first example of the documentation runs as printed."""

import re
from pathlib import Path

from moe_jax.sharding import SCHEDULES


def test_example_prints_the_seconds_of_every_schedule(capsys):
    text = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == list(SCHEDULES)
    seconds = {name: float(number) for name, number in lines}
    assert seconds["vanilla"] > seconds["Tutel"] > seconds["FlowMoE"] > 0
