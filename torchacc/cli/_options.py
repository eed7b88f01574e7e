"""Values of options that several commands take."""

import argparse
import re
from pathlib import Path

from torchacc.errors import shown

_MAX_DIGITS = 18
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size(text: str) -> int:
    """Return the bytes of a size such as 5GB or 500MiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    nbytes = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0.0
    if not 1 <= nbytes < 2**63:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no size: write a number and a unit, such as 16GiB or 500MB")
    return int(nbytes)


def positive(text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number from 1 on")
    return int(text)


def named(text: str) -> str:
    """Return a name, which is not empty: nothing is another thing than what is there without the option."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{shown(text)} is no name: leave the option out, or write one")
    return text


def path(text: str) -> Path:
    """Return a path, which is not empty: that would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no path: leave the option out, or write one")
    return Path(text)
