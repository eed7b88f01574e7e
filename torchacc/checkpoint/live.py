"""Save a model that is being trained to a checkpoint, and load one into it, at any number of devices, in any engine."""

import functools
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from torchacc.checkpoint import hf, model_state, optimizer_state
from torchacc.checkpoint.format import json_codec
from torchacc.checkpoint.format.checkpoint_folder import Folder
from torchacc.checkpoint.format.commit import FolderWriter
from torchacc.checkpoint.format.manifest import as_bytes, token_of
from torchacc.checkpoint.format.safetensors_files import Slot
from torchacc.checkpoint.interop.forged import check_alike, check_random_states, making_sense
from torchacc.checkpoint.save_plan import (
    Contents,
    Other,
    indices,
    other_state,
    pretrained_files,
    random_state,
)
from torchacc.checkpoint.staging import BackgroundCopy, Run, Staging
from torchacc.checkpoint.usage import path_first
from torchacc.engines.base import ShardedModel, sharded_model
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger
from torchacc.parallel.sharding import LocalShard

_log = get_logger(__name__)


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
    """Save a checkpoint. Collective: every process.

    The folder is a Hugging Face checkpoint that `from_pretrained` opens, with what is needed to go on training beside
    it. All processes write at once, a part each. It appears under its name when it is complete, and replaces what was
    there only then.

    Args:
        path: The folder to make, on a file system that all machines share.
        model: The model that accelerate() returned.
        optimizer: Its optimizer.
        scheduler: A scheduler, or anything with `state_dict()` and `load_state_dict()`.
        loader: The loader that accelerate() returned: its position is saved.
        extra: What else is to come back from `load()`, rank 0's: numbers, strings, tensors, lists and dicts.
        tokenizer: A tokenizer or processor whose `save_pretrained()` files are to lie in the folder.
        max_shard_size: Bytes of tensors in one file, exceeded only by a tensor that is larger; None for what lets the
            processes write without waiting for each other.

    Raises:
        CheckpointError: It could not be written, or holds something that is neither numbers nor text; on every process.
            What was there before is as it was.
    """
    said = save_silently(
        path,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra=extra,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
    )
    _log.info("%s", said)


def save_silently(path: str | PathLike[str], *, model: nn.Module, **others: Any) -> str:
    """Save a checkpoint as `save()` does, and return what it would log. Collective: every process."""
    began = time.monotonic()
    engine = sharded_model(model).engine
    drawn = engine.random_state()
    pending = snapshot(path, model=model, **others, copied=False)
    # Also so that no rank goes on, and moves the folder, before all have seen that it is complete.
    engine.group.agreed(pending.write)
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
) -> "Pending":
    """Copy this process's part of a checkpoint to the host, to be written while training goes on. Collective.

    Where the tensors lie on the host, as natively on a CPU, they are copied in a thread, and the next step of an
    optimizer of the model waits until that is done. Until then nothing else may change them.

    Args:
        path: As all others: see `save()`.
        model: ″
        optimizer: ″
        scheduler: ″
        loader: ″
        extra: ″
        tokenizer: ″
        max_shard_size: ″
        copied: Whether the tensors are copied, so that steps and loads may change them before `write()` is called.

    Raises:
        CheckpointError: It cannot be written there; on every process.
    """
    sharded = sharded_model(model)
    group, job = sharded.engine.group, sharded.engine.job
    sharded.check_usable()
    if optimizer is not None:
        sharded.check_optimizer(optimizer)
    sharded.engine.sync()
    # Comes first, and is put back in the end: to fetch tensors moves XLA's seed, and saving is to change no number.
    drawn = random_state(sharded)
    contents = Contents(sharded, optimizer)
    layouts = contents.lay_out(max_shard_size)
    met = group.all_gather_objects((secrets.token_hex(4), _as_arrays(drawn)))
    writer = FolderWriter(Path(path).resolve(), met[0][0], job.rank, job.num_processes)

    def prepare() -> Other:
        if job.rank:
            return Other()
        other = other_state(sharded, [_as_tensors(draws) for _, draws in met], optimizer, scheduler, loader, extra)
        other.files |= {**indices(layouts), **pretrained_files(sharded, tokenizer)}
        files = {**layouts, **other.lay_out()}
        writer.prepare({name: (layout.header, layout.nbytes) for name, layout in files.items()}, other.files)
        return other

    other = group.agreed(prepare)
    slots = {name: slot for layout in layouts.values() for name, slot in layout.slots.items()}
    others = {name: slot for layout in other.lay_out().values() for name, slot in layout.slots.items()}
    runs = _chain(contents.runs(slots), ((others[name], 0, tensor) for name, tensor in other.tensors.items()))

    def begin() -> _Begun:
        writer.join()
        return _copied(sharded, contents, runs, slots | others) if copied else _Begun(runs)

    try:
        begun = group.agreed(begin)
    except BaseException as error:
        writer.fail(error)
        raise
    begun.start()  # now that none has to plan any more, beside copies that take its core
    nbytes = sum(layout.nbytes for layout in layouts.values())
    sharded.engine.set_random_state(drawn)
    return Pending(writer, begun.runs, other.files, nbytes, begun.done)


