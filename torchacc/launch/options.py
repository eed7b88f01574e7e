"""What a job is started with, and what is refused before anything is."""

import ast
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

from torchacc import env
from torchacc.errors import ConfigError

_DEVICES = Path("/dev")


@dataclass(frozen=True)
class LaunchOptions:
    """How to start the processes of a job."""

    num_processes: int = 1
    """Processes on this node, one for each device; an SPMD process drives several."""
    num_nodes: int = 1
    """Machines, each with a launcher of its own and as many processes."""
    node_rank: int = 0
    """Which of the machines this is."""
    master_addr: str | None = None
    """Host name or address of node 0; None on a single node."""
    master_port: int | None = None
    """A port on node 0 that is free; None on a single node for any."""
    max_restarts: int = 0
    """How often a job that failed is started again."""
    min_processes: int | None = None
    """Minimum number of processes of an elastic restart, after lost devices or a hang; None for as many as before.
    On a single node."""
    heartbeat_secs: float | None = None
    """Seconds without progress after which a job hangs; None for ever. Longer than anything between two steps, such as
    an evaluation by other means or a checkpoint. Counted from the first step on, for models of accelerate()."""
    grace_secs: float = 300.0
    """Seconds that the processes have to save and end after SIGTERM or Ctrl-C."""
    log_dir: str | PathLike[str] | None = None
    """A folder that gets a new one for this job, with the output of each process; None to keep it only on failure."""
    all_ranks: bool = False
    """Whether the terminal shows all processes of this node, each line with its rank, and not rank 0 alone."""


def check(command: Sequence[str], options: LaunchOptions) -> None:
    """Refuse what cannot be started.

    Raises:
        ConfigError: A number or an address is wrong, the port is in use, there are fewer GPUs than processes, or the
            command is no Python program.
    """
    env.refuse_several_launchers("torchacc launch")
    _check_numbers(options)
    _check_nodes(options)
    _check_devices(options.num_processes)
    _check_command(command)


def count_gpus(devices: Path = _DEVICES, environ: Mapping[str, str | None] | None = None) -> int | None:
    """Return how many NVIDIA GPUs the processes would see; None where there are none or they are to use the CPU."""
    names = ("CUDA_VISIBLE_DEVICES", "PJRT_DEVICE")
    visible, pjrt = (environ.get(name) if environ is not None else env.get(name) for name in names)
    found = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if not found or pjrt == "CPU" or visible in ("", "-1"):
        return None
    return len(found) if visible is None else min(len(found), len(visible.split(",")))


def _check_numbers(options: LaunchOptions) -> None:
    for name, least in (("num_processes", 1), ("num_nodes", 1), ("node_rank", 0), ("max_restarts", 0)):
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} = {value!r}: write a whole number of {least} or more")
    if options.node_rank >= options.num_nodes:
        raise ConfigError(
            f"node_rank = {options.node_rank} with num_nodes = {options.num_nodes}: nodes are numbered from 0 to "
            f"{options.num_nodes - 1}"
        )
    for name in ("grace_secs", "heartbeat_secs"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} = {value!r}: write a number of seconds above 0")
    if options.min_processes is not None:
        _check_least(options.min_processes, options)


def _check_least(least: int, options: LaunchOptions) -> None:
    if not 1 <= least <= options.num_processes:
        raise ConfigError(f"min_processes = {least!r}: write a number from 1 to num_processes, {options.num_processes}")
    if options.num_nodes > 1:
        raise ConfigError(
            "min_processes is for a single node: of several, each would have to know what the others have left. Start "
            "the job anew with fewer; it goes on from its checkpoint at any size"
        )
    if not options.max_restarts:
        raise ConfigError(f"min_processes = {least} says with how many to restart, and max_restarts is 0: set it too")


def _check_nodes(options: LaunchOptions) -> None:
    port = options.master_port
    if port is not None and not (isinstance(port, int) and 0 < port < 65536):
        raise ConfigError(f"master_port = {port!r}: ports are numbered from 1 to 65535")
    if options.num_nodes > 1 and (options.master_addr is None or port is None):
        raise ConfigError(
            f"num_nodes = {options.num_nodes} needs master_addr, the address of node 0, and master_port, a free port "
            "there; both the same on every node"
        )
    if options.master_addr is not None:
        try:
            socket.getaddrinfo(options.master_addr, port)
        except OSError as error:
            raise ConfigError(
                f"master_addr = {options.master_addr!r} is not a host that is known here: {error}"
            ) from None
    if port is not None and options.node_rank == 0:
        _check_port(port)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used on this machine ({error.strerror}): another job may still run. Write "
                "another master_port, or, on a single node, leave it out to have a free one chosen"
            ) from None


def _check_devices(num_processes: int) -> None:
    found = count_gpus()
    if found is not None and num_processes > found:
        raise ConfigError(
            f"{num_processes} processes, and {found} GPU{'s' * (found != 1)} on this machine: each process drives one. "
            f"Start at most {found}; or, to train on the CPU, set the environment variable CUDA_VISIBLE_DEVICES to "
            "nothing, or PJRT_DEVICE=CPU for XLA"
        )


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise ConfigError("there is nothing to run: write a script, or -m and a module, and then its arguments")
    if command[0] == "-m":
        _check_module(command[1] if len(command) > 1 else "")
        return
    script = Path(command[0])
    if command[0].startswith("-"):
        raise ConfigError(
            f"{command[0]!r} is not an option: options stand before the script, its own arguments after it"
        )
    if not script.is_file():
        raise ConfigError(f"{script} is {'a folder' if script.is_dir() else 'not there'}: write the script to run")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script itself will give them
            ast.parse(script.read_bytes(), filename=str(script))
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{script}{where} is not Python that this Python can run: {error}") from None


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if not top or (find_spec(top) is None and PathFinder.find_spec(top, [str(Path.cwd())]) is None):
        raise ConfigError(f"-m {name}: no module of this name is installed, or lies in {Path.cwd()}")
