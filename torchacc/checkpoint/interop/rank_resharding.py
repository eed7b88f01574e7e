"""Plan how rank files become those of another number of ranks, in the format that they have."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from torchacc.checkpoint.interop.pth import NewTensor
from torchacc.checkpoint.interop.rank_consolidation import carry
from torchacc.checkpoint.interop.rank_files import RankFiles, Sharded, ShardFormat
from torchacc.checkpoint.interop.rank_optimizer import read_optimizer
from torchacc.checkpoint.interop.rank_transfers import ConversionPlan, PthFile, Transfer
from torchacc.errors import CheckpointError

_ByRank = dict[str, list[NewTensor]]
"""The new shards of what is sharded, by its name and by rank."""


def plan_resharding(files: RankFiles, num_ranks: int, path_of: Callable[[int], Path]) -> ConversionPlan:
    """Plan to write the rank files of another number of ranks.

    They load where the given ones came from: in torch_xla, or in torchacc. What else is in the model's files, and what
    is not sharded, is taken from rank 0.

    Args:
        files: The model's rank files, or the optimizer's.
        num_ranks: How many to write.
        path_of: Where, by rank.

    Raises:
        CheckpointError: The given ones are sharded in different ways, so that it is not known which to follow.
    """
    make = _model_files if files.part == "model" else _optimizer_files
    transfers: list[Transfer] = []
    new = [PthFile(path_of(rank), content) for rank, content in enumerate(make(files, num_ranks, transfers))]
    return ConversionPlan(files.paths, tuple(new), tuple(transfers))


def _reshard(found: Iterable[Sharded], num_ranks: int, transfers: list[Transfer]) -> _ByRank:
    """Return new shards, made as the old ones are, and add what they are to be copied from."""
    found = list(found)
    formats = [each for each in ShardFormat if all(one.has_format(each) for one in found)]
    if not formats:
        other = next(one for one in found if not one.has_format(ShardFormat.FLAT))
        raise CheckpointError(
            f"{other.slots[0].path}: {other.name} is not cut like the others: a part of this model was sharded with "
            "other options than the rest. Consolidate the files, and load the full model"
        )
    pads = not any(one.lacks_padding for one in found)
    shards: _ByRank = {}
    for one in found:
        shapes = [_shape(one, formats[0], rank, num_ranks, pads=pads) for rank in range(num_ranks)]
        new = [NewTensor(one.name, one.slots[0].dtype, shape) for shape in shapes]
        transfers.append(Transfer(one.sources, tuple(new)))
        shards[one.name] = new
    return shards


def _shape(sharded: Sharded, shard_format: ShardFormat, rank: int, num_ranks: int, *, pads: bool) -> tuple[int, ...]:
    shape = sharded.parameter.shard_shape(shard_format, num_ranks)
    numel = prod(shape)
    if not pads and numel:
        held = min(numel, max(0, sharded.parameter.numel - rank * numel))
        shape = (held // prod(shape[1:]), *shape[1:])
    return (prod(shape),) if len(sharded.slots[0].shape) == 1 else shape


def _model_files(files: RankFiles, num_ranks: int, transfers: list[Transfer]) -> list[dict[str, Any]]:
    shards = _reshard(files.sharded_model(), num_ranks, transfers)
    first = files.files[0]
    state = first.part("model") or {}
    aliases = {alias: name for alias, name in files.tied.items() if name in state}
    others = {
        key: value for key, value in first.contents.items() if key not in ("model", "optimizer", "shard_metadata")
    }

    def model(rank: int) -> dict[str, Any]:
        new = {
            key: shards[key][rank] if key in shards else carry(value, key, transfers)
            for key, value in state.items()
            if key not in aliases
        }
        return {key: new[aliases.get(key, key)] for key in state}

    return [
        {
            **carry(others, "", transfers),
            "model": model(rank),
            "shard_metadata": _metadata(first.metadata, rank, num_ranks),
        }
        for rank in range(num_ranks)
    ]


def _optimizer_files(files: RankFiles, num_ranks: int, transfers: list[Transfer]) -> list[dict[str, Any]]:
    optimizer = read_optimizer(files)
    shards = _reshard(optimizer.sharded, num_ranks, transfers)
    first = files.files[0]
    old = first.part("optimizer") or {}
    others = {key: value for key, value in old.items() if key not in ("state", "shard_metadata")}

    def state(rank: int) -> dict[int, dict[str, Any]]:
        return {
            optimizer.ids[key]: {
                entry: shards[value.name][rank]
                if isinstance(value, Sharded)
                else carry(value, f"{key}/{entry}", transfers)
                for entry, value in entries.items()
            }
            for key, entries in optimizer.states.items()
        }

    contents = []
    for rank in range(num_ranks):
        metadata = {"shard_metadata": _metadata(first.metadata, rank, num_ranks)}
        new = {"state": state(rank), **carry(others, "optimizer", transfers)}
        if "shard_metadata" in old:
            new |= metadata
        contents.append(new if first.is_bare_optimizer else {"optimizer": new} | metadata)
    return contents


def _metadata(metadata: Mapping[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    new = {**metadata, "world_size": num_ranks, "rank": rank, "resharded": True}
    return new | {"replica": 0} if "replica" in metadata else new
