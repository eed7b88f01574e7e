"""The one module that reads and writes the process's environment; and what is installed in it."""

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchacc.errors import ConfigError, shown

_SECRET = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH")
_OWN = Path("/proc/self/environ")
"""The variables that this process was started with."""


@dataclass(frozen=True)
class Job:
    """The processes of this job, as the launcher (such as `torchrun`), if any, describes them."""

    rank: int = 0
    """This process's rank among all processes."""
    num_processes: int = 1
    """Processes on all machines."""
    local_rank: int = 0
    """This process's rank among the processes of its machine."""
    local_num_processes: int = 1
    """Processes on this machine."""

    @property
    def launched(self) -> bool:
        """Whether there is more than this one process."""
        return self.num_processes > 1


def read_job(environ: Mapping[str, str] | None = None) -> Job:
    """Read the job from the launcher's variables; without them it is this one process.

    Args:
        environ: Variables to read instead of the process's own.

    Raises:
        ConfigError: The variables contradict one another.
    """
    environ = os.environ if environ is None else environ
    rank, num_processes = _integer(environ, "RANK", 0), _integer(environ, "WORLD_SIZE", 1)
    if not 0 <= rank < num_processes:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={num_processes}: a rank lies between 0 and {num_processes - 1}. "
            "Start the processes with `torchrun`, which sets both."
        )
    return Job(
        rank=rank,
        num_processes=num_processes,
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        local_num_processes=_integer(environ, "LOCAL_WORLD_SIZE", num_processes),
    )


def installed_version(package: str) -> str | None:
    """Return the version of a package that is installed in this environment, without importing it; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def get(name: str) -> str | None:
    """Return the value of a variable, or None where it is not set."""
    return os.environ.get(name)


def with_prefixes(*prefixes: str) -> dict[str, str]:
    """Return the variables whose names begin with one of these, sorted by name; none that may hold a secret."""
    shown_ones = (name for name in sorted(os.environ) if name.startswith(prefixes) and not _SECRET.search(name))
    return {name: os.environ[name] for name in shown_ones}


def set_default(name: str, value: str) -> bool:
    """Set a variable unless the user has set it.

    Returns:
        Whether it was set.
    """
    if name in os.environ:
        return False
    os.environ[name] = value
    return True


def with_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables and others, which win, for a process that it starts."""
    return {**os.environ, **given}


def replace_default(name: str, default: str, value: str) -> None:
    """Set a variable that a library has set to its default in this process, and not the user before it started."""
    try:
        given = _OWN.read_bytes().split(b"\0")
    except OSError:
        return
    if os.environ.get(name) == default and not any(entry.startswith(f"{name}=".encode()) for entry in given):
        os.environ[name] = value


def add_flag(name: str, flag: str) -> bool:
    """Add a flag `--key=value` to a variable that holds several, unless its key is there already.

    Returns:
        Whether it was added.
    """
    flags = os.environ.get(name, "").split()
    if any(other.partition("=")[0] == flag.partition("=")[0] for other in flags):
        return False
    os.environ[name] = " ".join([*flags, flag])
    return True


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={shown(text)} is not a whole number") from None
