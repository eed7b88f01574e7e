"""The state of an optimizer of a sharded model in memory: unsharded, in shards, or as this process keeps it."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn

from torchacc.checkpoint import model_state
from torchacc.checkpoint.model_state import StateEntry, TensorShard, local_shard_of
from torchacc.data.tree import map_tensors
from torchacc.engines import quantized_state
from torchacc.engines.optimizers import is_for_each_element, is_quantized
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import CheckpointError, listed
from torchacc.parallel.sharding import LocalShard, TensorSlice


class LocalState(dict[str, Any]):
    """An optimizer's state that lies as its parameters do here, and is loaded as it is."""


def optimizer_names(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the original names of the parameters of each of an optimizer's groups, in the order of their ids.

    Raises:
        CheckpointError: The optimizer holds a parameter that is not the model's.
    """
    return [
        _in_order(sharded, [local_shard_of(sharded, parameter) for parameter in group["params"]])
        for group in optimizer.param_groups
    ]


def state_entries(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, *, takes_apart: bool = False
) -> Iterator[StateEntry]:
    """Yield an optimizer's states, parameter by parameter in the order of its groups.

    Args:
        sharded: The model.
        optimizer: The optimizer.
        takes_apart: Whether quantized values are given as the tensors that they are made of, and not refused.

    Raises:
        CheckpointError: The optimizer holds a parameter that is not the model's, or quantized values.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        states = optimizer.state.get(parameter, {})
        yield from _entries_of_parameter(sharded, parameter, states, takes_apart=takes_apart)


def _entries_of_parameter(
    sharded: ShardedModel, parameter: nn.Parameter, states: Mapping[str, Any], *, takes_apart: bool = False
) -> Iterator[StateEntry]:
    local_shard = local_shard_of(sharded, parameter)
    for key, value in states.items():
        if is_quantized(value):
            if not takes_apart:
                raise CheckpointError(
                    f"the optimizer's {key} of {local_shard.names[0]!r} is quantized in blocks of torchao's, of which "
                    "there is no full state: torchacc.checkpoint.save() saves it"
                )
            for name, part, block in quantized_state.tensors_of(key, value):
                yield StateEntry(parameter, local_shard, name, part, is_sharded=True, block=block)
            continue
        yield StateEntry(parameter, local_shard, key, value, is_sharded_like(parameter, value))


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
    sharded.shards.expect_all("torchacc.optim_state_dict()")
    return unshard_optim_state(sharded, optimizer.state_dict(), rank0_only=rank0_only, cpu_offload=cpu_offload)


def unshard_optim_state(
    sharded: ShardedModel, own: Mapping[str, Any], *, rank0_only: bool, cpu_offload: bool = True
) -> dict[str, Any]:
    """Return `full_optim_state_dict()` from what the optimizer's own `state_dict()` gave. Collective: every process."""
    by_key = {local_shard.key: parameter for parameter, local_shard in sharded.shards.items()}
    held = [[by_key[key] for key in group["param_names"]] for group in own["param_groups"]]
    names = [_in_order(sharded, [sharded.shards[parameter] for parameter in group]) for group in held]
    ids = {name: index for index, name in enumerate(name for group in names for name in group)}
    found: dict[int, dict[str, Any]] = {}
    for group, parameters in zip(own["param_groups"], held, strict=True):
        for own_id, parameter in zip(group["params"], parameters, strict=True):
            for entry in _entries_of_parameter(sharded, parameter, own["state"].get(own_id, {})):
                for name, value in entry.unsharded(sharded, rank0_only=rank0_only).items():
                    full = model_state.moved(sharded, value, cpu_offload) if entry.is_sharded else value
                    found.setdefault(ids[name], {})[entry.key] = full
    if rank0_only and sharded.engine.job.rank:
        return {}
    groups = [
        {**_settings(group), "params": [ids[name] for name in own_names], "param_names": own_names}
        for group, own_names in zip(own["param_groups"], names, strict=True)
    ]
    return {"state": dict(sorted(found.items())), "param_groups": groups}


def sharded_optim_state_dict(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what this process holds of an optimizer's state, each tensor as a `TensorShard`, by original name."""
    sharded.status.check_optimizer(optimizer)
    model_state.refuse_split(sharded, "an optimizer's state in shards")
    found: dict[str, dict[str, Any]] = {}
    for entry in state_entries(sharded, optimizer):
        for name, value in entry.shards(sharded).items():
            found.setdefault(name, {})[entry.key] = value
    names = optimizer_names(sharded, optimizer)
    groups = [{**_settings(group), "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]
    return {"state": found, "param_groups": groups}


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
        saved = _from_rank0(sharded, optimizer, saved)
    by_key = _saved_by_key(sharded, optimizer, saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [_states_of(local_shard_of(sharded, parameter), by_key) for parameter in parameters]
    is_local = model_state.are_local(
        [
            (sharded.shards[parameter], values)
            for parameter, entries in zip(parameters, states, strict=True)
            for key, values in entries.items()
            if _are_for_each_element(sharded.shards[parameter], key, values)
        ]
    )
    found = {
        own_id: {key: _sharded(sharded, parameter, key, values, is_local) for key, values in entries.items()}
        for own_id, (parameter, entries) in enumerate(zip(parameters, states, strict=True))
        if entries
    }
    ids = count()
    groups = []
    for group, given in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kept = {key: value for key, value in given.items() if key != "param_names" or key in group}
        groups.append({**kept, "params": [next(ids) for _ in group["params"]]})
    sharded.status.mark_optimizer_loaded(optimizer)
    return LocalState({"state": found, "param_groups": groups})


def with_metadata(
    models: Sequence[ShardedModel], optimizer: torch.optim.Optimizer, own: dict[str, Any]
) -> dict[str, Any]:
    """Return what an optimizer's own `state_dict()` gave, with what makes it understood without the model.

    That is `param_names` in each group, the parameters' names in the model's own `state_dict()`, and `shard_metadata`;
    left out where the optimizer holds parameters of several models, or of none.
    """
    for sharded in models:
        sharded.status.check_optimizer(optimizer)
        for parameter in sharded.shards:
            for value in optimizer.state.get(parameter, {}).values():
                if is_sharded_like(parameter, value):
                    model_state.shards[value] = (sharded, parameter)
    if len(models) != 1 or not holds_only(models[0], optimizer):
        return own
    groups = [
        {
            **given,
            "param_names": [local_shard_of(models[0], parameter).key for parameter in group["params"]],
        }
        for given, group in zip(own["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**own, "param_groups": groups, "shard_metadata": model_state.shard_metadata(models[0])}


def holds_only(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all of an optimizer's parameters are a model's."""
    return all(parameter in sharded.shards for group in optimizer.param_groups for parameter in group["params"])


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
        raise CheckpointError(_other_count(len(saved), len(own)))
    for index, (names, given) in enumerate(zip(own, saved, strict=True)):
        if set(names) != set(given):
            raise CheckpointError(_other_group(index, given, names))
    return [list(group["params"]) for group in optimizer.param_groups]


def flattened_apart(local_shard: LocalShard, what: str) -> str:
    """Return why the states of parameters that are flattened together cannot be loaded."""
    return (
        f"{', '.join(local_shard.names)} are flattened into one parameter here, and have different {what}: set "
        "config.dist.fsdp.flatten_parameters = False"
    )


def is_sharded_like(parameter: torch.Tensor, value: Any) -> bool:
    """Return whether a value of an optimizer's state is sharded as its parameter is."""
    if not isinstance(value, torch.Tensor) or is_ordinary(parameter, value) or value.shape != parameter.shape:
        return False
    return hasattr(value, "to_local") or value.dim() > 0  # a step count beside a parameter without dimensions is plain


def is_ordinary(parameter: torch.Tensor, value: Any) -> bool:
    """Return whether a value of an optimizer's state is an ordinary tensor, beside a parameter that is distributed."""
    return isinstance(value, torch.Tensor) and hasattr(parameter, "to_local") and not hasattr(value, "to_local")


def _in_order(sharded: ShardedModel, local_shards: Sequence[LocalShard]) -> list[str]:
    """Return original names as an unsharded optimizer has them: those that are flattened in the model's order."""
    names = [name for local_shard in local_shards for name in local_shard.names]
    if all(local_shard.names == (local_shard.key,) for local_shard in local_shards):
        return names
    order = {name: index for index, name in enumerate(sharded.parameter_names)}
    return sorted(names, key=order.__getitem__)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}


def _saved_by_key(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the saved state of each parameter by its key, or by its original names."""
    own_names = optimizer_names(sharded, optimizer)
    own_keys = [[local_shard_of(sharded, p).key for p in group["params"]] for group in optimizer.param_groups]
    groups = saved["param_groups"]
    if len(groups) != len(own_names):
        raise CheckpointError(_other_count(len(groups), len(own_names)))
    by_key: dict[str, dict[str, Any]] = {}
    for index, (group, names, keys) in enumerate(zip(groups, own_names, own_keys, strict=True)):
        given = group.get("param_names") or next(
            (own for own in (names, keys) if len(own) == len(group["params"])), None
        )
        if given is None or sorted(given) not in (sorted(names), sorted(keys)):
            raise CheckpointError(_other_group(index, given or group["params"], names))
        by_key |= {key: saved["state"].get(id_, {}) for key, id_ in zip(given, group["params"], strict=True)}
    return by_key


def _from_rank0(sharded: ShardedModel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's full state with what this process holds of each tensor, as shards. Collective: every process."""
    group, is_rank0 = sharded.engine.group, sharded.engine.job.rank == 0
    slices = {part.name: part for local_shard in sharded.shards.values() for part in local_shard.slices}
    described = None
    if is_rank0:
        state = map_tensors(_without_values, dict(saved["state"]))
        described = {"param_groups": saved["param_groups"], "state": state}
    received: dict[str, Any] = group.broadcast_object(described)
    names = {
        own: name  # an optimizer of the unsharded model may have none; what does not fit is refused afterwards
        for given, own_names in zip(received["param_groups"], optimizer_names(sharded, optimizer), strict=False)
        for own, name in zip(given["params"], given.get("param_names") or own_names, strict=False)
    }
    for own, entry in received["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                full = saved["state"][own][key].cpu() if is_rank0 else torch.empty(value.shape, dtype=value.dtype)
                full = group.broadcast(full.contiguous()).view(value.shape)
                name = names.get(own, "")
                part = slices.get(name, TensorSlice(name, tuple(value.shape), 0, 0))
                shard = TensorShard(part, full.reshape(-1)[part.start : part.stop].clone())
                entry[key] = shard if sharded.shards.coordinates.is_contiguous else full
    return received


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta") if tensor.dim() else tensor


def _other_count(saved: int, own: int) -> str:
    return (
        f"the saved optimizer has {saved} parameter group{'s' * (saved > 1)}, this one has {own}. Make the same groups "
        "as when it was saved, or load the model alone and begin with a new optimizer"
    )


def _other_group(index: int, given: Sequence[Any], names: Sequence[str]) -> str:
    strange = sorted(str(name) for name in set(given) ^ set(names))
    return (
        f"group {index} of the saved optimizer has {len(given)} parameters, this one's has {len(names)}: they differ "
        f"in {listed(strange)}. Make the same groups as when it was saved"
    )


def by_state(local_shard: LocalShard, members: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the states of the tensors of a shard by the state's name, and then by the tensor's original name.

    Args:
        local_shard: The shard.
        members: For each tensor of it the states by name.

    Raises:
        CheckpointError: The tensors are flattened together, and have different kinds of state.
    """
    first, *others = members.values()
    if any(other.keys() != first.keys() for other in others):
        raise CheckpointError(flattened_apart(local_shard, "kinds of state"))
    return {key: {name: entry[key] for name, entry in members.items()} for key in first}


def _states_of(local_shard: LocalShard, by_key: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each state of a parameter, as its values by key or by original name."""
    if local_shard.key in by_key:
        return {key: {local_shard.key: value} for key, value in by_key[local_shard.key].items()}
    return by_state(local_shard, {name: by_key[name] for name in local_shard.names})


def _are_for_each_element(local_shard: LocalShard, key: str, parts: Mapping[str, Any]) -> bool:
    """Return whether the values of a state are for each element, in place of a step or another number."""
    shapes = dict(local_shard.members)
    return all(
        isinstance(value, TensorShard)
        or (
            isinstance(value, torch.Tensor)
            and (value.dim() > 0 or is_for_each_element(key, (), shapes.get(name, (1,))))
        )
        for name, value in parts.items()
    )


def _sharded(sharded: ShardedModel, parameter: nn.Parameter, key: str, parts: Mapping[str, Any], is_local: bool) -> Any:
    """Return one state of a parameter, sharded as the parameter is, or an ordinary value."""
    local_shard = sharded.shards[parameter]
    first = next(iter(parts.values()))
    if _are_for_each_element(local_shard, key, parts) and not _is_of_another_shape(sharded, local_shard, first):
        return sharded.shards.place(parameter, model_state.local_part(sharded, local_shard, parts, is_local))
    if any(differ(first, other) for other in parts.values()):
        raise CheckpointError(flattened_apart(local_shard, f"values of {key!r}"))
    return first.detach().clone() if isinstance(first, torch.Tensor) else copy.deepcopy(first)


def _is_of_another_shape(sharded: ShardedModel, local_shard: LocalShard, value: Any) -> bool:
    """Return whether a state is one that some optimizers keep of full rows or columns, where there are full ones."""
    if isinstance(value, TensorShard) or hasattr(value, "to_local") or sharded.shards.coordinates.is_split:
        return False
    shape = local_shard.members[0][1]
    reduced = len(value.shape) == len(shape) and all(a in (1, b) for a, b in zip(value.shape, shape, strict=True))
    return tuple(value.shape) != shape and reduced


def differ(one: Any, other: Any) -> bool:
    """Return whether two values of an optimizer's state are not the same."""
    if isinstance(one, torch.Tensor):
        return not torch.equal(one, other)
    return bool(one != other)
