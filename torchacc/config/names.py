"""Names of options, before anything is known of what they name."""

from typing import Any

from torchacc.errors import shown

_MAX_LENGTH = 500


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
