"""The programs of the benchmarks import each other as they do when they are run: from their own folder."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def results_of(importable):
    """Make the results of cases from the seconds of their steps, by case and round."""
    from _report import Block, Result

    def make(secs, **values):
        return {
            name: Result(
                losses=[1.0],
                first_steps=[1.0],
                blocks={at: Block(each, each, 0.0, 1.0, None) for at, each in enumerate(of_case)},
                **values,
            )
            for name, of_case in secs.items()
        }

    return make
