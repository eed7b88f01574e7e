"""What the files hold that rank files become: full tensors, or the shards of another number of ranks."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from torchacc.checkpoint.other_formats.new_tensors import NewTensor, Source
from torchacc.checkpoint.other_formats.rank_files import RankFiles
from torchacc.checkpoint.other_formats.rank_optimizer import read_optimizer
from torchacc.checkpoint.other_formats.sharded_parameters import Sharded, ShardFormat, cast_to
from torchacc.checkpoint.own_format.safetensors_files import FileRegion
from torchacc.errors import CheckpointError

_ByRank = dict[str, list[NewTensor]]
"""The new shards of what is sharded, by its name and by rank."""


def full_model(files: RankFiles, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return a model's full state by original name, without the aliases of tied parameters.

    Args:
        files: The model's rank files.
        dtype: What floating tensors are cast to.
    """
    state: dict[str, Any] = {}
    for sharded in files.sharded_model():
        state |= sharded.full(dtype)
    for name, (value, own) in files.unsharded().items():
        state[name] = _carry(value, name, own and cast_to(dtype, own))
    return state


def full_optimizer(files: RankFiles) -> dict[str, Any]:
    """Return an optimizer's full state, as that of the unsharded model has it.

    The order of ids is that of the parameters in the original groups, and in a group with flattened ones the model's
    own, as far as the files know it; `param_names` has the original names.
    """
    optimizer = read_optimizer(files)
    names = [_names(files, group.keys) for group in optimizer.groups]
    ids = {name: index for index, name in enumerate(name for own in names for name in own)}
    states: dict[str, dict[str, Any]] = {}
    for key, entries in optimizer.states.items():
        for entry, value in entries.items():
            if isinstance(value, Sharded):
                parts: dict[str, Any] = dict(value.full(entry=f"/{entry}"))
            else:  # each its own: a step that parameters share is incremented once for each of them
                parts = {name: _carry(value, f"{name}/{entry}") for name, _ in files.parameters[key].members}
            for name, part in parts.items():
                states.setdefault(name, {})[entry] = part
    groups = [
        {**_carry(group.settings, "param_groups"), "params": [ids[name] for name in own], "param_names": own}
        for group, own in zip(optimizer.groups, names, strict=True)
    ]
    return {"state": {ids[name]: states[name] for name in ids if name in states}, "param_groups": groups}


def resharded(files: RankFiles, num_ranks: int) -> list[dict[str, Any]]:
    """Return what the files of another number of ranks hold, in the format that the given ones have.

    They load where the given ones came from: in torch_xla, or in torchacc. What else is in the model's files, and what
    is not sharded, is taken from rank 0.

    Raises:
        CheckpointError: The given ones are sharded in different ways, so that it is not known which to follow.
    """
    if files.part == "model":
        shards = _reshard(files.sharded_model(), num_ranks)
        return [_model_of(files, shards, rank, num_ranks) for rank in range(num_ranks)]
    optimizer = read_optimizer(files)
    shards = _reshard(optimizer.sharded, num_ranks)
    contents = []
    for rank in range(num_ranks):
        state = {
            optimizer.ids[key]: {
                entry: shards[value.name][rank] if isinstance(value, Sharded) else _carry(value, f"{key}/{entry}")
                for entry, value in entries.items()
            }
            for key, entries in optimizer.states.items()
        }
        contents.append(_optimizer_of(files, state, rank, num_ranks))
    return contents


def _model_of(files: RankFiles, shards: _ByRank, rank: int, num_ranks: int) -> dict[str, Any]:
    first = files.files[0]
    state = first.part("model") or {}
    aliases = {alias: name for alias, name in files.tied.items() if name in state}
    others = {
        key: value for key, value in first.contents.items() if key not in ("model", "optimizer", "shard_metadata")
    }
    new = {
        key: shards[key][rank] if key in shards else _carry(value, key)
        for key, value in state.items()
        if key not in aliases
    }
    model = {key: new[aliases.get(key, key)] for key in state}
    return {**_carry(others, ""), "model": model, "shard_metadata": _metadata(first.metadata, rank, num_ranks)}


def _optimizer_of(files: RankFiles, state: Mapping[int, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    first = files.files[0]
    old = first.part("optimizer") or {}
    others = {key: value for key, value in old.items() if key not in ("state", "shard_metadata")}
    metadata = {"shard_metadata": _metadata(first.metadata, rank, num_ranks)}
    new = {"state": state, **_carry(others, "optimizer"), **(metadata if "shard_metadata" in old else {})}
    return new if first.is_bare_optimizer else {"optimizer": new, **metadata}


def _reshard(found: Sequence[Sharded], num_ranks: int) -> _ByRank:
    """Return new shards, made as the old ones are."""
    formats = [each for each in ShardFormat if all(one.has_format(each) for one in found)]
    if not formats:
        other = next(one for one in found if not one.has_format(ShardFormat.FLAT))
        raise CheckpointError(
            f"{other.regions[0].path}: {other.name} is not cut like the others: a part of this model was sharded with "
            "other options than the rest. Consolidate the files, and load the full model"
        )
    pads = not any(one.lacks_padding for one in found)
    return {
        one.name: one.resharded([_shape(one, formats[0], rank, num_ranks, pads=pads) for rank in range(num_ranks)])
        for one in found
    }


def _shape(sharded: Sharded, shard_format: ShardFormat, rank: int, num_ranks: int, *, pads: bool) -> tuple[int, ...]:
    shape = sharded.parameter.shard_shape(shard_format, num_ranks)
    numel = prod(shape)
    if not pads and numel:
        held = min(numel, max(0, sharded.parameter.numel - rank * numel))
        shape = (held // prod(shape[1:]), *shape[1:])
    return (prod(shape),) if len(sharded.regions[0].shape) == 1 else shape


def _metadata(metadata: Mapping[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    new = {**metadata, "world_size": num_ranks, "rank": rank, "resharded": True}
    return new | {"replica": 0} if "replica" in metadata else new


def _carry(value: Any, name: str, dtype: torch.dtype | None = None) -> Any:
    """Return what a rank file holds with a new tensor for each one in it, each of its own."""
    if isinstance(value, FileRegion):
        return NewTensor(name, dtype or value.dtype, value.shape, (Source(value, 0, value.numel),))
    if isinstance(value, Mapping):
        return {key: _carry(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_carry(item, f"{name}.{index}") for index, item in enumerate(value))
    return value


def _names(files: RankFiles, keys: Sequence[str]) -> list[str]:
    parameters = [files.parameters[key] for key in keys]
    names = [name for parameter in parameters for name, _ in parameter.members]
    if all(len(parameter.members) == 1 for parameter in parameters):
        return names
    order = {name: index for index, name in enumerate(files.order)}
    return sorted(names, key=order.__getitem__)
