"""The documented figures are the recorded ones."""

import json
import math

import pytest

from benchmarks.contaminated_rates import ACCEPTED, Check
from benchmarks.contaminated_tables import DOCUMENT, ROOT, acceptance, tables
from benchmarks.doc_tables import with_tables


def test_every_table_of_the_document_is_of_the_recorded_results():
    text = DOCUMENT.read_text()
    assert with_tables(text, tables()) == text
    with pytest.raises(ValueError, match="<!-- table: acceptance -->"):
        with_tables("no table", tables())


def test_results_are_json_that_any_reader_takes():
    for path in (ROOT / "benchmarks" / "results").glob("contaminated_*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_an_open_range_is_null_and_still_a_range():
    assert Check(1.7, 1.6, math.inf) == {"value": 1.7, "accept": [1.6, None], "passed": True}
    assert not Check(1.6, -math.inf, 1.5)["passed"]


def test_every_acceptance_figure_has_its_row():
    names = [line.split(" | ")[0].strip("| ") for line in acceptance().splitlines()[2:]]
    assert names == [f"T{k}" for k in range(1, 11)] and set(ACCEPTED) < set(names)
