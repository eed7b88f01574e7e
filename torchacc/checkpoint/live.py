"""Save a model that is being trained to a checkpoint, and load one into it, at any number of devices, in any engine."""

import json
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from torchacc.checkpoint import hub, optimizer_state, plain, state
from torchacc.checkpoint.folder import Folder, FolderWriter
from torchacc.checkpoint.tensor_files import Layout, Slot, plan_safetensors, safetensors_index
from torchacc.engines.base import ShardedModel, sharded_model
from torchacc.errors import CheckpointError
from torchacc.layout import Holding
from torchacc.logging import get_logger

_log = get_logger(__name__)

_BATCH_BYTES = 64 << 20
"""About how much is on the host at once while a checkpoint is written from devices."""
MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in one file at most, unless told otherwise."""
_MIN_SHARD_SIZE = 64_000_000
"""Bytes for which a file of its own is worth while, so that processes need not wait for each other to write."""
_MAX_WRITERS = 16
"""For how many processes there are files of their own, lest a folder have hundreds."""
_STAGING_BYTES = 64 << 20

_ALIGNMENT = 16

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Run = tuple[Slot, int, torch.Tensor]
"""Where elements go, which of the tensor's is the first, and the elements."""


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
    began = time.monotonic()
    engine = sharded_model(model).engine
    drawn = engine.random_state()
    pending = snapshot(
        path,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra=extra,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        copied=False,
    )
    # Also so that no rank goes on, and moves the folder, before all have seen that it is complete.
    engine.group.agreed(pending.write)
    engine.set_random_state(drawn)
    _log.info("saved %s in %.1f s (%s bytes)", path, time.monotonic() - began, f"{pending.nbytes:,}")


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

    Args:
        path: As all others: see `save()`.
        model: ″
        optimizer: ″
        scheduler: ″
        loader: ″
        extra: ″
        tokenizer: ″
        max_shard_size: ″
        copied: Whether the tensors are copied now, and may change before `write()` is called.

    Raises:
        CheckpointError: It cannot be written there; on every process.
    """
    sharded = sharded_model(model)
    group, job = sharded.engine.group, sharded.engine.job
    group.agreed(sharded.check_usable)
    sharded.engine.sync()
    # Comes first, and is put back in the end: to fetch tensors moves XLA's seed, and saving is to change no number.
    drawn = _random_state(sharded)
    contents = _Contents(sharded, optimizer)
    layouts = contents.lay_out(max_shard_size)
    met = group.all_gather_objects((secrets.token_hex(4), drawn))
    writer = FolderWriter(Path(path).resolve(), met[0][0], job.rank, job.num_processes)

    def prepare() -> _Other:
        if job.rank:
            return _Other()
        other = _other_state(sharded, [draws for _, draws in met], optimizer, scheduler, loader, extra)
        other.files |= {**indices(layouts), **_pretrained_files(sharded, tokenizer)}
        files = {**layouts, **other.lay_out()}
        writer.prepare({name: (layout.header, layout.nbytes) for name, layout in files.items()})
        return other

    other = group.agreed(prepare)
    group.agreed(writer.join)
    slots = {name: slot for layout in layouts.values() for name, slot in layout.slots.items()}
    others = {name: slot for layout in other.lay_out().values() for name, slot in layout.slots.items()}
    runs = _chain(contents.runs(slots), ((others[name], 0, tensor) for name, tensor in other.tensors.items()))
    staging = _spare.pop(sharded, None) or Staging()
    pending = Pending(
        writer,
        staging.copies(runs) if copied else runs,
        other.files,
        nbytes=sum(layout.nbytes for layout in layouts.values()),
        done=lambda: _spare.__setitem__(sharded, staging),
    )
    sharded.engine.set_random_state(drawn)
    return pending


class Staging:
    """Host memory that holds copies of tensors while they are written, and is used again for the next ones."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def copies(self, runs: Iterable[Run]) -> Iterator[Run]:
        """Copy all runs now, and return an iterator over the copies."""
        blocks, position = iter([*self._blocks]), 0
        block = next(blocks, None)
        copied: list[Run] = []
        for slot, start, data in runs:
            needed = -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
            while block is None or position + needed > len(block):
                block, position = next(blocks, None), 0
                if block is None:
                    block = torch.empty(max(needed, _STAGING_BYTES), dtype=torch.uint8)
                    self._blocks.append(block)
            view = block[position : position + data.nbytes].view(data.dtype).view(data.shape)
            copied.append((slot, start, view.copy_(data)))
            position += needed
        return iter(copied)


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
    done: Callable[[], None] = lambda: None
    """Called when the tensors are no longer needed."""

    def write(self) -> None:
        """Write this process's part, and return when the checkpoint is complete.

        Every process calls it, from any thread, and once: they meet through the file system.

        Raises:
            CheckpointError: Any process has failed to write its part.
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
            self.done()


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
        CheckpointError: The checkpoint is torn or altered, or does not fit; on every process. A model that was partly
            loaded refuses to run until another load succeeds.
    """
    sharded = sharded_model(model)
    group = sharded.engine.group
    sharded.engine.sync()
    with group.agreed(lambda: _open(sharded, path, optimizer, scheduler, loader)) as reader:
        sharded.unusable = f"loading {path} has failed, and left it with weights of both; load another checkpoint"

        def read() -> Any:
            if sharded.engine.job.rank == 0:
                reader.folder.verify_headers()
            reader.load_model()
            if optimizer is not None:
                reader.load_optimizer(optimizer)
            return reader.load_other(scheduler, loader)

        extra = group.agreed(read)
        sharded.engine.sync()
        sharded.unusable = None
        reader.set_random_state()
    return extra


