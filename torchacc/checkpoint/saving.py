"""`torchacc.save` and `torchacc.load`: any object, in files that several processes never write at once."""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from torchacc.checkpoint import state
from torchacc.data.tree import map_tensors
from torchacc.engines.base import ShardedModel
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import Job, read_job
from torchacc.errors import CheckpointError

_RANK_FILE = re.compile(r"rank-(\d+)-of-(\d+)(?:-model|-optimizer)?\.pth")
_METADATA = "shard_metadata"


def save(obj: Any, path: str | os.PathLike[str], master_only: bool = True) -> None:
    """Save an object with `torch.save`, its tensors on the CPU. Collective: every process.

    An object that is the same everywhere, such as a scheduler's state, is written by rank 0. What is sharded is never
    cut down to one rank's part:

    * The state of an optimizer or of a model is put together and written whole, so that `torch.load(path)` gives what
      `load_state_dict()` takes at any number of devices. It needs the whole in rank 0's memory: for a large model
      use `torchacc.checkpoint.save()`.
    * With `master_only=False`, or where `path` is a folder, each rank writes its own part,
      `path/rank-<r>-of-<n>[-model|-optimizer].pth`, or `path` itself where every rank names another one.

    A file appears under its name when it is complete.

    Args:
        obj: What to save.
        path: A file, or a folder for the files of the ranks.
        master_only: Whether one file is to hold it all.

    Raises:
        CheckpointError: It cannot be written, or could not be loaded, or rank 0 alone would keep a part of it; on every
            process.
    """
    job = read_job()
    group = ProcessGroup(job)
    target = Path(path)
    sharded = _is_sharded(obj)
    save_id = group.broadcast_object(secrets.token_hex(4))
    paths = group.all_gather_objects(str(target.absolute()))
    by_rank = not master_only or (sharded and any(group.all_gather_objects(target.is_dir())))
    if by_rank:
        several_paths = len(set(paths)) == job.num_processes > 1 or (job.num_processes == 1 and target.suffix == ".pth")
        if not several_paths or target.is_dir():
            target = target / f"rank-{job.rank}-of-{job.num_processes}{_kind(obj)}.pth"
        content = _stamped(_on_host(obj), save_id)
    else:
        content = _whole(obj) if sharded else _on_host(obj)
    writes = by_rank or job.rank == 0
    group.agreed(lambda: _write(content, target) if writes else None)


def load(path: str | os.PathLike[str]) -> Any:
    """Load what `torchacc.save` wrote, on the CPU; from a folder of rank files this rank's own.

    Args:
        path: A file, or a folder of rank files of as many ranks.

    Raises:
        CheckpointError: There is nothing, it cannot be read, it would run code, or it is of another number of ranks.
    """
    target = Path(path)
    return _read(_own_file(target, read_job()) if target.is_dir() else target)


def _kind(obj: Any) -> str:
    """Return the part of a rank file's name that tells what is in it."""
    keys = set(obj) if isinstance(obj, Mapping) else set()
    has_model, has_optimizer = "model" in keys, bool(keys & {"optimizer", "param_groups"})
    return "" if has_model == has_optimizer else "-model" if has_model else "-optimizer"


def _is_sharded(tree: Any) -> bool:
    """Return whether an object holds a part of something of which other processes hold the rest."""
    if isinstance(tree, Mapping):
        metadata = tree.get(_METADATA)
        if isinstance(metadata, Mapping) and metadata["world_size"] > 1:
            return True
    found: list[bool] = []

    def look(tensor: torch.Tensor) -> None:
        owner = state.shard_of(tensor)
        found.append(hasattr(tensor, "to_local") or (owner is not None and owner[0].num_shards > 1))

    map_tensors(look, tree)
    nested = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return any(found) or any(_is_sharded(part) for part in nested if isinstance(part, Mapping | list | tuple))


def _on_host(tree: Any) -> Any:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        owner = state.shard_of(tensor)
        if owner is not None:
            return state.to_host(owner[0], tensor)
        return tensor.detach().cpu()

    return map_tensors(copied, tree)


