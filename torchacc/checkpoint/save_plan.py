"""What is in a checkpoint of a live model: its tensors and files, where they go, and which process writes what."""

import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchacc.checkpoint import hf, model_state, optimizer_state
from torchacc.checkpoint.format import json_codec
from torchacc.checkpoint.format.safetensors_files import Layout, Slot, plan_safetensors, safetensors_index
from torchacc.checkpoint.staging import Run
from torchacc.engines.base import ShardedModel
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger
from torchacc.parallel.sharding import LocalShard

_log = get_logger(__name__)

_BATCH_BYTES = 64 << 20
"""About how much is on the host at once while a checkpoint is written from devices."""
MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in one file at most, unless told otherwise."""
_MIN_SHARD_SIZE = 64_000_000
"""Bytes for which a file of its own is worth while, so that processes need not wait for each other to write."""
_MAX_WRITERS = 16
"""For how many processes there are files of their own, lest a folder have hundreds."""

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape, by name."""


class Contents:
    """The tensors of a checkpoint, and who writes what of them."""

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer | None) -> None:
        self._sharded = sharded
        self._has_optimizer = optimizer is not None
        self._sources: list[tuple[torch.Tensor, LocalShard, str]] = []
        """Tensors that lie like a parameter: the parameter's shard, and what is added to the names."""
        self._whole: dict[str, torch.Tensor] = model_state.buffers(sharded)
        """What every process has."""
        self.model: Tensors = {}
        self.optimizer: Tensors = {}
        for parameter, local_shard in sharded.local_shards.items():
            self._add(self.model, parameter, local_shard, "")
        self.model = {name: self.model[name] for name in sharded.parameter_names}
        self.model |= {name: (value.dtype, tuple(value.shape)) for name, value in self._whole.items()}
        for group in optimizer.param_groups if optimizer is not None else ():
            for parameter in group["params"]:
                self._add_states(parameter, optimizer.state.get(parameter, {}) if optimizer is not None else {})

    def _add(self, tensors: Tensors, source: torch.Tensor, local_shard: LocalShard, suffix: str) -> None:
        self._sources.append((source, local_shard, suffix))
        tensors.update({name + suffix: (source.dtype, shape) for name, shape in local_shard.members})

    def _add_states(self, parameter: nn.Parameter, entries: Mapping[str, Any]) -> None:
        local_shard = model_state.local_shard_of(self._sharded, parameter)
        for key, value in entries.items():
            if optimizer_state.is_laid_out_like(parameter, value):
                self._add(self.optimizer, value, local_shard, f"/{key}")
            elif isinstance(value, torch.Tensor):
                is_split = self._sharded.num_shards > 1 and not optimizer_state.is_whole(parameter, value)
                if value.dim() and is_split:
                    raise CheckpointError(
                        f"the optimizer's {key!r} of {local_shard.key!r} has the shape {tuple(value.shape)}, which is "
                        "not the parameter's, and lies sharded in a way of its own: use "
                        "config.dist.fsdp.use_spmd = True"
                    )
                for name in local_shard.names:
                    self._whole[f"{name}/{key}"] = model_state.to_host(self._sharded, value)
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

        def turn(source: tuple[torch.Tensor, LocalShard, str]) -> int:
            return (order[slots[source[1].names[0] + source[2]].path] - first) % len(files)

        for batch in self._batches(sorted(self._sources, key=turn)):
            local = self._sharded.fetch([source for source, _, _ in batch])
            for (_, local_shard, suffix), data in zip(batch, local, strict=True):
                for piece in local_shard.slices:
                    own = piece.part(*self._sharded.replica_of(local_shard))
                    yield slots[own.name + suffix], own.start, data[own.offset : own.offset + own.numel]
        if self._sharded.engine.job.rank == 0:
            for name, value in self._whole.items():
                yield slots[name], 0, value

    def sharded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are written as they lie in the model and in the optimizer, with the first name."""
        for source, local_shard, suffix in self._sources:
            yield local_shard.names[0] + suffix, source

    @staticmethod
    def _batches(
        sources: Iterable[tuple[torch.Tensor, LocalShard, str]],
    ) -> Iterator[list[tuple[torch.Tensor, LocalShard, str]]]:
        batch: list[tuple[torch.Tensor, LocalShard, str]] = []
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
class Other:
    """What is neither the model's nor an optimizer's tensor."""

    files: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def lay_out(self) -> dict[str, Layout]:
        """Return the file of the tensors."""
        described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return plan_safetensors(described, "state") if described else {}


def other_state(
    sharded: ShardedModel,
    draws: list[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    loader: Any,
    extra: Any,
) -> Other:
    """Collect the states that are small, on rank 0."""
    described = {
        "model": sharded.plan.units[-1].module_class,
        "engine": sharded.engine.kind,
        "mesh": sharded.plan.mesh.describe(),
        "tied": {alias: planned.name for planned in sharded.plan.parameters for alias in planned.aliases},
        "modules": {name: module.get_extra_state() for name, module in model_state.extra_states(sharded.model).items()},
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scheduler_class": type(scheduler).__name__,
        "loader": loader.state_dict() if loader is not None else None,
        "random": draws,
        "extra": extra,
    }
    other = Other()
    files = {"state.json": json_codec.encode(described, other.tensors, "state")}
    if optimizer is not None:
        files["optimizer.json"] = json_codec.encode(_described(sharded, optimizer), other.tensors, "optimizer")
    other.files |= {name: (json.dumps(value) + "\n").encode() for name, value in files.items()}
    return other


def _described(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer has beside tensors: its groups, and values of its parameters."""
    values: dict[str, dict[str, Any]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        plain_values = {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)}
        if plain_values:
            values |= dict.fromkeys(model_state.local_shard_of(sharded, parameter).names, plain_values)
    groups = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "parameters": names}
        for group, names in zip(
            optimizer.param_groups, optimizer_state.optimizer_names(sharded, optimizer), strict=True
        )
    ]
    return {"class": type(optimizer).__name__, "groups": groups, "values": values}


def random_state(sharded: ShardedModel) -> dict[str, Any]:
    """Return the states of all of this process's generators of random numbers."""
    return {**sharded.engine.random_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def indices(layouts: Mapping[str, Layout]) -> dict[str, bytes]:
    """Return the indices of what lies in several files."""
    found = {}
    for stem in ("model", "optimizer"):
        of_stem = {name: layout for name, layout in layouts.items() if name.startswith(f"{stem}-")}
        if of_stem:
            found[f"{stem}.safetensors.index.json"] = safetensors_index(of_stem).encode()
    return found


def pretrained_files(sharded: ShardedModel, tokenizer: Any) -> dict[str, bytes]:
    """Return what `save_pretrained()` of a model's config, and of a tokenizer, writes."""
    model = sharded.model
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), tokenizer]
    parts = [part for part in parts if hasattr(part, "save_pretrained")]
    if not parts:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            # A checkpoint has no folders inside; so chat templates go into the tokenizer's own file.
            part.save_pretrained(folder, **({"save_jinja_files": False} if part is tokenizer else {}))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    reason = hf.why_not_opened(sharded) if "config.json" in files else None
    if reason is not None:
        del files["config.json"]
        _log.warning(
            "the checkpoint gets no config.json, so that from_pretrained() refuses it: %s. torchacc loads it", reason
        )
    if "config.json" in files:
        described = json.loads(files["config.json"])
        described |= {"architectures": [sharded.plan.units[-1].module_class], "dtype": sharded.plan.master_dtype}
        files["config.json"] = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    return files