def verify(path: str | PathLike[str]) -> None:
    """Read all of a torchacc checkpoint and compare it with its checksums. Any process, by itself.

    Raises:
        CheckpointError: It is torn or altered; the message names the file and the tensor.
    """
    with Folder(path) as folder:
        folder.verify()


class _Contents:
    """The tensors of a checkpoint, and who writes what of them."""

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer | None) -> None:
        self._sharded = sharded
        self._has_optimizer = optimizer is not None
        self._sources: list[tuple[torch.Tensor, Holding, str]] = []
        """Tensors that lie like a parameter: the parameter's holding, and what is added to the names."""
        self._whole: dict[str, torch.Tensor] = state.buffers(sharded)
        """What every process has."""
        self.model: Tensors = {}
        self.optimizer: Tensors = {}
        for parameter, holding in sharded.holdings.items():
            self._add(self.model, parameter, holding, "")
        self.model = {name: self.model[name] for name in sharded.parameter_names}
        self.model |= {name: (value.dtype, tuple(value.shape)) for name, value in self._whole.items()}
        for group in optimizer.param_groups if optimizer is not None else ():
            for parameter in group["params"]:
                self._add_states(parameter, optimizer.state.get(parameter, {}) if optimizer is not None else {})

    def _add(self, tensors: Tensors, source: torch.Tensor, holding: Holding, suffix: str) -> None:
        self._sources.append((source, holding, suffix))
        tensors.update({name + suffix: (source.dtype, shape) for name, shape in holding.members})

    def _add_states(self, parameter: nn.Parameter, entries: Mapping[str, Any]) -> None:
        holding = state.holding_of(self._sharded, parameter)
        for key, value in entries.items():
            if optimizer_state.is_laid_out_like(parameter, value):
                self._add(self.optimizer, value, holding, f"/{key}")
            elif isinstance(value, torch.Tensor):
                if value.dim() and self._sharded.num_shards > 1:
                    raise CheckpointError(
                        f"the optimizer's {key!r} of {holding.key!r} has the shape {tuple(value.shape)}, which is not "
                        "the parameter's, and lies sharded in a way of its own: use config.dist.fsdp.use_spmd = True"
                    )
                for name in holding.names:
                    self._whole[f"{name}/{key}"] = state.to_host(self._sharded, value)
                    self.optimizer[f"{name}/{key}"] = (value.dtype, tuple(value.shape))

    def lay_out(self, max_shard_size: int | None) -> dict[str, Layout]:
        """Return the files of the model, and of the optimizer where there is one."""
        parts = {"model": self.model, "optimizer": self.optimizer} if self._has_optimizer else {"model": self.model}
        num_writers = self._sharded.num_shards * self._sharded.replica[1]
        layouts: dict[str, Layout] = {}
        for stem, tensors in parts.items():
            nbytes = sum(dtype.itemsize * prod(shape) for dtype, shape in tensors.values())
            size = max(_MIN_SHARD_SIZE, -(-nbytes // min(num_writers, _MAX_WRITERS)))
            layouts |= plan_safetensors(tensors, stem, max_shard_size or min(size, MAX_SHARD_SIZE))
        return layouts

    def runs(self, slots: Mapping[str, Slot]) -> Iterator[Run]:
        """Yield what this process writes: where, from which element on, and the elements.

        Each process begins with another file: those that write into one file wait for each other.
        """
        files = list(dict.fromkeys(slot.path for slot in slots.values()))
        order = {path: index for index, path in enumerate(files)}
        job = self._sharded.engine.job
        first = len(files) * job.rank // job.num_processes

        def turn(source: tuple[torch.Tensor, Holding, str]) -> int:
            return (order[slots[source[1].names[0] + source[2]].path] - first) % len(files)

        for batch in self._batches(sorted(self._sources, key=turn)):
            local = self._sharded.fetch([source for source, _, _ in batch])
            for (_, holding, suffix), data in zip(batch, local, strict=True):
                for piece in holding.pieces:
                    own = piece.part(*self._sharded.replica)
                    yield slots[own.name + suffix], own.start, data[own.offset : own.offset + own.numel]
        if self._sharded.engine.job.rank == 0:
            for name, value in self._whole.items():
                yield slots[name], 0, value

    @staticmethod
    def _batches(
        sources: Iterable[tuple[torch.Tensor, Holding, str]],
    ) -> Iterator[list[tuple[torch.Tensor, Holding, str]]]:
        batch: list[tuple[torch.Tensor, Holding, str]] = []
        filled = 0
        for source in sources:
            batch.append(source)
            filled += source[1].shard_numel * source[0].element_size()
            if filled >= _BATCH_BYTES:
                yield batch
                batch, filled = [], 0
        if batch:
            yield batch


@dataclass
class _Other:
    """What is neither the model's nor an optimizer's tensor."""

    files: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def lay_out(self) -> dict[str, Layout]:
        """Return the file of the tensors."""
        described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return plan_safetensors(described, "state") if described else {}


def _other_state(
    sharded: ShardedModel,
    draws: list[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    loader: Any,
    extra: Any,
) -> _Other:
    """Collect the states that are small, on rank 0."""
    described = {
        "model": sharded.plan.units[-1].module_class,
        "engine": sharded.engine.kind,
        "mesh": sharded.plan.topology.describe(),
        "tied": {alias: planned.name for planned in sharded.plan.parameters for alias in planned.aliases},
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "loader": loader.state_dict() if loader is not None else None,
        "random": draws,
        "extra": extra,
    }
    other = _Other()
    files = {"state.json": plain.encode(described, other.tensors, "state")}
    if optimizer is not None:
        files["optimizer.json"] = plain.encode(_described(sharded, optimizer), other.tensors, "optimizer")
    other.files |= {name: (json.dumps(value) + "\n").encode() for name, value in files.items()}
    return other


def _described(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer has beside tensors: its groups, and values of its parameters."""
    values: dict[str, dict[str, Any]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        plain_values = {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)}
        if plain_values:
            values |= dict.fromkeys(state.holding_of(sharded, parameter).names, plain_values)
    groups = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "parameters": names}
        for group, names in zip(
            optimizer.param_groups, optimizer_state.optimizer_names(sharded, optimizer), strict=True
        )
    ]
    return {"class": type(optimizer).__name__, "groups": groups, "values": values}


def _random_state(sharded: ShardedModel) -> dict[str, Any]:
    return {**sharded.engine.random_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def indices(layouts: Mapping[str, Layout]) -> dict[str, bytes]:
    """Return the indices of what lies in several files."""
    found = {}
    for stem in ("model", "optimizer"):
        of_stem = {name: layout for name, layout in layouts.items() if name.startswith(f"{stem}-")}
        if of_stem:
            found[f"{stem}.safetensors.index.json"] = safetensors_index(of_stem).encode()
    return found


def _pretrained_files(sharded: ShardedModel, tokenizer: Any) -> dict[str, bytes]:
    """Return what `save_pretrained()` of a model's config, and of a tokenizer, writes."""
    model = sharded.model
    config: Any = getattr(model, "config", None)
    with tempfile.TemporaryDirectory() as folder:
        for part in (config, getattr(model, "generation_config", None), tokenizer):
            if part is not None and hasattr(part, "save_pretrained"):
                # A checkpoint has no folders inside; so chat templates go into the tokenizer's own file.
                part.save_pretrained(folder, **({"save_jinja_files": False} if part is tokenizer else {}))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    reason = hub.why_not_opened(sharded) if "config.json" in files else None
    if reason is not None:
        del files["config.json"]
        _log.warning(
            "the checkpoint gets no config.json, so that from_pretrained() refuses it: %s. torchacc loads it", reason
        )
    if "config.json" in files:
        described = json.loads(files["config.json"])
        described |= {"architectures": [sharded.plan.units[-1].module_class], "dtype": "float32"}
        files["config.json"] = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    return files


def _open(sharded: ShardedModel, path: Any, optimizer: Any, scheduler: Any, loader: Any) -> "_Reader":
    folder = Folder(path)
    needed = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    files = {"optimizer": "optimizer.json", "scheduler": "state.json", "loader": "state.json"}
    absent = [name for name, wanted in needed.items() if wanted is not None and not folder.has(files[name])]
    if absent:
        raise CheckpointError(f"{folder.path} holds no state of the {' and the '.join(absent)}: load the model alone")
    described = folder.read_json("state.json") if folder.has("state.json") else {}
    unsaved = [name for name in ("scheduler", "loader") if needed[name] is not None and described.get(name) is None]
    if unsaved:
        raise CheckpointError(f"{folder.path} was saved without a {' and a '.join(unsaved)}: load it without")
    saved_class = folder.read_json("optimizer.json").get("class") if optimizer is not None else None
    if saved_class not in (None, type(optimizer).__name__):  # None: imported, where it is not known
        raise CheckpointError(
            f"{folder.path} was saved with {saved_class}, and this optimizer is {type(optimizer).__name__}: load the "
            "model alone, or make the optimizer that it was saved with"
        )
    return _Reader(sharded, folder)


class _Reader:
    """Loads from one folder what one process holds."""

    def __init__(self, sharded: ShardedModel, folder: Folder) -> None:
        self.folder = folder
        self._sharded = sharded
        self._tensors = hub.find(sharded, folder)
        self._random_states: list[dict[str, Any]] = []

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *error: Any) -> None:
        self.folder.__exit__(*error)

    def load_model(self) -> None:
        """Load parameters and persistent buffers."""
        with torch.no_grad():
            for parameter, holding in self._sharded.holdings.items():
                self._sharded.assign(parameter, self._read(holding, self._tensors).to(parameter.dtype))
            for name, buffer in state.buffer_slots(self._sharded.model):
                if name in self._tensors:
                    buffer.copy_(self._tensors[name].read().view(buffer.shape).to(buffer.dtype))

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load an optimizer's groups and state."""
        described = plain.decode(self.folder.read_json("optimizer.json"), self._state_tensors())
        groups = optimizer_state.match_groups(
            self._sharded, optimizer, [group["parameters"] for group in described["groups"]]
        )
        keys: dict[str, list[str]] = {}
        for stored in self.folder.optimizer:
            name, _, key = stored.rpartition("/")
            keys.setdefault(name, []).append(key)
        entries: dict[int, dict[str, Any]] = {}
        saved_groups, next_id = [], 0
        for group, saved in zip(groups, described["groups"], strict=True):
            ids = []
            for parameter in group:
                holding = self._sharded.holdings[parameter]
                found = self._entries(parameter, holding, keys, described["values"])
                if found:
                    entries[next_id] = found
                ids.append(next_id)
                next_id += 1
            saved_groups.append({**{k: v for k, v in saved.items() if k != "parameters"}, "params": ids})
        optimizer.load_state_dict(optimizer_state.LocalState({"state": entries, "param_groups": saved_groups}))

    def load_other(self, scheduler: Any, loader: Any) -> Any:
        """Load the scheduler and the loader's position; return `extra`."""
        if not self.folder.has("state.json"):
            return None
        described = plain.decode(self.folder.read_json("state.json"), self._state_tensors())
        for part, name in ((scheduler, "scheduler"), (loader, "loader")):
            if part is not None:
                part.load_state_dict(described[name])
        self._random_states = described["random"]
        return described["extra"]

    def _read(self, holding: Holding, tensors: Mapping[str, hub.Stored]) -> torch.Tensor:
        """Return what this process holds of tensors, flat."""
        parts = [tensors[piece.name].read(piece.start, piece.stop) for piece in holding.pieces]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=tensors[holding.names[0]].dtype)

    def _entries(
        self,
        parameter: nn.Parameter,
        holding: Holding,
        keys: Mapping[str, list[str]],
        values: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        by_member = [[*keys.get(name, ()), *values.get(name, ())] for name in holding.names]
        if any(set(other) != set(by_member[0]) for other in by_member):
            raise CheckpointError(optimizer_state.flattened_apart(holding, "kinds of state"))
        for key in by_member[0]:
            slots = {name: self.folder.optimizer.get(f"{name}/{key}") for name in holding.names}
            present = {name: slot for name, slot in slots.items() if slot is not None}
            if present and all(
                present[name].shape == shape and shape for name, shape in holding.members if name in present
            ):
                tensors = {n: hub.Plain(self.folder, f"{n}/{key}", slot) for n, slot in present.items()}
                found[key] = self._sharded.place(parameter, self._read(holding, tensors))
                continue
            alike = [self._whole(f"{n}/{key}", s) if s is not None else values[n][key] for n, s in slots.items()]
            if any(optimizer_state.differ(alike[0], other) for other in alike):
                raise CheckpointError(optimizer_state.flattened_apart(holding, f"values of {key!r}"))
            found[key] = alike[0]
        return found

    def _whole(self, name: str, slot: Slot) -> torch.Tensor:
        return self.folder.read(name, slot).view(slot.shape)

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._whole(name, slot) for name, slot in self.folder.state.items()}

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
