"""Plan how rank files become those of another number of ranks, in the form that they have."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torchacc.checkpoint.interop.consolidate import carry
from torchacc.checkpoint.interop.copying import Copy, Plan, PthFile
from torchacc.checkpoint.interop.optimizer_files import read_optimizer
from torchacc.checkpoint.interop.pth import Blank
from torchacc.checkpoint.interop.rank_files import Cut, RankFiles, Sharded
from torchacc.errors import CheckpointError


def plan_resharding(files: RankFiles, num_ranks: int, path_of: Callable[[int], Path]) -> Plan:
    """Plan to write the rank files of another number of ranks.

    They load where the given ones came from: in torch_xla, or in torchacc. What else is in the model's files, and what
    every rank has whole, is taken from rank 0.

    Args:
        files: The model's rank files, or the optimizer's.
        num_ranks: How many to write.
        path_of: Where, by rank.

    Raises:
        CheckpointError: The given ones are cut in different ways, so that it is not known which to follow.
    """
    make = _model_files if files.part == "model" else _optimizer_files
    copies: list[Copy] = []
    contents = make(files, num_ranks, copies)
    new = [PthFile(path_of(rank), content) for rank, content in enumerate(contents)]
    return Plan(files.paths, tuple(new), tuple(copies))


@dataclass(frozen=True)
class _Knife:
    """How new shards are cut: as the old ones are."""

    cut: Cut
    num_ranks: int
    pads: bool
    """Whether shards are filled up with zeros to equal size."""

    @classmethod
    def like(cls, sharded: Iterable[Sharded], num_ranks: int) -> "_Knife":
        """Return how to cut so that what is sharded like this can be loaded where it came from."""
        found = list(sharded)
        for cut in Cut:
            if all(one.is_cut(cut) for one in found):
                return cls(cut, num_ranks, pads=not any(one.lacks_padding for one in found))
        other = next(one for one in found if not one.is_cut(Cut.PADDED))
        raise CheckpointError(
            f"{other.slots[0].path}: {other.name} is not cut like the others: a part of this model was sharded with "
            "other options than the rest. Consolidate the files, and load the whole model"
        )

    def shard(self, sharded: Sharded, rank: int, copies: list[Copy]) -> Blank:
        """Return one new shard, and add what it is to be copied from."""
        shape = sharded.block.shard_shape(self.cut, self.num_ranks)
        start = rank * prod(shape)
        runs = list(sharded.runs(start, start + prod(shape)))
        if not self.pads:
            held = sum(last - first for _, first, last in runs)
            shape = (held // prod(shape[1:]), *shape[1:]) if prod(shape) else shape
        if len(sharded.slots[0].shape) == 1:
            shape = (prod(shape),)
        blank = Blank(sharded.name, sharded.slots[0].dtype, shape)
        position = 0
        for slot, first, last in runs:
            copies.append(Copy(slot, first, blank, position, last - first))
            position += last - first
        return blank


def _model_files(files: RankFiles, num_ranks: int, copies: list[Copy]) -> list[dict[str, Any]]:
    sharded = {one.block.key: one for one in files.sharded_model()}
    knife = _Knife.like(sharded.values(), num_ranks)
    first = files.files[0]
    state = first.part("model") or {}
    aliases = {alias: name for alias, name in files.tied.items() if name in state}
    others = {
        key: value for key, value in first.contents.items() if key not in ("model", "optimizer", "shard_metadata")
    }

    def model(rank: int) -> dict[str, Any]:
        new = {
            key: knife.shard(sharded[key], rank, copies) if key in sharded else carry(value, key, copies)
            for key, value in state.items()
            if key not in aliases
        }
        return {key: new[aliases.get(key, key)] for key in state}

    return [
        {
            **carry(others, "", copies),
            "model": model(rank),
            "shard_metadata": _metadata(first.metadata, rank, num_ranks),
        }
        for rank in range(num_ranks)
    ]


def _optimizer_files(files: RankFiles, num_ranks: int, copies: list[Copy]) -> list[dict[str, Any]]:
    optimizer = read_optimizer(files)
    knife = _Knife.like(optimizer.sharded, num_ranks)
    first = files.files[0]
    old = first.part("optimizer") or {}
    others = {key: value for key, value in old.items() if key not in ("state", "shard_metadata")}

    def state(rank: int) -> dict[int, dict[str, Any]]:
        return {
            optimizer.ids[key]: {
                entry: knife.shard(value, rank, copies)
                if isinstance(value, Sharded)
                else carry(value, f"{key}/{entry}", copies)
                for entry, value in entries.items()
            }
            for key, entries in optimizer.states.items()
        }

    contents = []
    for rank in range(num_ranks):
        metadata = {"shard_metadata": _metadata(first.metadata, rank, num_ranks)}
        new = {"state": state(rank), **carry(others, "optimizer", copies)}
        if "shard_metadata" in old:
            new |= metadata
        contents.append(new if first.is_bare_optimizer else {"optimizer": new} | metadata)
    return contents


def _metadata(metadata: Mapping[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    new = {**metadata, "world_size": num_ranks, "rank": rank, "resharded": True}
    return new | {"replica": 0} if "replica" in metadata else new
