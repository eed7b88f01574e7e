"""Run the cases of a program: functions without arguments, each by itself, in one process."""

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def cases_from(first: Callable[[], None]) -> list[Callable[[], None]]:
    """Return a program's functions and classes from this one on, as they stand in its file."""
    own = [each for each in first.__globals__.values() if getattr(each, "__module__", "") == first.__module__]
    return [each for each in own[own.index(first) :] if callable(each)]


def run_cases(cases: Sequence[Callable[[], None]], folder: Path) -> None:
    """Run all cases, and write into found.json why each failed, or null."""
    found = {}
    for case in cases:
        try:
            case()
            found[case.__name__] = None
        except (Exception, pytest.fail.Exception):
            found[case.__name__] = traceback.format_exc()
    (folder / "found.json").write_text(json.dumps(found))
