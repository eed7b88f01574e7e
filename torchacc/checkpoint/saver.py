"""Save a model that is being trained: all processes write at once, a part each, and the checkpoint appears whole."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchacc.checkpoint.call_checks import path_first
from torchacc.checkpoint.hf import pretrained_files
from torchacc.checkpoint.own_format.folder_writer import FolderWriter
from torchacc.checkpoint.own_format.safetensors_files import SafetensorsLayout
from torchacc.checkpoint.run_state import SmallStates, random_state, small_states
from torchacc.checkpoint.save_plan import TensorWrite, index_files, plan_save
from torchacc.engines.sharded_model import ShardedModel, sharded_model
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger

_log = get_logger(__name__)

TotalProgress = Callable[[int, int], None]
"""Told of each part of a tensor that is copied: its bytes, and those of all tensors."""


@path_first("torchacc.checkpoint.save(folder, model=model, optimizer=optimizer)")
def save(
    path: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    tokenizer: Any = None,
    max_shard_size: int | None = None,
) -> None:
    """Save a checkpoint. Collective: call it on every process.

    The folder is a Hugging Face checkpoint, which `from_pretrained()` opens, and also holds the state that is needed to
    resume training. All processes write in parallel. The folder gets its name once it is complete; only then does it
    replace an earlier checkpoint of the same name.

    Args:
        path: The folder to create, on a file system that all machines share.
        model: The model that `accelerate()` returned.
        optimizer: Its optimizer.
        scheduler: A scheduler, or any object with `state_dict()` and `load_state_dict()`.
        loader: The loader that `accelerate()` returned, to save its position.
        extra: Any other state that `load()` should return: numbers, strings, tensors, lists and dicts. Rank 0's is
            saved.
        tokenizer: A tokenizer or processor to save in the folder by its `save_pretrained()`.
        max_shard_size: Maximum bytes of tensors in one file; a larger tensor gets a file of its own. None to choose a
            size at which processes do not wait for each other.

    Raises:
        CheckpointError: The checkpoint cannot be written, or the state has values of a type that it cannot hold. Raised
            on every process. An earlier checkpoint of the same name is unchanged.
    """
    message = save_silently(
        path,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra=extra,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
    )
    _log.info("%s", message)


def save_silently(path: str | PathLike[str], *, model: nn.Module, **others: Any) -> str:
    """Save a checkpoint as `save()` does, and return what it would log. Collective: every process."""
    began = time.monotonic()
    engine = sharded_model(model).engine
    drawn = engine.random_state()
    pending = snapshot(path, model=model, **others, copied=False)
    # All processes wait here until it is complete: none goes on and moves the folder before.
    engine.group.call_on_all(pending.write)
    engine.set_random_state(drawn)
    return f"saved {path} in {time.monotonic() - began:.1f} s ({pending.nbytes:,} bytes)"


@path_first("torchacc.checkpoint.snapshot(folder, model=model, optimizer=optimizer)")
def snapshot(
    path: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    tokenizer: Any = None,
    max_shard_size: int | None = None,
    copied: bool = True,
) -> "PendingSave":
    """Copy this process's part of a checkpoint to host memory, to write it while training continues. Collective.

    Args:
        path: The folder to create, on a file system that all machines share.
        model: The model that `accelerate()` returned.
        optimizer: Its optimizer.
        scheduler: A scheduler, or any object with `state_dict()` and `load_state_dict()`.
        loader: The loader that `accelerate()` returned, to save its position.
        extra: Any other state that `load()` should return, as for `save()`.
        tokenizer: A tokenizer or processor to save in the folder by its `save_pretrained()`.
        max_shard_size: As for `save()`.
        copied: If True, the tensors are copied, so that training may change them before `write()` is called.

    Returns:
        The pending save. Call its `write()` once on every process, from any thread.

    Raises:
        CheckpointError: The folder cannot be written. Raised on every process.
    """
    sharded = sharded_model(model)
    group, job = sharded.engine.group, sharded.engine.job
    sharded.status.check_usable()
    if optimizer is not None:
        sharded.status.check_optimizer(optimizer)
    group.expect_all("torchacc.checkpoint.save()")
    sharded.engine.sync()
    # Comes first, and is put back in the end: to fetch tensors moves XLA's seed, and saving is to change no number.
    drawn = random_state(sharded)
    plan = plan_save(sharded, optimizer, max_shard_size)
    met = group.all_gather_objects((secrets.token_hex(4), drawn))
    writer = FolderWriter(Path(path).resolve(), met[0][0], job.rank, job.num_processes)

    def prepare() -> tuple[SmallStates, Iterable[TensorWrite]]:
        small = SmallStates()
        if not job.rank:  # the others copy meanwhile
            states = [drawn_by_rank for _, drawn_by_rank in met]
            small = small_states(sharded, states, optimizer, plan.values, scheduler, loader, extra)
            small.files |= {**index_files(plan.files), **pretrained_files(sharded, tokenizer)}
            files = {**plan.files, **small.lay_out()}
            writer.prepare({name: (layout.header, layout.nbytes) for name, layout in files.items()}, small.files)
        writes = chain(plan.writes(sharded), small.writes())
        return small, _copied(sharded, writes) if copied else writes

    try:
        small, writes_to_make = group.call_on_all(prepare)
        group.call_on_all(writer.begin)
    except BaseException as error:
        writer.fail(error)
        raise
    sharded.engine.set_random_state(drawn)

    def keep_memory() -> None:
        if copied:
            _spare[sharded] = [write.data for write in writes_to_make if write.is_live]

    return PendingSave(writer, writes_to_make, small.files, plan.nbytes, keep_memory)


def _copied(sharded: ShardedModel, writes: Iterator[TensorWrite]) -> list[TensorWrite]:
    """Copy what training goes on to write, into the memory of the model's last copied save where that fits.

    Memory that the system has yet to hand out takes several times as long to fill.
    """
    spare = iter(_spare.pop(sharded, []))
    copies = []
    with torch.inference_mode(False), torch.no_grad():  # else what is made in that mode could not be used outside
        for write in writes:
            if not write.is_live:
                copies.append(write)
                continue
            room = next(spare, None)
            if room is None or room.dtype != write.data.dtype or room.shape != write.data.shape:
                room = torch.empty_like(write.data)
            copies.append(write._replace(data=room.copy_(write.data)))
    return copies


_spare: WeakKeyDictionary[ShardedModel, list[torch.Tensor]] = WeakKeyDictionary()
"""Memory of the last copied save, which the next one of the model uses."""


def free_copies(model: nn.Module) -> None:
    """Free the memory that the last copied save of a model has left for the next one."""
    _spare.pop(sharded_model(model), None)


@dataclass
class PendingSave:
    """A process's part of a checkpoint that is not written yet."""

    _writer: FolderWriter
    _writes: Iterable[TensorWrite]
    _files: dict[str, bytes]
    nbytes: int
    """Bytes of all tensors of the checkpoint, over all processes."""
    _done: Callable[[], None] = lambda: None
    """Called when the tensors are no longer needed."""

    def write(self) -> None:
        """Write this process's part, and wait until the checkpoint is complete.

        Call it once on every process, from any thread. The processes synchronise through the file system.

        Raises:
            CheckpointError: This or another process could not write its part.
        """
        try:
            for write in self._writes:
                self._writer.write(write.region, write.start, write.data)
            for name, content in self._files.items():
                self._writer.write_file(name, content)
            self._writer.finish()
        except OSError as error:
            self._writer.fail(error)
            raise CheckpointError(f"{self._writer.final} was not saved: {error.strerror or error}") from error
        except BaseException as error:
            self._writer.fail(error)
            raise
        finally:
            self._done()
            self._writes = ()


def write_folder(
    path: str | PathLike[str],
    layouts: Mapping[str, SafetensorsLayout],
    files: Mapping[str, bytes],
    writes: Iterable[TensorWrite],
    *,
    progress: TotalProgress | None = None,
) -> None:
    """Write a checkpoint whose tensors come one by one, as from another format. Runs in one process.

    Args:
        path: The folder to create.
        layouts: Its files of tensors by name, in which each tensor has its place.
        files: Its other files by name, but for the indices of tensors.
        writes: The tensors.
        progress: Called with the bytes of each tensor that is written, and the bytes of all tensors.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    writer = FolderWriter(Path(path).absolute(), secrets.token_hex(4), rank=0, num_ranks=1)
    others = {**index_files(layouts), **files}
    writer.prepare({name: (layout.header, layout.nbytes) for name, layout in layouts.items()}, others)
    writer.begin()
    total = sum(region.nbytes for layout in layouts.values() for region in layout.regions.values())
    PendingSave(writer, _watched(writes, total, progress), others, total).write()


def _watched(writes: Iterable[TensorWrite], total: int, progress: TotalProgress | None) -> Iterator[TensorWrite]:
    for write in writes:
        yield write
        if progress is not None:
            progress(write.data.nbytes, total)
