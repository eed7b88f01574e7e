"""The state of a sharded model in memory: unsharded, in shards, or as this process keeps it; loaded from each of these.

Tensors are gathered one at a time, so that a full state costs one copy on the processes that asked for it.
"""

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchacc.engines.patches import module_states
from torchacc.engines.sharded_model import HANDLE, ShardedModel
from torchacc.errors import CheckpointError, listed
from torchacc.parallel.sharding import LocalShard, TensorSlice

shards = WeakTensorKeyDictionary()
"""Tensors of states that were handed out -> their model, and the parameter that they lie like."""
_buffers = WeakTensorKeyDictionary()
"""Tensors of states that were handed out and are buffers."""


_EXTRA_STATE = "_extra_state"
"""What PyTorch calls the state that a module keeps of its own, behind the module's name."""


class StateDictType(Enum):
    """The form of a state dict. The names are those of PyTorch's FSDP."""

    FULL_STATE_DICT = "full"
    """Unsharded tensors by original name."""
    SHARDED_STATE_DICT = "sharded"
    """This process's part of each tensor, as a `TensorShard`, by original name."""
    LOCAL_STATE_DICT = "local"
    """The tensors as this process stores them, flattened and padded in some engines, by names of its own."""


@dataclass(frozen=True)
class FullStateDictConfig:
    """Which processes get a full state, and on which device. The names are those of PyTorch's FSDP."""

    offload_to_cpu: bool = True
    """If True, the tensors are on the CPU, otherwise on the engine's device."""
    rank0_only: bool = False
    """If True, only rank 0 gets the tensors, and needs memory for them; others get an empty dict."""


@dataclass(frozen=True)
class TensorShard:
    """One process's part of an unsharded tensor."""

    piece: TensorSlice
    """Which elements of the unsharded tensor they are."""
    data: torch.Tensor
    """The elements, on the host, of shape (piece.numel,)."""


class StateEntry(NamedTuple):
    """One value of a model's or of an optimizer's state, as a process has it."""

    parameter: nn.Parameter
    """The parameter that it is, or is the optimizer's state of."""
    local_shard: LocalShard
    """What this process holds of the parameter."""
    key: str
    """Its name in the optimizer's state; empty for the parameter itself."""
    value: Any
    is_sharded: bool
    """Whether it is a tensor that is sharded as the parameter is."""
    block: int = 1
    """How many elements of the parameter each of its elements is for; from 2 on it is flat, and this process's."""

    @property
    def suffix(self) -> str:
        """What its name in a checkpoint's files has behind the parameter's."""
        return f"/{self.key}" if self.key else ""

    def unsharded(self, sharded: ShardedModel, *, rank0_only: bool) -> dict[str, Any]:
        """Return the full values by the parameters' original names, on the host. Collective: every process.

        Args:
            sharded: The model.
            rank0_only: Whether other processes than rank 0 get an empty dict of what is sharded.
        """
        if self.is_sharded:
            return gathered(sharded, self.local_shard, self.value, rank0_only=rank0_only)
        return {name: self._copy(sharded) for name in self.local_shard.names}

    def shards(self, sharded: ShardedModel) -> dict[str, Any]:
        """Return what this process holds by the parameters' original names, what is sharded as `TensorShard`s."""
        if not self.is_sharded:
            return {name: self._copy(sharded) for name in self.local_shard.names}
        local = sharded.shards.fetch([self.value])[0]
        held = {name: TensorSlice(name, shape, 0, 0) for name, shape in self.local_shard.members}
        held |= {part.name: part for part in self.local_shard.slices}
        return {
            name: TensorShard(part, local[part.offset : part.offset + part.numel].clone())
            for name, part in held.items()
        }

    def _copy(self, sharded: ShardedModel) -> Any:
        return to_host(sharded, self.value) if isinstance(self.value, torch.Tensor) else copy.deepcopy(self.value)


def parameter_entries(sharded: ShardedModel) -> Iterator[StateEntry]:
    """Yield the parameters that optimizers see."""
    sharded.check_parameters()
    for parameter, local_shard in sharded.shards.items():
        yield StateEntry(parameter, local_shard, "", parameter, is_sharded=True)


