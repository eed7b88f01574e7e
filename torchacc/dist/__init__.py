"""The processes of the job: who this one is, and how it meets the others. Right in every engine.

A process is not a device: under SPMD one process drives many devices.
"""

from torchacc.api import mark_step
from torchacc.dist import fsdp as fsdp
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job

__all__ = ["fsdp", "is_master_ordinal", "local_rank", "mark_step", "rank", "rendezvous", "world_size"]


def rank() -> int:
    """Return this process's rank among all processes."""
    return read_job().rank


def local_rank() -> int:
    """Return this process's rank among the processes of its machine."""
    return read_job().local_rank


def world_size() -> int:
    """Return the number of processes."""
    return read_job().num_processes


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this process is the one to print and to write files.

    Args:
        local: Ask for one process on each machine; False for one in the whole job.
    """
    return (local_rank() if local else rank()) == 0


def rendezvous(tag: str, payload: bytes = b"") -> list[bytes]:
    """Wait until every process is here. Collective: every process.

    Args:
        tag: The name of the meeting point; all processes must give the same.
        payload: What to tell the others.

    Returns:
        Every process's payload, by rank.

    Raises:
        EngineError: The processes met at different tags.
    """
    return ProcessGroup(read_job()).rendezvous(tag, payload)
