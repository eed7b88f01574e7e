"""The one module that reads and writes the process's environment; and what is installed in it."""

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchacc.errors import ConfigError, shown

_SECRET = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH|JWT|COOKIE")
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


@dataclass(frozen=True)
class Scheduler:
    """The variables by which a program that starts processes tells each which one it is."""

    name: str
    rank: str
    num_processes: str
    local_rank: str
    local_num_processes: str
    """A number, or SLURM's list of the numbers of all machines, such as `2(x3),1`."""
    job: tuple[str, ...]
    """What all processes of a job have in common, and no other job has."""
    machine: str = ""
    """The number of this machine, for such a list."""


SCHEDULERS = (
    # mpirun comes first: under SLURM it starts its own daemons by srun, whose variables its processes inherit.
    Scheduler(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",),
    ),
    # Those of the step: those of the job, such as SLURM_NTASKS, are there in a batch script, too, which is one process.
    Scheduler(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_NODEID",
    ),
)  # fmt: skip
"""Who starts processes without RANK and WORLD_SIZE; the first that has started several counts."""


def read_job(environ: Mapping[str, str] | None = None) -> Job:
    """Read the job from the launcher's variables; without them it is this one process.

    Args:
        environ: Variables to read instead of the process's own.

    Raises:
        ConfigError: The variables contradict one another.
    """
    environ = os.environ if environ is None else environ
    scheduler = _scheduler(environ)
    if scheduler is not None:
        environ = _translated(environ, scheduler)
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


def scheduler() -> str | None:
    """Return who has started several processes without a launcher, such as `srun`; None where nobody has."""
    found = _scheduler(os.environ)
    return None if found is None else found.name


def set_meeting_point() -> None:
    """Set where the processes of a scheduler's job meet, unless the user has, or the launcher.

    Raises:
        ConfigError: They are on several machines, and nobody has said which is the first.
    """
    scheduler = _scheduler(os.environ)
    if scheduler is None:
        return
    job = read_job()
    if get("MASTER_ADDR") is None and job.local_num_processes < job.num_processes:
        raise ConfigError(
            f"{scheduler.name} has started {job.num_processes} processes, {job.local_num_processes} of them on this "
            "machine, and MASTER_ADDR does not say where they meet: export MASTER_ADDR, the first machine's name, and "
            "MASTER_PORT, a free port of it, on all machines, or start `torchacc launch` once on each "
            "with --num-nodes, --node-rank, --master-addr and --master-port"
        )
    set_default("MASTER_ADDR", "127.0.0.1")
    number = int(hashlib.sha256(repr([get(name) for name in scheduler.job]).encode()).hexdigest(), 16)
    set_default("MASTER_PORT", str(20000 + number % 10000))


def refuse_several_launchers(command: str) -> None:
    """Refuse a command that starts a machine's processes where a scheduler has started it several times there.

    Raises:
        ConfigError: It has.
    """
    scheduler = _scheduler(os.environ)
    if scheduler is not None and (count := read_job().local_num_processes) > 1:
        raise ConfigError(
            f"{scheduler.name} has started {count} of `{command}` on this machine, and each would start all processes: "
            f"have it start one on each machine (--ntasks-per-node=1), or start the script itself by {scheduler.name}, "
            "without a launcher"
        )


def _scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Return who has started several processes, of which this is one, without telling them RANK and WORLD_SIZE."""
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return None
    return next((each for each in SCHEDULERS if _integer(environ, each.num_processes, 1) > 1), None)


def _translated(environ: Mapping[str, str], scheduler: Scheduler) -> dict[str, str]:
    """Return the variables of `torchrun` for those of a scheduler."""
    absent = [
        name for name in (scheduler.rank, scheduler.local_rank, scheduler.local_num_processes) if not environ.get(name)
    ]
    if absent:
        raise ConfigError(
            f"{scheduler.name} has started {environ[scheduler.num_processes]} processes "
            f"({scheduler.num_processes}), and {', '.join(absent)} is not set: export RANK, WORLD_SIZE, LOCAL_RANK and "
            "LOCAL_WORLD_SIZE, or start the processes by `torchacc launch`"
        )
    counts = _counts(environ[scheduler.local_num_processes])
    machine = _integer(environ, scheduler.machine, 0) if scheduler.machine else 0
    return {
        "RANK": environ[scheduler.rank],
        "WORLD_SIZE": environ[scheduler.num_processes],
        "LOCAL_RANK": environ[scheduler.local_rank],
        "LOCAL_WORLD_SIZE": str(counts[min(machine, len(counts) - 1)]),
    }


def _counts(text: str) -> list[int]:
    """Return the numbers that SLURM writes as `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(f"the number of processes on each machine is said to be {text!r}, which is no such list")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


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


def flags_with(name: str, more: Mapping[str, str]) -> str:
    """Return a variable that holds flags `--key=value` with more of them, but for keys that are there already."""
    flags = os.environ.get(name, "").split()
    known = {flag.partition("=")[0] for flag in flags}
    return " ".join([*flags, *(f"--{key}={value}" for key, value in more.items() if f"--{key}" not in known)])


def has_flag(name: str, flag: str) -> bool:
    """Return whether a variable that holds several flags has this one."""
    return flag in os.environ.get(name, "").split()


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={shown(text)} is not a whole number") from None
