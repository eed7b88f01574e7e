"""The errors that torchacc raises for what a user can mend. Each says what was passed, why not, and what to write."""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any


def printable(text: str, keeps: str = "") -> str:
    """Return text with nothing in it that a terminal would obey or a file could not hold, such as names of files have.

    Args:
        text: Any text.
        keeps: Which of those characters are left as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else c.encode("unicode_escape").decode() for c in text)


class _PrintableError(Exception):
    """An error whose message may hold names of others, such as of files, which are made printable."""

    _KEEPS = "\n\t"

    def __str__(self) -> str:
        return printable(super().__str__(), self._KEEPS)


class ConfigError(_PrintableError, ValueError):
    """A configuration that contradicts itself, the model, or the devices of the job."""


class DataError(_PrintableError, ValueError):
    """A data loader or a batch that cannot be sharded or padded as asked."""


class UnknownNameError(ConfigError, AttributeError):
    """A name that an object of ours has not, so that `hasattr()` is False."""


class NoLengthError(DataError, TypeError):
    """A loader whose length is not known, so that `list(loader)` asks no further."""


class EngineError(_PrintableError, RuntimeError):
    """An engine that cannot start or go on on this machine."""


class CheckpointError(_PrintableError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, and the tensor where there is one."""

    _KEEPS = ""


class TrainingError(_PrintableError, RuntimeError):
    """A run that cannot go on, as its numbers are not finite any more."""


def in_one_line(error: BaseException) -> str:
    """Return what an error of another library says, its first 300 characters, without line breaks."""
    return " ".join(str(error)[:10_000].split())[:300]


def in_few_lines(count: int, lines: Iterable[str]) -> str:
    """Return the first twenty lines of a message, and how many more there would be; those are not made."""
    text = "\n".join(islice(lines, _MAX_LINES))
    return f"{text}\n… and {count - _MAX_LINES:,} more of the kind" if count > _MAX_LINES else text


def listed(names: Collection[str], most: int = 8) -> str:
    """Return the first names of several for a message, and how many more there are."""
    more = len(names) - most
    return ", ".join(islice(names, most)) + (f" and {more:,} more" if more > 0 else "")


_MAX_LINES = 20
_MAX_SHOWN = 200
_MAX_DEPTH_SHOWN = 8


def shown(value: Any) -> str:
    """Return a value as a message shows it: its `repr()`, cut off after 200 characters, however large it is."""
    text = ""
    for piece in _pieces(value, _MAX_DEPTH_SHOWN):
        text += piece
        if len(text) > _MAX_SHOWN:
            return f"{text[:_MAX_SHOWN]}…"
    return text


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield a value's `repr()` from its beginning, so that what is not shown is not even made."""
    if type(value) in _BRACKETS and value and depth == 0:
        yield "…"
    elif type(value) in (list, tuple, dict) or (type(value) is set and value):
        opening, closing = _BRACKETS[type(value)]
        yield opening
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item, depth - 1)
            if type(value) is dict:
                yield ": "
                yield from _pieces(value[item], depth - 1)
        yield ",)" if type(value) is tuple and len(value) == 1 else closing
    elif type(value) in (str, bytes):
        yield repr(value[: _MAX_SHOWN + 1])
    elif type(value) is int and value.bit_length() > 4 * _MAX_SHOWN:
        yield f"<an int of {value.bit_length():,} bits>"  # Python writes no number of 5,000 digits
    else:
        yield _repr(value)


_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}")}


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # of a class that is not ours
        return f"<{type(value).__name__}, whose repr() raises {type(error).__name__}>"
