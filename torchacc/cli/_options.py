"""Options that several commands take, and their values."""

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
        instead = "write a number and a unit, such as 16GiB or 500MB"
        if found and found[2].upper() in ("K", "M", "G", "T"):
            number = f"{found[1]}{found[2].upper()}"
            instead = f"write {number}iB (in powers of 1024) or {number}B (of 1000)"
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a size: {instead}")
    return int(nbytes)


def positive(text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number from 1 on")
    return int(text)


def named(text: str) -> str:
    """Return a name, which is not empty: nothing is another thing than what is there without the option."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a name: leave the option out, or write one")
    return text


def path(text: str) -> Path:
    """Return a path, which is not empty: that would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path: leave the option out, or write one")
    return Path(text)


def add_job_options(parser: argparse.ArgumentParser, *, num_nodes: str, variables: bool) -> None:
    """Add what `launch` and `train` both start a job by: its machines, and what is done when it fails or hangs.

    Args:
        parser: The command's parser.
        num_nodes: What is trained on where `--num-nodes` is left out, in words.
        variables: Whether an option of one machine that is left out is None, to be read from the environment.
    """

    def default(variable: str, value: str) -> str:
        return f" (default: the variable {variable})" if variables else value

    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="maximum restarts of a failed job (default: 0)"
    )
    parser.add_argument(
        "--heartbeat-secs", type=float, metavar="SECS",
        help="stop a job without progress for this many seconds, and name the rank that hangs (default: never)",
    )  # fmt: skip
    several = parser.add_argument_group("several machines: run the command on each")
    several.add_argument(
        "--num-nodes", type=int, default=None if variables else 1, metavar="N", help=f"machines (default: {num_nodes})"
    )
    several.add_argument(
        "--node-rank", type=int, metavar="N",
        help="index of this machine, from 0" + default("RANK", ""),
    )  # fmt: skip
    several.add_argument(
        "--master-addr", type=named, metavar="HOST",
        help="host name or address of machine 0" + default("MASTER_ADDR", ""),
    )  # fmt: skip
    several.add_argument(
        "--master-port", type=int, metavar="PORT", help="free port of machine 0" + default("MASTER_PORT", "")
    )
