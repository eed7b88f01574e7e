"""Draws programs for `script_worker.py`: plain data, the same for every rank."""

from collections.abc import Collection, Sequence
from typing import Any

from hypothesis import strategies
from script_rules import RULES


def programs(layouts: Sequence[str], without: Collection[str] = (), length: int = 25) -> Any:
    """Return a strategy of programs, in which each rule comes as often as it says."""
    names = [name for name, rule in RULES.items() if name not in without for _ in range(rule.often)]
    small = strategies.integers(0, 11)
    calls = strategies.tuples(strategies.sampled_from(names), small, small)
    # Of any length as often, where a plain list is mostly short.
    rules = strategies.integers(1, length).flatmap(lambda n: strategies.lists(calls, min_size=n, max_size=n))
    return strategies.fixed_dictionaries(
        {
            "layout": strategies.sampled_from(list(layouts)),
            "looks": strategies.booleans(),
            "syncs": strategies.booleans(),
            "rules": rules,
        }
    )
