"""Copies on the host of what is saved, so that a checkpoint can be written while training changes the originals."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torchacc.checkpoint.format.manifest import as_bytes
from torchacc.checkpoint.format.safetensors_files import Slot
from torchacc.errors import CheckpointError

_SAMPLED = 64
"""How many elements of a run are compared with what they were when the save began."""

Run = tuple[Slot, int, torch.Tensor]
"""Where elements go, which of the tensor's is the first, and the elements."""


class Staging:
    """Host memory that holds copies of tensors while they are written, and is used again for the next ones."""

    def __init__(self) -> None:
        self._spare: dict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    def room(self, data: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy of a host tensor."""
        alike = self._spare.get((data.dtype, data.shape))
        room = alike.pop() if alike else torch.empty_like(data)
        self._used.append(room)
        return room

    def copies(self, runs: Iterable[Run]) -> Iterator[Run]:
        """Copy all runs now, and return an iterator over the copies."""
        return iter([(slot, start, self.room(data).copy_(data)) for slot, start, data in runs])

    def release(self) -> None:
        """Let the copies be overwritten by the next ones, and free what the last ones had no use for."""
        used, self._used, self._spare = self._used, [], {}
        for room in used:
            self._spare.setdefault((room.dtype, room.shape), []).append(room)


class BackgroundCopy(threading.Thread):
    """Copies tensors beside what runs, and finds out where they were changed before that was done.

    A change that autograd hears of moves a tensor's version. One that it does not, as through `.data`, is found where
    it meets one of the elements that are noted here of each run.
    """

    def __init__(
        self,
        runs: Iterable[Run],
        staging: Staging,
        slots: Mapping[str, Slot],
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Note what there is to copy, and how it is now.

        Args:
            runs: Contiguous host tensors, which may be the memory of parameters.
            staging: Where the copies go.
            slots: Names to the places that runs go to, for an error's message.
            tensors: What the runs are of, such as DTensors, which have versions of their own, with names.
        """
        super().__init__(name="torchacc-copy")
        self._runs = [(run, _version(run[2]), _sample(run[2])) for run in runs]
        self._tensors = [(name, tensor, _version(tensor)) for name, tensor in tensors]
        self._staging = staging
        self._slots = slots
        self._copies: list[Run] = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Copy; what goes wrong is kept for `copies()`."""
        try:
            self._copy()
        except Exception as error:
            self._error = error

    def copies(self) -> Iterator[Run]:
        """Wait until all is copied, and yield the copies.

        Raises:
            CheckpointError: A tensor was changed before it was copied.
        """
        self.join()
        if self._error is not None:
            raise self._error
        copies, self._copies = self._copies, []
        yield from copies

    def _copy(self) -> None:
        runs, self._runs = self._runs, []
        tensors, self._tensors = self._tensors, []
        for (slot, start, data), version, sample in runs:
            copy = self._staging.room(data)
            if data.numel():
                # By numpy, as PyTorch would start threads that are in the way of the training's.
                np.copyto(np.asarray(as_bytes(copy)), np.asarray(as_bytes(data)))
            if _version(data) != version or not np.array_equal(_sample(copy), sample):
                raise _changed(next(name for name, own in self._slots.items() if own == slot))
            self._copies.append((slot, start, copy))
        for name, tensor, version in tensors:
            if _version(tensor) != version:
                raise _changed(name)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those that inference_mode() makes have none


def _sample(data: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a few elements from all over a tensor, which takes PyTorch twice as long."""
    elements = np.asarray(as_bytes(data)).reshape(-1, data.element_size())
    return elements[:: max(1, -(-len(elements) // _SAMPLED))].copy()


def _changed(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r} was changed, by something else than its optimizer's step or a load, while a save in the background "
        "copied it: change it between optimizer.step() and the save, or after the manager's wait(), or save with "
        "async_save=False"
    )
