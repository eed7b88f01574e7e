"""The processes of the job, in every engine: ranks, a gather, and a barrier.

A process is not a device: under SPMD one process drives many devices.
"""

import torch

from torchacc.api import mark_step
from torchacc.dist import fsdp as fsdp
from torchacc.engines import registry
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import read_job
from torchacc.errors import DataError, EngineError

__all__ = ["all_gather", "fsdp", "is_master_ordinal", "local_rank", "mark_step", "rank", "rendezvous", "world_size"]


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
    """Return whether this process should print, and write files.

    Args:
        local: If True, True on one process of each machine; if False, on one process of the job.
    """
    return (local_rank() if local else rank()) == 0


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate the rows of all data-parallel devices, in every engine. Collective: call it on every process.

    Use it for a loss that compares each sample with all others, such as a contrastive loss. It is differentiable: a
    loss over the rows of all devices, computed on each process, gives the gradients of an unsharded run, and so does a
    loss of this process's rows against the rows of all. The loss of every process must depend on the result.

    Args:
        tensor: A tensor of shape (rows, …), of any dtype and on any device; the same shape and dtype on every process.

    Returns:
        A tensor of shape (rows * data-parallel devices, …) on the same device, in the order of the global batch: this
        process's rows begin at `rows` times the index of its data-parallel device. Devices that share layers
        (`dist.tp`) have the same data, which is included once. Under SPMD the tensor already has the rows of all
        devices, and is returned unchanged.

    Raises:
        DataError: The tensor has no dimension, or its shape or dtype differs between processes. Raised on every
            process.
        EngineError: There are several processes, and `accelerate()` has not been called.

    Example:
        >>> images, texts = torchacc.dist.all_gather(images), torchacc.dist.all_gather(texts)
        >>> similarities = images @ texts.T * scale
        >>> loss = cross_entropy(similarities, torch.arange(len(similarities), device=similarities.device))
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        raise DataError(
            f"torchacc.dist.all_gather() of {'a tensor without dimensions' if torch.is_tensor(tensor) else tensor!r}: "
            "it puts rows one after another; give a tensor of shape (rows, …), or tensor.view(1)"
        )
    engine = registry.active_engine()
    if engine is None:
        if read_job().launched:
            raise EngineError("torchacc.dist.all_gather() before accelerate(), which says which devices there are")
        return tensor
    return engine.all_gather(tensor)


def rendezvous(tag: str, payload: bytes = b"") -> list[bytes]:
    """Wait until every process has made this call. Collective: call it on every process.

    Args:
        tag: The name of the barrier; it must be the same on all processes.
        payload: Bytes to send to all processes.

    Returns:
        The payload of every process, by rank.

    Raises:
        EngineError: The processes have passed different tags.
    """
    return ProcessGroup(read_job()).rendezvous(tag, payload)
