"""Plan a save: which tensors lie where in which file, and which process writes which slice of them. Moves no data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from torchacc.checkpoint import model_state, optimizer_state
from torchacc.checkpoint.model_state import StateEntry
from torchacc.checkpoint.own_format.safetensors_files import (
    FileRegion,
    SafetensorsLayout,
    plan_safetensors,
    safetensors_index,
)
from torchacc.engines.optimizers import is_of_torchao
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import CheckpointError
from torchacc.parallel.sharding import TensorSlice

_BATCH_BYTES = 64 << 20
"""About how much is on the host at once while a checkpoint is written from devices."""
MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in one file at most, unless the caller asks for another size."""
_MIN_SHARD_SIZE = 64_000_000
"""Bytes for which a file of its own is worth while, so that processes need not wait for each other to write."""
_MAX_WRITERS = 16
"""For how many processes there are files of their own: a folder is not to have hundreds."""

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape, by name."""


class TensorWrite(NamedTuple):
    """Consecutive elements of a tensor that one process writes."""

    region: FileRegion
    """Where the full tensor lies."""
    start: int
    """The first of the elements, counted in the flattened full tensor."""
    data: torch.Tensor
    """The elements, on the host, flat."""
    is_live: bool = False
    """Whether they are the memory that training goes on to write, and not a copy."""


class ShardWrites(NamedTuple):
    """What one process writes of a tensor that is sharded like a parameter."""

    source: torch.Tensor
    nbytes: int
    """Bytes that fetching it takes on the host."""
    slices: list[tuple[FileRegion, TensorSlice]]
    """Where each slice's full tensor lies, and the slice."""


@dataclass(frozen=True)
class SavePlan:
    """What is to be written of a model and of its optimizer."""

    files: dict[str, SafetensorsLayout]
    """The files of tensors by name, the same on every process."""
    shards: list[ShardWrites]
    """This process's, in the order in which it writes them."""
    unsharded: list[TensorWrite]
    """Tensors that every process has: rank 0 writes them."""
    values: dict[str, dict[str, Any]]
    """What the optimizer's state has that are not tensors, by the parameter's name and the state's."""

    @property
    def nbytes(self) -> int:
        """Bytes of the files, on all processes."""
        return sum(layout.nbytes for layout in self.files.values())

    def writes(self, sharded: ShardedModel) -> Iterator[TensorWrite]:
        """Yield what this process writes, fetched to the host in batches."""
        for batch in self._batches():
            fetched = sharded.shards.fetch([shard.source for shard in batch])
            for shard, local in zip(batch, fetched, strict=True):
                is_live = shard.source.device.type == "cpu"
                for region, part in shard.slices:
                    yield TensorWrite(region, part.start, local[part.offset : part.offset + part.numel], is_live)
        yield from self.unsharded

    def _batches(self) -> Iterator[list[ShardWrites]]:
        batch: list[ShardWrites] = []
        filled = 0
        for shard in self.shards:
            batch.append(shard)
            filled += shard.nbytes
            if filled >= _BATCH_BYTES:
                yield batch
                batch, filled = [], 0
        if batch:
            yield batch


