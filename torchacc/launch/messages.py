"""What the launcher says of a job, on standard error."""

import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchacc.launch.hang import RankStatus, describe, find_hung_rank
from torchacc.launch.options import LaunchOptions
from torchacc.launch.progress import Progress

_TRACEBACKS = ("Traceback (most recent call last)", "Fatal Python error")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_RANK = re.compile(r"^\[rank\d+\]: ")  # what PyTorch puts before each line of an exception
_NUM_LINES = 60
_MAX_LINES = 200
_MOST_RANKS = 8
_VMSTAT = Path("/proc/vmstat")


def say(text: str) -> None:
    """Print one message of the launcher's."""
    sys.stderr.write(f"torchacc launch: {text}\n")
    sys.stderr.flush()


def pass_on(lines: Sequence[str]) -> None:
    """Print what ranks have said."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def failure(rank: int, status: int, output: str, *, gone: Sequence[int], is_out_of_memory: bool) -> None:
    """Tell of the rank that failed first: what it printed at last, and then how it ended.

    Args:
        rank: The rank.
        status: Its exit status, or a signal's negative number.
        output: What it has printed; nothing where that is on the terminal.
        gone: The ranks that had ended well before.
        is_out_of_memory: Whether the system has killed some process meanwhile, as memory ran out.
    """
    if output:
        sys.stderr.write(f"{last_words(output)}\n")
    ended = how_it_ended(status, is_out_of_memory=is_out_of_memory)
    say(f"rank {rank} on {hostname()} {ended}")
    if gone:
        ranks = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        say(f"{ranks} had ended before, with exit status 0: all ranks have to make the same forwards, steps and saves")


def hang(statuses: Sequence[RankStatus], *, is_alone: bool) -> None:
    """Tell which process the others wait for: its stack, and then which it is.

    Args:
        statuses: Of the processes of this node.
        is_alone: Whether there is no other node.
    """
    now = time.monotonic()
    hung = find_hung_rank(statuses)
    if hung is not None:
        sys.stderr.write(hung.stack or "it does not say where it is: it is stopped, or deep in the system\n")
        others = "; the others wait for it" if len(statuses) > 1 else ""
        say(f"{describe(hung, hostname(), now)}{others}")
        return
    for status in statuses:
        say(describe(status, hostname(), now))
    say(
        "each of them waits for others: not all have called the same collectives"
        if is_alone
        else f"those on {hostname()} wait for others: see what the launchers of the other nodes say"
    )


def diverged(places: Mapping[int, Progress], before: str) -> None:
    """Tell where ranks are that have not made the same calls, as far as is known.

    Args:
        places: How far the ranks of this node are.
        before: What has been seen of them.
    """
    now = time.monotonic()
    listed = "; ".join(f"rank {rank} {places[rank].where(now)}" for rank in sorted(places)[:_MOST_RANKS])
    more = "; …" if len(places) > _MOST_RANKS else ""
    say(
        f"{before}: {listed}{more}. Every rank has to make the same forwards, steps and saves, an evaluation, too, and "
        "not under `if rank == 0:`"
    )


def peer_lost() -> None:
    """Tell that the processes of this node have lost one of another."""
    lost = f"those on {hostname()} have lost a rank of another node: see what its launcher says"
    say(f"{lost}; one that says nothing was killed itself, or its machine is gone")


def failed_elsewhere(nodes: Sequence[int]) -> None:
    """Tell that other nodes have failed when the processes of this one had ended well."""
    say(f"{_listed(nodes)} failed, and those on {hostname()} had ended well: see what the launchers there say")


def still_running(nodes: Sequence[int], secs: float) -> None:
    """Tell that other nodes have not ended long after this one."""
    say(f"{_listed(nodes)} had not ended {secs:.0f} s after those on {hostname()}: see what the launchers there say")


def without_first() -> None:
    """Tell that the first node's launcher has gone."""
    say(f"the launcher of node 0 has gone; those on {hostname()} have ended well, and what became of others it may say")


