"""The documentation shows the recorded figures."""

import json

import pytest

from benchmarks import compiled_overlap, doc_tables, placement, schedules


@pytest.mark.parametrize("benchmark", [compiled_overlap, placement, schedules])
def test_tables_of_the_documentation_are_those_of_the_results(benchmark):
    text = benchmark.DOC.read_text()
    results = json.loads(benchmark.RESULTS.read_text())
    assert doc_tables.with_tables(text, benchmark.tables(results)) == text


def test_a_document_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="lacks '<!-- table: one -->"):
        doc_tables.with_tables("text", {"one": "| a |"})


@pytest.mark.parametrize("name", schedules.PAPER)
def test_a_models_vanilla_step_takes_the_papers_time(name):
    work = schedules.model_work(name, 0.4)
    seconds = schedules.simulate_step(work, schedules.SCHEDULES["vanilla"]).seconds
    assert 1e3 * seconds == pytest.approx(schedules.PAPER[name][3]["vanilla"])