def plan_save(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer | None, max_shard_size: int | None = None
) -> SavePlan:
    """Plan to save a model and its optimizer. Every process comes to the same files.

    Args:
        sharded: The model.
        optimizer: Its optimizer, if that is to be saved.
        max_shard_size: Bytes of tensors in one file; None for what lets the processes write without waiting for each
            other.

    Raises:
        CheckpointError: A state of the optimizer lies on the devices in a way of its own.
    """
    parameters = list(model_state.parameter_entries(sharded))
    buffers = model_state.buffers(sharded)
    states: list[StateEntry] = []
    values: dict[str, dict[str, Any]] = {}
    entries = optimizer_state.state_entries(sharded, optimizer, takes_apart=True) if optimizer is not None else ()
    for entry in entries:
        if isinstance(entry.value, torch.Tensor):
            _check_lies_like_parameter(sharded, entry)
            states.append(entry)
        else:
            for name in entry.local_shard.names:
                values.setdefault(name, {})[entry.key] = entry.value
    if optimizer is not None and is_of_torchao(optimizer):
        _check_quantized_alike(sharded, states)
    by_name = _described(parameters)
    tensors = {"model": {name: by_name[name] for name in sharded.parameter_names}}
    tensors["model"] |= {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
    if optimizer is not None:
        tensors["optimizer"] = _described(states)
    coordinates = sharded.shards.coordinates
    files = _lay_out(tensors, coordinates.processes_per_replica * coordinates.num_replicas, max_shard_size)
    regions = {name: region for layout in files.values() for name, region in layout.regions.items()}
    replicas = {entry.parameter: sharded.shards.replicas_of(entry.local_shard) for entry in parameters}
    shards = []
    for entry in (entry for entry in parameters + states if entry.is_sharded):
        copies = zip(entry.local_shard.slices, replicas[entry.parameter], strict=True)
        parts = [_in_blocks(part, entry.block).part(*replica) for part, replica in copies]
        own = [(regions[part.name + entry.suffix], part) for part in parts]
        if own:
            nbytes = entry.local_shard.shard_numel // entry.block * own[0][0].dtype.itemsize
            shards.append(ShardWrites(entry.value, nbytes, own))
    unsharded = []
    if sharded.engine.job.rank == 0:
        unsharded = [TensorWrite(regions[name], 0, buffer) for name, buffer in buffers.items()]
        for entry in (entry for entry in states if not entry.is_sharded):
            host = model_state.to_host(sharded, entry.value)
            unsharded += [TensorWrite(regions[name + entry.suffix], 0, host) for name in entry.local_shard.names]
    job = sharded.engine.job
    return SavePlan(files, _in_turn(shards, list(files), job.rank / job.num_processes), unsharded, values)


def index_files(files: Mapping[str, SafetensorsLayout]) -> dict[str, bytes]:
    """Return the indices of what lies in several files."""
    found = {}
    for stem in ("model", "optimizer"):
        of_stem = {name: layout for name, layout in files.items() if name.startswith(f"{stem}-")}
        if of_stem:
            found[f"{stem}.safetensors.index.json"] = safetensors_index(of_stem).encode()
    return found


def _check_lies_like_parameter(sharded: ShardedModel, entry: StateEntry) -> None:
    value = entry.value
    if entry.is_sharded or not sharded.shards.coordinates.is_split:
        return
    if value.dim() and not optimizer_state.is_ordinary(entry.parameter, value):
        raise CheckpointError(
            f"the optimizer's {entry.key!r} of {entry.local_shard.key!r} has the shape {tuple(value.shape)}, which is "
            "not the parameter's, and lies sharded in a way of its own: use config.dist.fsdp.use_spmd = True"
        )


def _check_quantized_alike(sharded: ShardedModel, states: Sequence[StateEntry]) -> None:
    """Check that the shards of all processes are quantized, or none of a parameter. Collective: every process.

    Raises:
        CheckpointError: Some are, as those of others have too few elements, or no whole blocks.
    """
    own = {(entry.local_shard.names[0], entry.key) for entry in states if entry.is_sharded}
    found: list[set[tuple[str, str]]] = sharded.engine.group.all_gather_objects(own)
    differing = own.union(*found) - own.intersection(*found)
    if differing:
        name = min(differing)[0]
        raise CheckpointError(
            f"the optimizer's state of {name!r} is quantized on some processes, and on others not, whose shards are "
            "smaller, or of no whole blocks: save without optimizer=, or choose a number of devices that divides the "
            "rows of the weights"
        )


def _described(entries: Sequence[StateEntry]) -> Tensors:
    """Return the dtypes and shapes of the full tensors of entries."""
    return {
        name + entry.suffix: (entry.value.dtype, _full_shape(entry, shape))
        for entry in entries
        for name, shape in entry.local_shard.members
    }


def _full_shape(entry: StateEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not entry.is_sharded:
        return tuple(entry.value.shape)
    return shape if entry.block == 1 else (prod(shape) // entry.block,)


def _in_blocks(part: TensorSlice, block: int) -> TensorSlice:
    """Return a slice that consists of blocks as that of what has an element for each block."""
    if block == 1:
        return part
    shape = (prod(part.shape) // block,)
    return TensorSlice(part.name, shape, part.start // block, part.stop // block, part.offset // block)


def _lay_out(
    tensors: Mapping[str, Tensors], num_writers: int, max_shard_size: int | None
) -> dict[str, SafetensorsLayout]:
    files: dict[str, SafetensorsLayout] = {}
    for stem, described in tensors.items():
        nbytes = sum(dtype.itemsize * prod(shape) for dtype, shape in described.values())
        size = max(_MIN_SHARD_SIZE, -(-nbytes // min(num_writers, _MAX_WRITERS)))
        files |= plan_safetensors(described, stem, max_shard_size or min(size, MAX_SHARD_SIZE))
    return files


def _in_turn(shards: Sequence[ShardWrites], files: Sequence[str], begin: float) -> list[ShardWrites]:
    """Return writes by file, from another file on for each process: those that write into one file wait for it."""
    order = {name: index for index, name in enumerate(files)}
    first = int(len(files) * begin)
    return sorted(shards, key=lambda shard: (order[shard.slices[0][0].path.name] - first) % len(files))