def _listed(nodes: Sequence[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def started(node_rank: int, ranks: Sequence[int], num_ranks: int) -> None:
    """Tell that the processes of a node are started whose output another node's terminal has."""
    own = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    say(f"node {node_rank} has started {own} of {num_ranks}; node 0 shows what rank 0 prints")


def waiting(options: LaunchOptions, secs: float) -> None:
    """Tell that this node waits for others."""
    rank, place = options.node_rank, f"{options.master_addr}:{options.master_port}"
    elsewhere = rank == 0 and not is_of_this_machine(str(options.master_addr))
    say(
        f"node {rank} waits until the launchers of all {options.num_nodes} nodes are at {place}, each with a node rank "
        f"of its own; for {secs:.0f} s by now"
        + (f". {options.master_addr} is not an address of this machine, where node 0 has to be" if elsewhere else "")
    )


def peers_missing(options: LaunchOptions, secs: float) -> None:
    """Tell that the other nodes have not come."""
    say(
        f"not all launchers of {options.num_nodes} nodes came to {options.master_addr}:{options.master_port} within "
        f"{secs:.0f} s: look for one that was not started, another port, address or number of nodes, the same node "
        "rank on two, and a firewall between them"
    )


def is_of_this_machine(address: str) -> bool:
    """Return whether a host name or an address is of this machine."""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return True
    except OSError:
        return False
    return False


def uneven(num_processes: int, num_nodes: int, num_ranks: int) -> None:
    """Tell that another node has been started with another number of processes."""
    say(
        f"{num_nodes} nodes of {num_processes} processes are {num_processes * num_nodes} ranks, and the job has "
        f"{num_ranks}: another launcher was given another number of processes"
    )


def not_used() -> None:
    """Tell that the processes train without torchacc, as far as can be seen."""
    say(
        "no process has called torchacc.accelerate() or fsdp(): unless the script itself lets its processes work "
        "together, each trains a model of its own"
    )


def not_started(error: str) -> None:
    """Tell why the processes of this node were not started, or did not meet those of others."""
    if "EADDRINUSE" in error:
        error = "another launcher of this machine has the port: write another master_port, or another node_rank"
    say(f"the processes on {hostname()} could not be started: {error}")


def how_it_ended(status: int, *, is_out_of_memory: bool = False) -> str:
    """Return an exit status in words.

    Args:
        status: An exit status, or a signal's negative number.
        is_out_of_memory: Whether the system has killed some process meanwhile, as memory ran out.
    """
    if status >= 0:
        return f"failed with exit status {status}"
    name = signal.Signals(-status).name
    if -status != signal.SIGKILL:
        return f"was ended by {name}"
    if is_out_of_memory:
        return f"was killed ({name}): memory ran out"
    return f"was killed ({name}): by a kill -9, or its container; with --max-restarts N all start again"


def count_oom_kills() -> int:
    """Return how many processes this system has killed as memory ran out; 0 where it does not tell."""
    try:
        counters = dict(line.split() for line in _VMSTAT.read_text(encoding="ascii").splitlines())
        return int(counters["oom_kill"])
    except (OSError, KeyError, ValueError):
        return 0


def hostname() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def last_words(output: str) -> str:
    """Return the end of what a process printed, from its last traceback on, with what that was chained to."""
    lines = output.rstrip().splitlines()[-_MAX_LINES:]
    plain = [_RANK.sub("", line) for line in lines]
    start = max(0, len(lines) - _NUM_LINES)
    tracebacks = [index for index, line in enumerate(plain) if line.startswith(_TRACEBACKS)]
    if tracebacks:
        start = tracebacks.pop()
        while tracebacks and start >= 2 and plain[start - 2] in _CHAINED:
            start = tracebacks.pop()
    return "\n".join(lines[start:])