def full_state_dict(sharded: ShardedModel, *, rank0_only: bool = False, cpu_offload: bool = True) -> dict[str, Any]:
    """Return the unsharded parameters and buffers by original name, tied names included. Collective: every process.

    It is what the `state_dict()` of the unsharded model gives: with its metadata, with what modules keep of their own,
    `get_extra_state()`, and with what hooks make of it.

    Args:
        sharded: The model.
        rank0_only: Whether other processes than rank 0 get an empty dict, and need no memory for it.
        cpu_offload: Whether the tensors are on the CPU, and not on the engine's device.
    """
    sharded.status.check_usable()
    sharded.shards.expect_all("torchacc.full_state_dict()")
    full: dict[str, torch.Tensor] = {}
    for entry in parameter_entries(sharded):
        full |= entry.unsharded(sharded, rank0_only=rank0_only)
    if rank0_only and sharded.engine.job.rank:
        return {}
    for planned in sharded.plan.parameters:
        full |= dict.fromkeys(planned.aliases, full[planned.name])
    full = {name: full[name] for name in sharded.all_names}
    with module_states.saving_full(sharded.model, full):
        found: dict[str, Any] = sharded.model.state_dict()
    own = {id(tensor) for tensor in full.values()}
    for tensor in full.values():
        shards.pop(tensor, None)  # for which `note_shards()` takes what stands under a parameter's name
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            found[name] = moved(sharded, value if id(value) in own else to_host(sharded, value), cpu_offload)
    return found


def sharded_state_dict(sharded: ShardedModel) -> dict[str, Any]:
    """Return what this process holds of each parameter, as a `TensorShard`, and the buffers, by original name."""
    sharded.status.check_usable()
    refuse_split(sharded, "a state in shards")
    found: dict[str, Any] = {}
    for entry in parameter_entries(sharded):
        found |= entry.shards(sharded)
    found |= {name: module.get_extra_state() for name, module in extra_states(sharded.model).items()}
    return {**found, **buffers(sharded)}


def refuse_split(sharded: ShardedModel, what: str) -> None:
    """Refuse a form of a state that has one slice of each tensor for each process, where processes split layers, or the
    list of them.

    Raises:
        CheckpointError: They do.
    """
    if not sharded.shards.coordinates.is_contiguous:
        raise CheckpointError(
            f"{what} is not available in the engine {sharded.engine.name} where config.dist.tp.size splits layers, "
            "config.dist.pp.size the list of them, or one program is for several hosts: a process holds a part of each "
            "row, or of the layers. Use "
            "torchacc.checkpoint.save() and load(), or a full state"
        )