class _Begun(NamedTuple):
    """What a save is to write."""

    runs: Iterator[Run]
    start: Callable[[], None] = lambda: None
    """Called when all processes have come as far."""
    done: Callable[[], None] = lambda: None
    """Called when the runs are no longer needed."""


def _copied(sharded: ShardedModel, contents: Contents, runs: Iterator[Run], slots: Mapping[str, Slot]) -> _Begun:
    """Return copies of runs, made now or, where training leaves the tensors alone for long enough, beside it."""
    staging = _spare.pop(sharded, None) or Staging()

    def done() -> None:
        staging.release()
        _spare[sharded] = staging

    if not sharded.fetches_own_memory:
        return _Begun(staging.copies(runs), done=done)
    copying = BackgroundCopy(runs, staging, slots, contents.sharded_tensors())

    def start() -> None:
        sharded.before_change()
        sharded.before_change = copying.join
        copying.start()

    return _Begun(copying.copies(), start, done)


def _as_arrays(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of generators without tensors, which take several times as long to send."""
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in drawn.items()}


def _as_tensors(drawn: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in drawn.items()}


_spare: WeakKeyDictionary[ShardedModel, Staging] = WeakKeyDictionary()
"""Memory of the last copied save, which the next one of the model uses."""


@dataclass
class Pending:
    """A process's part of a checkpoint that is yet to be written."""

    _writer: FolderWriter
    _tensors: Iterator[Run]
    _files: dict[str, bytes]
    nbytes: int
    """Bytes of the whole checkpoint's tensors."""
    _done: Callable[[], None] = lambda: None
    """Called when the tensors are no longer needed."""

    def write(self) -> None:
        """Write this process's part, and return when the checkpoint is complete.

        Every process calls it, from any thread, and once: they meet through the file system.

        Raises:
            CheckpointError: Any process has failed to write its part, or its tensors were changed before they were
                copied.
        """
        try:
            for slot, start, data in self._tensors:
                self._writer.write(slot, start, data)
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
            self._tensors = iter(())
            self._done()


@path_first("torchacc.checkpoint.load(folder, model=model, optimizer=optimizer)")
def load(
    path: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
) -> Any:
    """Load a checkpoint, whatever engine and number of devices wrote it. Collective: every process.

    Each process reads what it holds, and verifies it. A Hugging Face checkpoint with safetensors loads as well, without
    an optimizer.

    Args:
        path: The folder.
        model: The model that accelerate() returned; one that was built on the meta device gets its weights here.
        optimizer: Its optimizer, with the groups that were saved; it may have made steps.
        scheduler: What was saved as the scheduler.
        loader: The loader that accelerate() returned: it goes on at the batch after the last one that was used.

    Returns:
        What was saved as `extra`.

    Raises:
        CheckpointError: The checkpoint is torn or altered, or does not fit; on every process. A model and an optimizer
            that were partly loaded refuse to run until another load succeeds.
    """
    sharded = sharded_model(model)
    group = sharded.engine.group
    sharded.before_change()
    sharded.engine.sync()
    with group.agreed(lambda: _open(sharded, path, optimizer, scheduler, loader)) as reader:
        sharded.unusable = f"loading {path} has failed, and left it with weights of both; load another checkpoint"
        if optimizer is not None:
            sharded.half_loaded.add(optimizer)

        @torch.no_grad()
        def read() -> Any:
            if sharded.engine.job.rank == 0:
                reader.folder.verify_headers()
            reader.carry_out()
            reader.load_model()
            if optimizer is not None:
                reader.load_optimizer(optimizer)
            return reader.load_other(scheduler, loader)

        extra = group.agreed(read)
        sharded.engine.sync()
        increment_version(sharded.local_shards)  # autograd does not see what is read into memory
        sharded.unusable = None
        if optimizer is not None:
            sharded.half_loaded.discard(optimizer)
        reader.set_random_state()
    return extra


def verify(path: str | PathLike[str]) -> None:
    """Read all of a torchacc checkpoint and compare it with its checksums. Any process, by itself.

    Where another process replaces it in the meantime, the one that takes its place is read.

    Raises:
        CheckpointError: It is torn or altered: the message names the file and the tensor; or somebody has removed it.
    """
    target = Path(path)
    while True:
        before = token_of(target)
        try:
            with Folder(target) as folder, making_sense(target):
                return folder.verify()
        except CheckpointError:
            now = token_of(target)
            if now == before or (now is None and target.exists()):
                raise
            if now is None:
                raise CheckpointError(
                    f"{target} was removed while it was read, say by the run that keeps its newest checkpoints only: "
                    "verify another one"
                ) from None


def _open(sharded: ShardedModel, path: Any, optimizer: Any, scheduler: Any, loader: Any) -> "_Reader":
    job = sharded.engine.job
    folder = Folder(path, begin=job.rank / job.num_processes)
    with making_sense(folder.path):
        return _planned(sharded, folder, optimizer, scheduler, loader)


def _planned(sharded: ShardedModel, folder: Folder, optimizer: Any, scheduler: Any, loader: Any) -> "_Reader":
    needed = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    files = {"optimizer": "optimizer.json", "scheduler": "state.json", "loader": "state.json"}
    absent = [name for name, wanted in needed.items() if wanted is not None and not folder.has(files[name])]
    if absent:
        raise CheckpointError(f"{folder.path} holds no state of the {' and the '.join(absent)}: load the model alone")
    wanted = ("state.json",) if optimizer is None else ("state.json", "optimizer.json")
    described = {name: folder.read_json(name) for name in wanted if folder.has(name)}
    state_of = described.get("state.json", {})
    unsaved = [name for name in ("scheduler", "loader") if needed[name] is not None and state_of.get(name) is None]
    if unsaved:
        raise CheckpointError(f"{folder.path} was saved without a {' and a '.join(unsaved)}: load it without")
    saved_class = described["optimizer.json"].get("class") if optimizer is not None else None
    if saved_class not in (None, type(optimizer).__name__):  # None: imported, where it is not known
        raise CheckpointError(
            f"{folder.path} was saved with {saved_class}, and this optimizer is {type(optimizer).__name__}: load the "
            "model alone, or make the optimizer that it was saved with"
        )
    saved_class = state_of.get("scheduler_class") if scheduler is not None else None
    if saved_class not in (None, type(scheduler).__name__):  # None: saved by an earlier version
        raise CheckpointError(
            f"{folder.path} was saved with the scheduler {saved_class}, and this one is {type(scheduler).__name__}: "
            "load without it, or make the one that it was saved with"
        )
    modules = model_state.extra_states(sharded.model)
    differing = modules.keys() ^ state_of.get("modules", {}).keys()
    if differing:
        raise CheckpointError(
            f"{folder.path} and this model differ in what modules keep of their own, by get_extra_state(): "
            f"{', '.join(sorted(differing))}"
        )
    reader = _Reader(sharded, folder, described, modules)
    reader.check_other(scheduler, loader)
    reader.plan_model()
    if optimizer is not None:
        reader.plan_optimizer(optimizer)
    return reader


class _Unplaced(NamedTuple):
    """A state of an optimizer that lies like a parameter, and is yet to be read and brought where that is."""

    parameter: nn.Parameter
    local_shard: LocalShard
    tensors: Mapping[str, hf.Stored]
    dtype: torch.dtype


class _Reader:
    """Loads from one folder what one process holds.

    What goes into memory at hand is planned as a whole, before the first byte of it is read: a plan that fails then
    leaves the model as it was, and Python's bookkeeping and the tensors' bytes drive each other out of the processor's
    cache once. What goes to a device is read tensor by tensor, so that the host need not hold all of it.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        folder: Folder,
        described: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
    ) -> None:
        self.folder = folder
        self._sharded = sharded
        self._described = described
        self._modules = modules
        self._tensors = hf.find(sharded, folder)
        self._filled: list[torch.Tensor] = []
        self._unassigned: list[tuple[nn.Parameter, LocalShard]] = []
        self._conversions: list[tuple[memoryview, torch.dtype, hf.Stored, int]] = []
        self._groups: list[dict[str, Any]] = []
        self._entries: dict[int, dict[str, Any]] = {}
        self._random_states: list[dict[str, Any]] = []
        self._other: Any = None

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *error: Any) -> None:
        self.folder.__exit__(*error)

    @torch.no_grad()
    def plan_model(self) -> None:
        """Plan to read the parameters."""
        for parameter, local_shard in self._sharded.local_shards.items():
            memory = self._sharded.host_memory(parameter, parameter)
            if memory is None:
                self._unassigned.append((parameter, local_shard))
            else:
                self._plan_read(memory, local_shard, self._tensors)
                self._filled.append(memory)

    @torch.no_grad()
    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan to read an optimizer's state."""
        described = json_codec.decode(self._described["optimizer.json"], self._state_tensors)
        for own, group in zip(optimizer.param_groups, described["groups"], strict=False):
            own = {name: value for name, value in own.items() if name not in ("params", "param_names")}
            check_alike(self.folder.path / "optimizer.json", "optimizer", own, group)
        groups = optimizer_state.match_groups(
            self._sharded, optimizer, [group["parameters"] for group in described["groups"]]
        )
        stored: dict[str, dict[str, hf.Plain]] = {}
        for full_name, slot in self.folder.optimizer.items():
            name, _, key = full_name.rpartition("/")
            stored.setdefault(name, {})[key] = hf.Plain(self.folder, full_name, slot)
        ids = itertools.count()
        for group, saved in zip(groups, described["groups"], strict=True):
            own_ids = list(itertools.islice(ids, len(group)))
            for own_id, parameter in zip(own_ids, group, strict=True):
                found = self._plan_entries(parameter, stored, described["values"], optimizer.state.get(parameter, {}))
                if found:
                    self._entries[own_id] = found
            self._groups.append({**{k: v for k, v in saved.items() if k != "parameters"}, "params": own_ids})

    def carry_out(self) -> None:
        """Read what is planned."""
        self.folder.carry_out()
        conversions, self._conversions = self._conversions, []
        for conversion in conversions:
            hf.read_into(*conversion)

    def load_model(self) -> None:
        """Load parameters that are not in memory at hand, and persistent buffers."""
        torch.autograd.graph.increment_version(self._filled)  # of which a read into memory does not tell autograd
        for parameter, local_shard in self._unassigned:
            self._sharded.assign(parameter, self._read(local_shard, self._tensors, parameter.dtype))
        for name, buffer in model_state.buffer_slots(self._sharded.model):
            if name in self._tensors:
                buffer.copy_(self._tensors[name].read().view(buffer.shape).to(buffer.dtype))

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load an optimizer's groups, and the state that is not in memory at hand."""
        for entries in self._entries.values():
            for key, value in entries.items():
                if isinstance(value, _Unplaced):
                    local = self._read(value.local_shard, value.tensors, value.dtype)
                    entries[key] = self._sharded.place(value.parameter, local)
        optimizer.load_state_dict(optimizer_state.LocalState({"state": self._entries, "param_groups": self._groups}))

    def check_other(self, scheduler: Any, loader: Any) -> None:
        """Read the small states, and see that they can be loaded."""
        if "state.json" not in self._described:
            return
        path = self.folder.path / "state.json"
        self._other = json_codec.decode(self._described["state.json"], self._state_tensors)
        check_random_states(path, self._other["random"])
        self._other["extra"], [self._other["modules"][name] for name in self._modules]
        for part, name in ((scheduler, "scheduler"), (loader, "loader")):
            if part is not None:
                check_alike(path, name, part.state_dict(), self._other[name])

    def load_other(self, scheduler: Any, loader: Any) -> Any:
        """Load the scheduler and the loader's position; return `extra`."""
        if self._other is None:
            return None
        for name, module in self._modules.items():
            module.set_extra_state(self._other["modules"][name])
        for part, name in ((scheduler, "scheduler"), (loader, "loader")):
            if part is not None:
                with making_sense(f"{self.folder.path / 'state.json'}: the state of the {name}"):
                    part.load_state_dict(self._other[name])
        self._random_states = self._other["random"]
        return self._other["extra"]

    def _read(self, local_shard: LocalShard, tensors: Mapping[str, hf.Stored], dtype: torch.dtype) -> torch.Tensor:
        """Return what this process holds of tensors, flat."""
        local = torch.empty(sum(piece.numel for piece in local_shard.slices), dtype=dtype)
        self._plan_read(local, local_shard, tensors)
        self.carry_out()
        return local

    def _plan_read(
        self, local: torch.Tensor, local_shard: LocalShard, tensors: Mapping[str, hf.Stored], *, is_new: bool = False
    ) -> None:
        """Plan to fill a host tensor with what this process holds of tensors, cast to its dtype."""
        memory, dtype = as_bytes(local), local.dtype
        for piece in local_shard.slices:
            run = memory[piece.offset * dtype.itemsize : (piece.offset + piece.numel) * dtype.itemsize]
            stored = tensors[piece.name]
            if isinstance(stored, hf.Plain) and stored.dtype == dtype:
                self.folder.plan_read(run, stored.name, stored.slot, piece.start, is_new=is_new)
            else:
                self._conversions.append((run, dtype, stored, piece.start))

    def _plan_entries(
        self,
        parameter: nn.Parameter,
        stored: Mapping[str, dict[str, hf.Plain]],
        values: Mapping[str, dict[str, Any]],
        present: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return an optimizer's state of a parameter, of which tensors have their values once all is carried out."""
        local_shard, found = self._sharded.local_shards[parameter], {}
        shapes = [shape for _, shape in local_shard.members]
        members = [stored.get(name, {}) | values.get(name, {}) for name in local_shard.names]
        if any(member.keys() != members[0].keys() for member in members[1:]):
            raise CheckpointError(optimizer_state.flattened_apart(local_shard, "kinds of state"))
        for key in members[0]:
            entries = [member[key] for member in members]
            if all(
                isinstance(e, hf.Plain) and e.shape == shape != () for e, shape in zip(entries, shapes, strict=True)
            ):
                tensors = dict(zip(local_shard.names, entries, strict=True))
                found[key] = self._plan_state(parameter, local_shard, tensors, present.get(key))
            elif len(entries) == 1:
                found[key] = self._plan_whole(entries[0]) if isinstance(entries[0], hf.Plain) else entries[0]
            else:
                first, *others = [e.read_whole() if isinstance(e, hf.Plain) else e for e in entries]
                if any(optimizer_state.differ(first, other) for other in others):
                    raise CheckpointError(optimizer_state.flattened_apart(local_shard, f"values of {key!r}"))
                found[key] = first
        return found

    def _plan_state(
        self, parameter: nn.Parameter, local_shard: LocalShard, tensors: Mapping[str, hf.Stored], present: Any
    ) -> Any:
        """Return a state that lies like a parameter: the present one where that can be filled, or a new one."""
        dtype = functools.reduce(torch.promote_types, (stored.dtype for stored in tensors.values()))
        memory = self._sharded.host_memory(parameter, present) if getattr(present, "dtype", None) == dtype else None
        is_new = memory is None
        if is_new and self._sharded.host_memory(parameter, parameter) is not None:  # so a new state is, too
            numel = sum(piece.numel for piece in local_shard.slices)
            present = self._sharded.place(parameter, torch.empty(numel, dtype=dtype))
            memory = self._sharded.host_memory(parameter, present)
        if memory is None:
            return _Unplaced(parameter, local_shard, tensors, dtype)
        self._plan_read(memory, local_shard, tensors, is_new=is_new)
        return present

    def _plan_whole(self, stored: hf.Plain) -> torch.Tensor:
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        self.folder.plan_read(as_bytes(whole), stored.name, stored.slot)
        return whole

    @functools.cached_property
    def _state_tensors(self) -> dict[str, torch.Tensor]:
        return {name: hf.Plain(self.folder, name, slot).read_whole() for name, slot in self.folder.state.items()}

    def set_random_state(self) -> None:
        """Put this process's random states where they were. Comes last, as whatever is run moves XLA's seed."""
        job, saved = self._sharded.engine.job, self._random_states
        if not saved:
            return
        if len(saved) != job.num_processes:
            _log.info(
                "saved by %d processes and loaded by %d: random numbers, such as dropout's, are not those of a run "
                "without the interruption; the order of the data is",
                len(saved),
                job.num_processes,
            )
        if job.rank >= len(saved):
            return
        own = saved[job.rank]  # rank 0's decides on the order of the epochs to come
        self._sharded.engine.set_random_state(own)
        random.setstate(own["python"])
        np.random.set_state(own["numpy"])


def _chain(*runs: Iterator[Any]) -> Iterator[Any]:
    for each in runs:
        yield from each
