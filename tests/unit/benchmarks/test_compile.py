"""The pure half of the benchmark of compiles; what it measures is nowhere asserted."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "compile", raising=False)
    yield
    for name in ("compile", "_compile_cases", "_machine", "_report", "_cases"):
        sys.modules.pop(name, None)


def run(graphs, secs):
    return {"graphs": graphs, "secs": secs}


def make_runs(own, other):
    return {"xla-spmd, 4 layers": [own], "torch_xla, 4 layers": [other]}


BY_HAND = run([2, 1, 0, 0], [3.0, 3.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("own", "verdicts"),
    [
        (run([1, 0, 0, 0], [3.0, 0.1, 0.1, 0.1]), ["HELD", "HELD"]),
        (run([1, 0, 1, 0], [3.0, 0.1, 3.0, 0.1]), ["MISSED", "HELD"]),
        (run([1, 1, 0, 0], [3.0, 3.0, 0.1, 0.1]), ["MISSED", "MISSED"]),
    ],
)
def test_programs_are_counted_in_all_steps_and_time_in_two(own, verdicts):
    from compile import judgements

    assert [line.rpartition(" ")[2] for line in judgements(make_runs(own, BY_HAND))] == verdicts


def test_what_did_not_run_is_not_judged():
    from compile import judgements

    assert list(judgements({"torch_xla, 4 layers": [BY_HAND]})) == []


def test_the_table_has_the_programs_of_each_step():
    from compile import make_report

    report = make_report(make_runs(run([1, 0, 0, 0], [3.0, 0.1, 0.1, 0.2]), BY_HAND), rounds=1)
    rows = {
        cells[1]: cells[2:-1]
        for cells in ([c.strip() for c in line.split("|")] for line in report.splitlines())
        if len(cells) > 2
    }
    assert rows["xla-spmd, 4 layers"] == ["1", "0", "0", "0", "3.00", "0.10", "0.20"]
    assert rows["torch_xla, 4 layers"] == ["2", "1", "0", "0", "3.00", "3.00", "0.10"]
