"""Which of many combinations are run: so few that every pair of values which some combination has is still run once."""

from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)
Pair = frozenset[tuple[str, Hashable]]


def pairs(values: Mapping[str, Collection[Hashable]]) -> set[Pair]:
    """Return the pairs of what a combination has of two factors, of each of which it may have several values."""
    return {
        frozenset([(one, a), (other, b)])
        for one, other in combinations(values, 2)
        for a in values[one]
        for b in values[other]
    }


def covering(pairs_of: Mapping[Row, Collection[Pair]], kept: Iterable[Row] = ()) -> list[Row]:
    """Return combinations, in their order, with all of the pairs that the given ones have.

    Args:
        pairs_of: The pairs of each combination.
        kept: Combinations that are taken in any case.
    """
    chosen = list(dict.fromkeys(kept))
    missing = set().union(*pairs_of.values()) - set().union(*(pairs_of[row] for row in chosen))
    while missing:
        best = max(pairs_of, key=lambda row: len(missing.intersection(pairs_of[row])))  # the first of the best
        chosen.append(best)
        missing.difference_update(pairs_of[best])
    for row in chosen[::-1]:  # an early choice may have nothing left that later ones lack
        others = [pairs_of[other] for other in chosen if other != row]
        if row not in kept and set(pairs_of[row]) <= set().union(*others):
            chosen.remove(row)
    return [row for row in pairs_of if row in set(chosen)]
