"""The state of a sharded model and of its optimizer in memory: whole, by pieces, or as this process keeps it.

Everything goes one tensor at a time, so that a full state costs one copy on the processes that asked for it.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchacc.engines.base import HANDLE, ShardedModel
from torchacc.errors import CheckpointError
from torchacc.layout import Holding, Piece

_shards = WeakTensorKeyDictionary()
"""Tensors of states that were handed out -> their model, and the parameter that they lie like."""
_buffers = WeakTensorKeyDictionary()
"""Tensors of states that were handed out and are buffers."""


class LocalState(dict[str, Any]):
    """An optimizer's state that lies as its parameters do here, and is loaded as it is."""


class StateDictType(Enum):
    """In which form a state is given; the names are those of PyTorch's FSDP."""

    FULL_STATE_DICT = "full"
    """Whole tensors by original name."""
    SHARDED_STATE_DICT = "sharded"
    """What this process holds of each whole tensor, as a `TensorShard`, by original name."""
    LOCAL_STATE_DICT = "local"
    """What this process keeps, by its own names, flattened and padded as it is."""


@dataclass(frozen=True)
class FullStateDictConfig:
    """Who gets a full state, and where; the names are those of PyTorch's FSDP."""

    offload_to_cpu: bool = True
    """Whether the tensors are on the CPU, and not on the engine's device."""
    rank0_only: bool = False
    """Whether other processes than rank 0 get an empty dict, and need no memory for the whole."""


@dataclass(frozen=True)
class TensorShard:
    """What one process holds of a whole tensor."""

    piece: Piece
    """Which run of the whole tensor's elements it is."""
    data: torch.Tensor
    """The run, on the host, of shape (piece.numel,)."""


def full_state_dict(
    sharded: ShardedModel, *, rank0_only: bool = False, cpu_offload: bool = True
) -> dict[str, torch.Tensor]:
    """Return the unsharded parameters and buffers by original name, tied names included. Collective: every process.

    Args:
        sharded: The model.
        rank0_only: Whether other processes than rank 0 get an empty dict, and need no memory for it.
        cpu_offload: Whether the tensors are on the CPU, and not on the engine's device.
    """
    sharded.check_usable()
    whole: dict[str, torch.Tensor] = {}
    for parameter, holding in sharded.holdings.items():
        whole |= gathered(sharded, holding, parameter, rank0_only=rank0_only)
    if rank0_only and sharded.engine.job.rank:
        return {}
    for planned in sharded.plan.parameters:
        whole |= dict.fromkeys(planned.aliases, whole[planned.name])
    whole |= buffers(sharded)
    return {name: _moved(sharded, whole[name], cpu_offload) for name in sharded.state_names if name in whole}


def sharded_state_dict(sharded: ShardedModel) -> dict[str, Any]:
    """Return what this process holds of each parameter, as a `TensorShard`, and the buffers, by original name."""
    sharded.check_usable()
    found: dict[str, Any] = {}
    for parameter, holding in sharded.holdings.items():
        found |= _cut_up(sharded, holding, parameter)
    return {**found, **buffers(sharded)}


