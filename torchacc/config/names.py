"""Names that somebody has written: what can be none, and which known one is the nearest."""

import difflib
from collections.abc import Iterable
from typing import Any

from torchacc.errors import shown

_MAX_LENGTH = 500
_MAX_COMPARED = 100
"""Characters of a name; a longer one is near to none, and is long compared."""
_MIN_SHORT = 4
"""Characters of what can be the short form of a name."""


def oddness(name: Any) -> str:
    """Return why a value can be no option's name; empty where it can."""
    if not isinstance(name, str):
        return f"the name of an option is a string, not {shown(name)}; put it in quotes"
    if len(name) > _MAX_LENGTH:
        return f"the name of an option has {_MAX_LENGTH} characters at most, not {len(name):,}"
    return "" if name.isprintable() else f"the name of an option can be printed, and {shown(name)} cannot"


def shown_name(name: Any) -> str:
    """Return an odd name as an option's path shows it: in one short word."""
    return "".join(shown(name).strip("'\"").split())[:50] or "?"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint that ends a message about a wrong name: the nearest valid name, or else all of them."""
    valid = sorted(valid)
    return did_you_mean(name, valid) or f"valid names: {', '.join(valid)}"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a question that names the nearest valid name; empty where none is near."""
    if len(name) > _MAX_COMPARED:
        return ""
    by_lower = {candidate.lower(): candidate for candidate in valid}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    # A word and its short form, such as `distributed` and `dist`.
    near = near or [each for each in by_lower if len(each) >= _MIN_SHORT and name.lower().startswith(each)]
    return f"did you mean {by_lower[near[0]]!r}?" if near else ""