def local_state_dict(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """Return what this process keeps, on the host, by the names of its own `state_dict()`."""
    sharded.status.check_usable()
    refuse_split(sharded, "a local state")
    state = sharded.model.state_dict()
    for name, value in list(state.items()):
        if isinstance(value, torch.Tensor):
            state[name] = to_host(sharded, value)
        else:
            del state[name]
    return state


def note_shards(sharded: ShardedModel, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Remember the shards and buffers in a module's own `state_dict()`; a hook of it."""
    for name, buffer in module._buffers.items():
        if buffer is not None and isinstance(state_dict.get(prefix + name), torch.Tensor):
            _buffers[state_dict[prefix + name]] = True
    for name, parameter in module._parameters.items():
        given = state_dict.get(prefix + name)
        # The parameter itself, as with keep_vars=True, says whose it is; noted, it would keep itself and its model.
        if parameter in sharded.shards and isinstance(given, torch.Tensor) and given is not parameter:
            shards[given] = (sharded, parameter)


def shard_of(tensor: torch.Tensor) -> tuple[ShardedModel, nn.Parameter] | None:
    """Return whose shard a tensor of a model's or an optimizer's own `state_dict()` is, if of any."""
    if isinstance(tensor, nn.Parameter) and (sharded := vars(tensor).get(HANDLE)) is not None:
        return sharded, tensor
    return shards.get(tensor)  # type: ignore[no-any-return]


def is_buffer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a model's own `state_dict()` is a buffer, of which each process has its own."""
    return tensor in _buffers


def to_host(sharded: ShardedModel, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this process keeps of a tensor, in the shape that it has here."""
    if tensor.device.type == "cpu" and not hasattr(tensor, "to_local"):
        return tensor.detach().clone()
    local = sharded.shards.fetch([tensor])[0].clone()
    shape = tensor.to_local().shape if hasattr(tensor, "to_local") else tensor.shape
    return local.view(shape)


def buffers(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """Return the persistent buffers on the host by name."""
    return {name: to_host(sharded, buffer) for name, buffer in named_buffers(sharded.model)}


def load_state_dict(sharded: ShardedModel, *args: Any, **kwargs: Any) -> Any:
    """Load a state into a sharded model as its class does, which ends in `_load_state_dict()` with its arguments."""
    load = functools.partial(_load_state_dict, sharded)
    if not module_states.has_own_loading(sharded.model):
        return load(*args, **kwargs)
    with module_states.loading_through(sharded.model, load):
        return type(sharded.model).load_state_dict(sharded.model, *args, **kwargs)


def _load_state_dict(
    sharded: ShardedModel, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Load a full state, or this process's own, into a sharded model, in place, as its modules' hooks change it.

    Args:
        sharded: The model.
        state_dict: Whole tensors by original name (of a tied parameter one name is enough), or what `state_dict()`,
            `local_state_dict()` or `sharded_state_dict()` gave at this number of devices.
        strict: Whether every name must be there, and none beside them.
        assign: Not available: the shards stay where they are.

    Returns:
        `(missing_keys, unexpected_keys)`, as `torch.nn.Module.load_state_dict()` does.

    Raises:
        CheckpointError: A name is missing or unknown, a shape is another, or two names of one parameter have different
            values. The model is left as it was.
    """
    if assign:
        raise CheckpointError("load_state_dict(assign=True) would replace the model's shards: leave out assign=True")
    if not any(isinstance(value, TensorShard) for value in state_dict.values()):  # else no module has made it
        state_dict, errors = module_states.converted(sharded.model, state_dict, strict)
        if errors:
            raise CheckpointError(f"{type(sharded.model).__name__} cannot load this state: {'; '.join(errors)}")
    given = _sort_by_place(sharded, state_dict)
    keys = nn.modules.module._IncompatibleKeys(given.missing, given.unexpected)
    if strict and (given.missing or given.unexpected):
        module_states.call_post_hooks(sharded.model, keys)  # which may take names off these lists
        if given.missing or given.unexpected:
            raise CheckpointError(_misfit(sharded, given.missing, given.unexpected))
    for buffer, name, value in given.buffers:
        if tuple(value.shape) != tuple(buffer.shape):
            raise CheckpointError(f"{name!r} has the shape {tuple(value.shape)}, the model's is {tuple(buffer.shape)}")
    all_local = are_local([(local_shard, found) for _, local_shard, found in given.parameters])
    new = [(parameter, local_part(sharded, shard, found, all_local)) for parameter, shard, found in given.parameters]
    # All has been checked: from here on the model is changed.
    with torch.no_grad():
        for parameter, shard in new:
            sharded.shards.assign(parameter, shard.to(parameter.dtype))
        for buffer, _, value in given.buffers:
            buffer.copy_(value)
    for module, state in given.extra_states:
        module.set_extra_state(state)
    sharded.engine.sync()
    if not given.missing:
        sharded.status.mark_weights_loaded()
    module_states.call_post_hooks(sharded.model, keys)
    return keys


@dataclass
class _GivenState:
    """What a state dict has for each place in a model."""

    parameters: list[tuple[nn.Parameter, LocalShard, dict[str, Any]]]
    """A parameter, what this process holds of it, and the tensors for it by name."""
    buffers: list[tuple[torch.Tensor, str, torch.Tensor]]
    """A buffer, its name and its new values."""
    extra_states: list[tuple[nn.Module, Any]]
    missing: list[str]
    unexpected: list[str]


def _sort_by_place(sharded: ShardedModel, state_dict: Mapping[str, Any]) -> _GivenState:
    left = dict(state_dict)
    given = _GivenState([], [], [], [], [])
    names_of = {planned.name: planned.names for planned in sharded.plan.parameters}
    for parameter, local_shard in sharded.shards.items():
        found = _take_tensors(left, local_shard, names_of)
        missing = [] if local_shard.key in found else [name for name in local_shard.names if name not in found]
        given.missing += missing
        if not missing:
            given.parameters.append((parameter, local_shard, found))
    own_buffers, modules = dict(named_buffers(sharded.model)), extra_states(sharded.model)
    given.missing += [name for name in (*own_buffers, *modules) if name not in left]
    given.buffers = [(buffer, name, left.pop(name)) for name, buffer in own_buffers.items() if name in left]
    given.extra_states = [(module, left.pop(name)) for name, module in modules.items() if name in left]
    given.unexpected = list(left)
    return given


def _take_tensors(
    left: dict[str, Any], local_shard: LocalShard, names_of: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Take from a state dict what it has of one shard: under its key here, or as full tensors by any of their names."""
    found = {local_shard.key: left.pop(local_shard.key)} if local_shard.key in left else {}
    for name in local_shard.names:
        tied = {other: left.pop(other) for other in names_of[name] if other in left}
        if tied and name not in found:
            found[name] = next(iter(tied.values()))
        _refuse_untied(name, {**tied, **({name: found[name]} if name in found else {})})
    return found


def shard_metadata(sharded: ShardedModel) -> dict[str, Any]:
    """Return what is needed to put the rank files of a model together again: see `docs/design/checkpoints.md`."""
    shard_info: dict[str, Any] = {}
    flatten_info: dict[str, Any] = {}
    for local_shard in sharded.shards.values():
        prefix, _, suffix = local_shard.key.rpartition(".")
        is_flat = local_shard.names != (local_shard.key,)
        size = [local_shard.numel] if is_flat else list(local_shard.members[0][1])
        shard_info.setdefault(prefix, {})[suffix] = {"_orig_size": size, "_orig_name": suffix}
        if is_flat:
            names = [name.removeprefix(f"{prefix}.") if prefix else name for name in local_shard.names]
            shapes = [list(shape) for _, shape in local_shard.members]
            flatten_info[local_shard.key] = [names, shapes, [prod(shape) for shape in shapes]]
    coordinates = sharded.shards.coordinates
    return {
        "shard_info": shard_info,
        "flatten_info": flatten_info,
        "buffer_info": {},
        "world_size": coordinates.processes_per_replica,
        "rank": coordinates.shard_index,
        "replica": coordinates.replica,
        "tied": {alias: planned.name for planned in sharded.plan.parameters for alias in planned.aliases},
        "parameters": list(sharded.parameter_names),
        **({} if coordinates.is_contiguous else {"splits_layers": True}),
    }


def gathered(
    sharded: ShardedModel, local_shard: LocalShard, tensor: torch.Tensor, *, rank0_only: bool
) -> dict[str, torch.Tensor]:
    """Return the full tensors of a shard of a parameter, or of what is sharded like it. Collective: every process.

    Returns:
        Original name -> a host tensor of its own memory; an empty dict on processes that get none.
    """
    local = sharded.shards.fetch([tensor])[0]
    flat = sharded.shards.gather(local_shard, local, rank0_only=rank0_only)
    if flat is None:
        return {}
    if len(local_shard.members) == 1:
        return {name: flat.view(shape) for name, shape in local_shard.members}
    parts = flat.split([prod(shape) for _, shape in local_shard.members])
    return {name: part.clone().view(shape) for (name, shape), part in zip(local_shard.members, parts, strict=True)}


def moved(sharded: ShardedModel, tensor: torch.Tensor, cpu_offload: bool) -> torch.Tensor:
    """Return a host tensor where it is asked for: there, or on the engine's device."""
    return tensor if cpu_offload else tensor.to(sharded.engine.device)


def local_shard_of(sharded: ShardedModel, parameter: nn.Parameter) -> LocalShard:
    """Return what this process holds of an optimizer's parameter.

    Raises:
        CheckpointError: It is not the model's.
    """
    if parameter not in sharded.shards:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of the model's: make "
            "it from the parameters of the model that accelerate() returned"
        )
    return sharded.shards[parameter]


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the tensors of the persistent buffers, in place."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def call_post_hooks(model: nn.Module) -> None:
    """Call what a model's modules want to be called once a state is loaded, of which nothing was missing."""
    module_states.call_post_hooks(model, nn.modules.module._IncompatibleKeys([], []))


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep a state of their own, `get_extra_state()`, by its name in the model's state."""
    return {
        f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE: module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _refuse_untied(name: str, given: Mapping[str, Any]) -> None:
    values = [value for value in given.values() if isinstance(value, torch.Tensor) and not hasattr(value, "to_local")]
    for other in values[1:]:
        if other.data_ptr() != values[0].data_ptr() and not torch.equal(other.cpu(), values[0].cpu()):
            raise CheckpointError(
                f"{' and '.join(map(repr, given))} are one parameter in this model, and have different values here: "
                "the checkpoint was written by a model in which they were not tied. Leave all but one of them out"
            )


def _misfit(sharded: ShardedModel, missing: list[str], unexpected: list[str]) -> str:
    parts = [f"{type(sharded.model).__name__} cannot load this state:"]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            parts.append(f"{len(names)} {what}: {listed(names)};")
    return " ".join(parts) + " pass strict=False to load what fits"


def are_local(states: Sequence[tuple[LocalShard, Mapping[str, Any]]]) -> bool:
    """Return whether a state's tensors are this process's own: all of them are, or none is.

    A single tensor cannot tell: a full one of half the rows, of another model, looks like one of two shards.
    """
    for local_shard, found in states:
        for name, value in found.items():
            if hasattr(value, "to_local") or (name == local_shard.key and local_shard.key not in local_shard.names):
                return True
            shape = dict(local_shard.members).get(name)
            is_whole = isinstance(value, TensorShard) or tuple(value.shape) == shape
            if is_whole and shape is not None and prod(shape) != local_shard.shard_numel:
                return False
    return True


def local_part(
    sharded: ShardedModel, local_shard: LocalShard, found: Mapping[str, Any], is_local: bool
) -> torch.Tensor:
    """Return what this process is to hold, from full tensors, from shards, or from its own local tensor."""
    shapes = dict(local_shard.members)
    if (
        is_local
        and local_shard.key in found
        and (local := _as_local(sharded, local_shard, found[local_shard.key])) is not None
    ):
        return local[: sum(part.numel for part in local_shard.slices)]
    for name, value in found.items():  # also of what this process has nothing of, so that all of them raise
        given = value.piece.shape if isinstance(value, TensorShard) else tuple(value.shape)
        if given != shapes.get(name):
            raise CheckpointError(
                f"{name!r} has the shape {given}, the model's is {shapes.get(name)}, of which each of "
                f"{sharded.shards.coordinates.processes_per_replica} processes keeps {local_shard.shard_numel} elements"
            )
    parts = [_elements_of(found[part.name], part) for part in local_shard.slices]
    return torch.cat(parts) if parts else torch.empty(0)


def _elements_of(value: Any, part: TensorSlice) -> torch.Tensor:
    if not isinstance(value, TensorShard):
        return value.detach().cpu().reshape(-1)[part.start : part.stop]  # type: ignore[no-any-return]
    if (value.piece.start, value.piece.stop) != (part.start, part.stop):
        raise CheckpointError(
            f"{part.name!r}: this process keeps the elements {part.start} to {part.stop}, and the shard is of "
            f"{value.piece.start} to {value.piece.stop}: it was taken at another number of devices"
        )
    return value.data


def _as_local(sharded: ShardedModel, local_shard: LocalShard, value: Any) -> torch.Tensor | None:
    """Return the process's own tensor flat, or None where a value is none, by its shape."""
    if isinstance(value, TensorShard):
        return None
    if hasattr(value, "to_local"):
        return sharded.shards.fetch([value])[0]
    return value.detach().cpu().reshape(-1) if tuple(value.shape) in _local_shapes(local_shard) else None


def _local_shapes(local_shard: LocalShard) -> set[tuple[int, ...]]:
    """Return the shapes that a shard may have: with its padding, or without."""
    held = {local_shard.shard_numel, sum(part.numel for part in local_shard.slices)}
    if local_shard.names != (local_shard.key,):
        return {(numel,) for numel in held}
    row = local_shard.members[0][1][1:]
    return {(numel // max(prod(row), 1), *row) for numel in held}
