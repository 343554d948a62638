"""What README shows runs as printed, and what it points to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run_as_printed(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_linked_files_exist(path):
    assert (ROOT / path).exists()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_files_of_the_commands_exist():
    commands = " ".join(re.findall(r"```sh\n(.*?)```", README, re.S))
    for path in re.findall(r"\b(?:configs|benchmarks)/[\w/]+\.py", commands):
        assert (ROOT / path).exists()