def local_state_dict(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """Return what this process keeps, on the host, by the names of its own `state_dict()`."""
    sharded.check_usable()
    state = {name: value for name, value in sharded.model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: to_host(sharded, value) for name, value in state.items()}


def note_shards(sharded: ShardedModel, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Remember the shards and buffers in a module's own `state_dict()`; a hook of it."""
    for name, buffer in module._buffers.items():
        if buffer is not None and isinstance(state_dict.get(prefix + name), torch.Tensor):
            _buffers[state_dict[prefix + name]] = True
    for name, parameter in module._parameters.items():
        if parameter in sharded.holdings and isinstance(state_dict.get(prefix + name), torch.Tensor):
            _shards[state_dict[prefix + name]] = (sharded, parameter)


def shard_of(tensor: torch.Tensor) -> tuple[ShardedModel, nn.Parameter] | None:
    """Return whose shard a tensor of a model's or an optimizer's own `state_dict()` is, if of any."""
    if isinstance(tensor, nn.Parameter) and (sharded := vars(tensor).get(HANDLE)) is not None:
        return sharded, tensor
    return _shards.get(tensor)  # type: ignore[no-any-return]


def is_buffer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a model's own `state_dict()` is a buffer, of which each process has its own."""
    return tensor in _buffers


def to_host(sharded: ShardedModel, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this process keeps of a tensor, in the shape that it has here."""
    if tensor.device.type == "cpu" and not hasattr(tensor, "to_local"):
        return tensor.detach().clone()
    local = sharded.fetch([tensor])[0].clone()
    shape = tensor.to_local().shape if hasattr(tensor, "to_local") else tensor.shape
    return local.view(shape)


def buffers(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """Return the persistent buffers on the host by name."""
    held = {key for holding in sharded.holdings.values() for key in (holding.key, *holding.names)}
    held |= {alias for planned in sharded.plan.parameters for alias in planned.aliases}
    state = sharded.model.state_dict()
    return {
        name: to_host(sharded, value)
        for name, value in state.items()
        if name not in held and isinstance(value, torch.Tensor)
    }


def load_state_dict(
    sharded: ShardedModel, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Load a full state, or this process's own, into a sharded model, in place.

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
    names_of = {planned.name: planned.names for planned in sharded.plan.parameters}
    left = dict(state_dict)
    loads: list[tuple[nn.Parameter, Holding, dict[str, Any]]] = []
    missing: list[str] = []
    for parameter, holding in sharded.holdings.items():
        found = {holding.key: left.pop(holding.key)} if holding.key in left else {}
        for name in holding.names:
            given = {other: left.pop(other) for other in names_of[name] if other in left}
            if given and name not in found:
                found[name] = next(iter(given.values()))
            _refuse_untied(name, {**given, **({name: found[name]} if name in found else {})})
        wanted = [] if holding.key in found else [name for name in holding.names if name not in found]
        missing += wanted
        if not wanted:
            loads.append((parameter, holding, found))
    own = dict(buffer_slots(sharded.model))
    missing += [name for name in own if name not in left]
    given_buffers = {name: left.pop(name) for name in own if name in left}
    unexpected = list(left)
    if strict and (missing or unexpected):
        raise CheckpointError(_misfit(sharded, missing, unexpected))
    for name, value in given_buffers.items():
        if tuple(value.shape) != tuple(own[name].shape):
            raise CheckpointError(
                f"{name!r} has the shape {tuple(value.shape)}, the model's is {tuple(own[name].shape)}"
            )
    is_local = _is_local([(holding, found) for _, holding, found in loads])
    locals_ = [(parameter, _cut(sharded, holding, found, is_local)) for parameter, holding, found in loads]
    with torch.no_grad():
        for parameter, local in locals_:
            sharded.assign(parameter, local.to(parameter.dtype))
        for name, value in given_buffers.items():
            own[name].copy_(value)
    sharded.engine.sync()
    if not missing:
        sharded.unusable = None
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def shard_metadata(sharded: ShardedModel) -> dict[str, Any]:
    """Return what is needed to put the rank files of a model together again: see `docs/design/checkpoints.md`."""
    shard_info: dict[str, Any] = {}
    flatten_info: dict[str, Any] = {}
    for holding in sharded.holdings.values():
        prefix, _, suffix = holding.key.rpartition(".")
        is_flat = holding.names != (holding.key,)
        size = [holding.numel] if is_flat else list(holding.members[0][1])
        shard_info.setdefault(prefix, {})[suffix] = {"_orig_size": size, "_orig_name": suffix}
        if is_flat:
            names = [name.removeprefix(f"{prefix}.") if prefix else name for name in holding.names]
            shapes = [list(shape) for _, shape in holding.members]
            flatten_info[holding.key] = [names, shapes, [prod(shape) for shape in shapes]]
    return {
        "shard_info": shard_info,
        "flatten_info": flatten_info,
        "buffer_info": {},
        "world_size": sharded.num_shards,
        "rank": next(iter(sharded.holdings.values())).index,
        "replica": sharded.replica[0],
        "tied": {alias: planned.name for planned in sharded.plan.parameters for alias in planned.aliases},
        "parameters": list(sharded.parameter_names),
    }


def optimizer_names(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the original names of the parameters of each of an optimizer's groups, in the order of their ids.

    Raises:
        CheckpointError: The optimizer holds a parameter that is not the model's.
    """
    return [
        _in_order(sharded, [holding_of(sharded, parameter) for parameter in group["params"]])
        for group in optimizer.param_groups
    ]


def full_optim_state_dict(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, Any]:
    """Return an optimizer's unsharded state. Collective: every process.

    Args:
        sharded: The model whose parameters the optimizer holds.
        optimizer: The optimizer.
        rank0_only: Whether other processes than rank 0 get an empty dict, and need no memory for it.
        cpu_offload: Whether the tensors are on the CPU, and not on the engine's device.

    Returns:
        What the same optimizer of the unsharded model gives as its `state_dict()`, with the parameters' original names
        as `param_names` in each group.
    """
    return whole_optim_state_dict(sharded, optimizer.state_dict(), rank0_only=rank0_only, cpu_offload=cpu_offload)


def whole_optim_state_dict(
    sharded: ShardedModel, own: Mapping[str, Any], *, rank0_only: bool, cpu_offload: bool = True
) -> dict[str, Any]:
    """Return `full_optim_state_dict()` from what the optimizer's own `state_dict()` gave. Collective: every process."""
    by_key = {holding.key: (parameter, holding) for parameter, holding in sharded.holdings.items()}
    held = [[by_key[key] for key in group["param_names"]] for group in own["param_groups"]]
    names = [_in_order(sharded, [holding for _, holding in group]) for group in held]
    ids = {name: index for index, name in enumerate(name for group in names for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for group, members in zip(own["param_groups"], held, strict=True):
        for own_id, (parameter, holding) in zip(group["params"], members, strict=True):
            for key, value in own["state"].get(own_id, {}).items():
                if is_laid_out_like(parameter, value):
                    parts: dict[str, Any] = gathered(sharded, holding, value, rank0_only=rank0_only)
                    parts = {name: _moved(sharded, part, cpu_offload) for name, part in parts.items()}
                else:
                    parts = {name: _own_copy(sharded, value) for name in holding.names}
                for name, part in parts.items():
                    state.setdefault(ids[name], {})[key] = part
    if rank0_only and sharded.engine.job.rank:
        return {}
    groups = [
        {**_settings(group), "params": [ids[name] for name in own_names], "param_names": own_names}
        for group, own_names in zip(own["param_groups"], names, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def sharded_optim_state_dict(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what this process holds of an optimizer's state, each tensor as a `TensorShard`, by original name."""
    state: dict[str, dict[str, Any]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        holding = holding_of(sharded, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            parts: dict[str, Any] = (
                _cut_up(sharded, holding, value)
                if is_laid_out_like(parameter, value)
                else {name: _own_copy(sharded, value) for name in holding.names}
            )
            for name, part in parts.items():
                state.setdefault(name, {})[key] = part
    names = optimizer_names(sharded, optimizer)
    groups = [{**_settings(group), "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]
    return {"state": state, "param_groups": groups}


def optim_state_dict_to_load(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, rank0_only: bool = False
) -> LocalState:
    """Return an optimizer's state as it lies here, from a full state or a local one; `load_state_dict()` takes it.

    Args:
        sharded: The model whose parameters the optimizer holds.
        optimizer: The optimizer that is to load it.
        saved: What `full_optim_state_dict()` gave in any engine, an optimizer of the unsharded model, or this
            optimizer's own `state_dict()` at this number of devices.
        rank0_only: Whether rank 0 alone has it, and hands it on, one tensor at a time; then collective.

    Raises:
        CheckpointError: Groups, names or shapes do not fit.
    """
    if isinstance(saved, LocalState):
        return saved
    if rank0_only:
        saved = _from_rank0(sharded, saved)
    by_key = _saved_by_key(sharded, optimizer, saved)
    own_ids = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
    held = [
        _holding_and_entries(sharded, parameter, by_key) for g in optimizer.param_groups for parameter in g["params"]
    ]
    is_local = _is_local(
        [(holding, parts) for holding, entries in held for parts in entries.values() if _are_tensors(parts)]
    )
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group, given in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        ids = []
        for parameter in group["params"]:
            ids.append(next(own_ids))
            _, entries = held[ids[-1]]
            if entries:
                state[ids[-1]] = {
                    key: _laid_out(sharded, parameter, key, parts, is_local) for key, parts in entries.items()
                }
        kept = {key: value for key, value in given.items() if key != "param_names" or key in group}
        groups.append({**kept, "params": ids})
    return LocalState({"state": state, "param_groups": groups})


def with_metadata(
    models: Sequence[ShardedModel], optimizer: torch.optim.Optimizer, own: dict[str, Any]
) -> dict[str, Any]:
    """Return what an optimizer's own `state_dict()` gave, with what makes it understood without the model.

    That is `param_names` in each group, the parameters' names in the model's own `state_dict()`, and `shard_metadata`;
    left out where the optimizer holds parameters of several models, or of none.
    """
    for sharded in models:
        for parameter in sharded.holdings:
            for value in optimizer.state.get(parameter, {}).values():
                if is_laid_out_like(parameter, value):
                    _shards[value] = (sharded, parameter)
    if len(models) != 1 or not holds_only(models[0], optimizer):
        return own
    groups = [
        {**given, "param_names": [holding_of(models[0], parameter).key for parameter in group["params"]]}
        for given, group in zip(own["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**own, "param_groups": groups, "shard_metadata": shard_metadata(models[0])}


def holds_only(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all of an optimizer's parameters are a model's."""
    return all(parameter in sharded.holdings for group in optimizer.param_groups for parameter in group["params"])


def match_groups(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: Sequence[Sequence[str]]
) -> list[list[nn.Parameter]]:
    """Return the parameters of each of an optimizer's groups, which must be the groups that were saved.

    Args:
        sharded: The model.
        optimizer: The optimizer.
        saved: Original names of each saved group's parameters.

    Raises:
        CheckpointError: The groups are others.
    """
    own = optimizer_names(sharded, optimizer)
    if len(own) != len(saved):
        raise CheckpointError(f"the saved optimizer has {len(saved)} groups, this one has {len(own)}")
    for index, (names, given) in enumerate(zip(own, saved, strict=True)):
        if set(names) != set(given):
            raise CheckpointError(_other_group(index, given, names))
    return [list(group["params"]) for group in optimizer.param_groups]


def flattened_apart(holding: Holding, what: str) -> str:
    """Return why the states of parameters that are flattened together cannot be loaded."""
    return (
        f"{', '.join(holding.names)} are flattened into one parameter here, and have different {what}: set "
        "config.dist.fsdp.flatten_parameters = False"
    )


def is_laid_out_like(parameter: torch.Tensor, value: Any) -> bool:
    """Return whether a value of an optimizer's state is sharded as its parameter is."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def gathered(
    sharded: ShardedModel, holding: Holding, tensor: torch.Tensor, *, rank0_only: bool
) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a parameter's holding, or of one that lies like it. Collective: every process.

    Returns:
        Original name -> a host tensor of its own memory; an empty dict on processes that get none.
    """
    local = sharded.fetch([tensor])[0]
    flat = sharded.gather(holding, local, rank0_only=rank0_only)
    if flat is None:
        return {}
    if len(holding.members) == 1:
        return {name: flat.view(shape) for name, shape in holding.members}
    parts = flat.split([prod(shape) for _, shape in holding.members])
    return {name: part.clone().view(shape) for (name, shape), part in zip(holding.members, parts, strict=True)}


def _cut_up(sharded: ShardedModel, holding: Holding, tensor: torch.Tensor) -> dict[str, TensorShard]:
    local = sharded.fetch([tensor])[0]
    nothing = {name: TensorShard(Piece(name, shape, 0, 0), local[:0].clone()) for name, shape in holding.members}
    held = {p.name: TensorShard(p, local[p.offset : p.offset + p.numel].clone()) for p in holding.pieces}
    return {**nothing, **held}


def _in_order(sharded: ShardedModel, holdings: Sequence[Holding]) -> list[str]:
    """Return original names as an unsharded optimizer has them: those that are flattened in the model's order."""
    names = [name for holding in holdings for name in holding.names]
    if all(holding.names == (holding.key,) for holding in holdings):
        return names
    order = {name: index for index, name in enumerate(sharded.parameter_names)}
    return sorted(names, key=order.__getitem__)


def _moved(sharded: ShardedModel, tensor: torch.Tensor, cpu_offload: bool) -> torch.Tensor:
    return tensor if cpu_offload else tensor.to(sharded.engine.device)


def _own_copy(sharded: ShardedModel, value: Any) -> Any:
    return to_host(sharded, value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}


def holding_of(sharded: ShardedModel, parameter: nn.Parameter) -> Holding:
    """Return what this process holds of an optimizer's parameter.

    Raises:
        CheckpointError: It is not the model's.
    """
    if parameter not in sharded.holdings:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of the model's: make "
            "it from the parameters of the model that accelerate() returned"
        )
    return sharded.holdings[parameter]


def buffer_slots(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the tensors of the persistent buffers, in place."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


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
            parts.append(f"{len(names)} {what}: {', '.join(names[:8])}{', …' if len(names) > 8 else ''};")
    return " ".join(parts) + " pass strict=False to load what fits"


def _is_local(states: Sequence[tuple[Holding, Mapping[str, Any]]]) -> bool:
    """Return whether a state's tensors are this process's own: all of them are, or none is.

    A single tensor cannot tell: a whole one of half the rows, of another model, looks like one of two shards.
    """
    for holding, found in states:
        for name, value in found.items():
            if hasattr(value, "to_local") or (name == holding.key and holding.key not in holding.names):
                return True
            shape = dict(holding.members).get(name)
            is_whole = isinstance(value, TensorShard) or tuple(value.shape) == shape
            if is_whole and shape is not None and prod(shape) != holding.shard_numel:
                return False
    return True


def _cut(sharded: ShardedModel, holding: Holding, found: Mapping[str, Any], is_local: bool) -> torch.Tensor:
    """Return what this process is to hold, from whole tensors, from shards, or from its own local tensor."""
    shapes = dict(holding.members)
    if is_local and holding.key in found and (local := _as_local(sharded, holding, found[holding.key])) is not None:
        return local[: sum(piece.numel for piece in holding.pieces)]
    for name, value in found.items():  # also of what this process has nothing of, so that all of them raise
        given = value.piece.shape if isinstance(value, TensorShard) else tuple(value.shape)
        if given != shapes.get(name):
            raise CheckpointError(
                f"{name!r} has the shape {given}, the model's is {shapes.get(name)}, of which each of "
                f"{sharded.num_shards} processes keeps {holding.shard_numel} elements"
            )
    parts = [_run_of(found[piece.name], piece) for piece in holding.pieces]
    return torch.cat(parts) if parts else torch.empty(0)


def _run_of(value: Any, piece: Piece) -> torch.Tensor:
    if not isinstance(value, TensorShard):
        return value.detach().cpu().reshape(-1)[piece.start : piece.stop]  # type: ignore[no-any-return]
    if (value.piece.start, value.piece.stop) != (piece.start, piece.stop):
        raise CheckpointError(
            f"{piece.name!r}: this process keeps the elements {piece.start} to {piece.stop}, and the shard is of "
            f"{value.piece.start} to {value.piece.stop}: it was taken at another number of devices"
        )
    return value.data


def _as_local(sharded: ShardedModel, holding: Holding, value: Any) -> torch.Tensor | None:
    """Return the process's own tensor flat, or None where a value is none, by its shape."""
    if isinstance(value, TensorShard):
        return None
    if hasattr(value, "to_local"):
        return sharded.fetch([value])[0]
    return value.detach().cpu().reshape(-1) if tuple(value.shape) in _local_shapes(holding) else None


def _local_shapes(holding: Holding) -> set[tuple[int, ...]]:
    """Return the shapes that a shard may have: with its padding, or without."""
    held = {holding.shard_numel, sum(piece.numel for piece in holding.pieces)}
    if holding.names != (holding.key,):
        return {(numel,) for numel in held}
    _, *row = holding.members[0][1]
    return {(numel // max(prod(row), 1), *row) for numel in held}


def _saved_by_key(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the saved state of each parameter by its key, or by its original names."""
    own_names = optimizer_names(sharded, optimizer)
    own_keys = [[holding_of(sharded, p).key for p in group["params"]] for group in optimizer.param_groups]
    groups = saved["param_groups"]
    if len(groups) != len(own_names):
        raise CheckpointError(f"the saved optimizer has {len(groups)} groups, this one has {len(own_names)}")
    by_key: dict[str, dict[str, Any]] = {}
    for index, (group, names, keys) in enumerate(zip(groups, own_names, own_keys, strict=True)):
        given = group.get("param_names") or next(
            (own for own in (names, keys) if len(own) == len(group["params"])), None
        )
        if given is None or sorted(given) not in (sorted(names), sorted(keys)):
            raise CheckpointError(_other_group(index, given or group["params"], names))
        by_key |= {key: saved["state"].get(id_, {}) for key, id_ in zip(given, group["params"], strict=True)}
    return by_key


def _from_rank0(sharded: ShardedModel, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's full state with what this process holds of each tensor, as shards. Collective: every process."""
    group = sharded.engine.group
    pieces = {piece.name: piece for holding in sharded.holdings.values() for piece in holding.pieces}
    skeleton = None
    if sharded.engine.job.rank == 0:
        skeleton = {
            "param_groups": saved["param_groups"],
            "state": {
                own: {
                    key: TensorShard(Piece("", tuple(value.shape), 0, 0), torch.empty(0, dtype=value.dtype))
                    if isinstance(value, torch.Tensor) and value.dim()
                    else value
                    for key, value in entry.items()
                }
                for own, entry in saved["state"].items()
            },
        }
    received: dict[str, Any] = group.broadcast_object(skeleton)
    names = {
        own: name
        for given in received["param_groups"]
        for own, name in zip(given["params"], given["param_names"], strict=True)
    }
    for own, entry in received["state"].items():
        for key, value in entry.items():
            if isinstance(value, TensorShard):
                whole = saved["state"][own][key] if skeleton is not None else None
                if whole is None:
                    whole = torch.empty(value.piece.shape, dtype=value.data.dtype)
                flat = group.broadcast(whole.cpu().contiguous()).reshape(-1)
                piece = pieces.get(names[own], Piece(names[own], value.piece.shape, 0, 0))
                entry[key] = TensorShard(piece, flat[piece.start : piece.stop].clone())
    return received


def _other_group(index: int, given: Sequence[Any], names: Sequence[str]) -> str:
    strange = sorted(str(name) for name in set(given) ^ set(names))
    return (
        f"group {index} of the saved optimizer has {len(given)} parameters, this one's has {len(names)}: they differ "
        f"in {', '.join(strange[:8])}{', …' if len(strange) > 8 else ''}. Make the same groups as when it was saved"
    )


def _entries_of(
    sharded: ShardedModel, holding: Holding, by_key: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return each state of a parameter, as its values by key or by original name."""
    if holding.key in by_key:
        return {key: {holding.key: value} for key, value in by_key[holding.key].items()}
    members = {name: by_key[name] for name in holding.names}
    keys = [set(entry) for entry in members.values()]
    if any(other != keys[0] for other in keys):
        raise CheckpointError(flattened_apart(holding, "kinds of state"))
    first = next(iter(members.values()))
    return {key: {name: entry[key] for name, entry in members.items()} for key in first}


def _holding_and_entries(
    sharded: ShardedModel, parameter: nn.Parameter, by_key: Mapping[str, Mapping[str, Any]]
) -> tuple[Holding, dict[str, dict[str, Any]]]:
    holding = holding_of(sharded, parameter)
    return holding, _entries_of(sharded, holding, by_key)


def _are_tensors(parts: Mapping[str, Any]) -> bool:
    """Return whether the values are tensors with dimensions, in place of a step or another number."""
    return all(isinstance(v, TensorShard) or (isinstance(v, torch.Tensor) and v.dim() > 0) for v in parts.values())


def _laid_out(
    sharded: ShardedModel, parameter: nn.Parameter, key: str, parts: Mapping[str, Any], is_local: bool
) -> Any:
    """Return one state of a parameter as it lies here."""
    holding = sharded.holdings[parameter]
    first = next(iter(parts.values()))
    if _are_tensors(parts) and not _is_of_another_shape(sharded, holding, first):
        return sharded.place(parameter, _cut(sharded, holding, parts, is_local))
    if any(differ(first, other) for other in parts.values()):
        raise CheckpointError(flattened_apart(holding, f"values of {key!r}"))
    return first.detach().clone() if isinstance(first, torch.Tensor) else copy.deepcopy(first)


def _is_of_another_shape(sharded: ShardedModel, holding: Holding, value: Any) -> bool:
    """Return whether a state is one that some optimizers keep of whole rows or columns, where there are whole ones."""
    if isinstance(value, TensorShard) or hasattr(value, "to_local") or sharded.num_shards > 1:
        return False
    shape = holding.members[0][1]
    reduced = len(value.shape) == len(shape) and all(a in (1, b) for a, b in zip(value.shape, shape, strict=True))
    return tuple(value.shape) != shape and reduced


def differ(one: Any, other: Any) -> bool:
    """Return whether two values of an optimizer's state are not the same."""
    if isinstance(one, torch.Tensor):
        return not torch.equal(one, other)
    return bool(one != other)