def _stamped(tree: Any, save_id: str) -> Any:
    """Return a tree whose shard metadata say which call of save() they are of."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        key: {**value, "save_id": save_id} if key == _METADATA else _stamped(value, save_id)
        for key, value in tree.items()
    }


def _whole(tree: Any) -> Any:
    """Return an object with whole tensors, on rank 0; on others what is left without them. Collective."""
    if isinstance(tree, Mapping):
        if {"state", "param_groups", _METADATA} <= set(tree):
            return _whole_optimizer(tree)
        found: dict[Any, Any] = {}
        for key, value in tree.items():
            owner = state.shard_of(value) if isinstance(value, torch.Tensor) else None
            if owner is not None:
                found |= _whole_weights(*owner, key, value)
            elif key != _METADATA:
                found[key] = _whole(value)
        return found
    if isinstance(tree, list | tuple):
        return type(tree)(map(_whole, tree))
    if isinstance(tree, torch.Tensor) and state.shard_of(tree) is not None:
        raise CheckpointError("a single shard has no name to be put together by: save the model's whole state_dict()")
    return _on_host(tree)


def _whole_weights(sharded: ShardedModel, parameter: nn.Parameter, key: Any, shard: torch.Tensor) -> dict[Any, Any]:
    """Return what a shard of a model's state is a part of, by its key, or of a flat one by all original names."""
    holding = sharded.holdings[parameter]
    parts = state.gathered(sharded, holding, shard, rank0_only=True)
    if holding.names == (holding.key,):
        return dict.fromkeys([key], *parts.values()) if parts else {}
    names_of = {planned.name: planned.names for planned in sharded.plan.parameters}
    return {name: part for first, part in parts.items() for name in names_of[first]}


def _whole_optimizer(own: Mapping[str, Any]) -> Any:
    values = [value for entry in own["state"].values() for value in entry.values() if isinstance(value, torch.Tensor)]
    models = {owner[0] for owner in map(state.shard_of, values) if owner is not None}
    if len(models) == 1:
        return state.whole_optim_state_dict(models.pop(), own, rank0_only=True)
    if any(value.dim() for value in values):
        raise CheckpointError(
            "this optimizer state holds copies of this rank's shards, of which rank 0 alone would keep its own: save "
            "what optimizer.state_dict() returns as it is, or with master_only=False"
        )
    return {key: value for key, value in own.items() if key != _METADATA}


def _write(content: Any, target: Path) -> None:
    """Write a file that appears when it is complete, and can be loaded."""
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder: name a file for what rank 0 alone writes")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.incomplete")
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        _read(partial, mmap=True)
        partial.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error.strerror or error}") from None
    except RuntimeError as error:  # how torch.save reports a full disk
        raise CheckpointError(f"{target} was not written: {str(error).splitlines()[0]}") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _read(path: Path, *, mmap: bool = False) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "Unsupported" in line), str(error)[:200])
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and reading it could run code: {reason}. Save "
            "state_dict()s, numbers and strings"
        ) from None
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    except (RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise CheckpointError(f"{path} cannot be read, it is truncated or damaged: {reason}") from None


def _own_file(folder: Path, job: Job) -> Path:
    matches = [(path, _RANK_FILE.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    found = [(path, int(match[1]), int(match[2])) for path, match in matches if match]
    if not found:
        raise CheckpointError(f"{folder} holds no rank files (rank-<r>-of-<n>.pth)")
    own = [path for path, rank, count in found if (rank, count) == (job.rank, job.num_processes)]
    if len(own) > 1:
        raise CheckpointError(f"{folder} holds {' and '.join(path.name for path in own)}: name the one to load")
    if not own:
        raise CheckpointError(
            f"{folder} was saved by {found[0][2]} ranks, and this job has {job.num_processes}: reshard it with "
            f"`consolidate_and_reshard_fsdp_ckpts --ckpt_dir {folder} --reshard_num {job.num_processes}`"
        )
    return own[0]
