"""`torchacc.save` and `torchacc.load`: any object, in files that several processes never write at once."""

import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchacc.checkpoint import model_state, optimizer_state
from torchacc.checkpoint.other_formats.pth import load_pth, read_pth
from torchacc.checkpoint.own_format.manifest import digest
from torchacc.checkpoint.own_format.safetensors_files import as_bytes
from torchacc.checkpoint.own_format.unfinished import clear_unfinished, unfinished
from torchacc.data.tree import map_tensors, tensors_in
from torchacc.engines.process_group import ProcessGroup
from torchacc.engines.sharded_model import ShardedModel
from torchacc.env import Job, read_job
from torchacc.errors import CheckpointError

_RANK_FILE = re.compile(r"rank-(\d+)-of-(\d+)(?:-model|-optimizer)?\.pth")
_METADATA = "shard_metadata"
_FILE_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth"}


def save(obj: Any, path: str | os.PathLike[str], master_only: bool = True) -> None:
    """Save an object with `torch.save()`, with its tensors on the CPU. Collective: call it on every process.

    Rank 0 writes an object that is the same on all processes, such as the state of a scheduler. Of sharded state no
    part is lost:

    * The state of a model or an optimizer is gathered and written unsharded: `load_state_dict()` accepts what
      `torch.load(path)` returns at any number of devices. Rank 0 needs memory for all of it; for a large model use
      `torchacc.checkpoint.save()`.
    * With `master_only=False`, or if `path` is a folder, each rank writes its own shards to
      `path/rank-<r>-of-<n>[-model|-optimizer].pth`, or to `path` if each rank passes a different one.

    A file gets its name once the files of all ranks are complete.

    Args:
        obj: The object to save.
        path: A file, or a folder for the files of the ranks.
        master_only: If True, rank 0 writes one file.

    Raises:
        CheckpointError: The file cannot be written, the object could not be loaded again, or a part of it would be
            lost. Raised on every process.
    """
    job = read_job()
    group = ProcessGroup(job)
    target = Path(path)
    group.expect_all("torchacc.save()")
    group.call_on_all(lambda: _check_usable(obj, split=False))
    sharded = any(group.all_gather_objects(_is_sharded(obj)))
    save_id = group.broadcast_object(secrets.token_hex(4))
    paths = group.all_gather_objects(str(target.absolute()))
    by_rank = not master_only or (sharded and any(group.all_gather_objects(target.is_dir())))
    if by_rank:
        group.call_on_all(lambda: _check_usable(obj, split=True))
        several_paths = len(set(paths)) == job.num_processes > 1
        several_paths |= job.num_processes == 1 and target.suffix in _FILE_SUFFIXES
        if not several_paths or target.is_dir():
            target = target / f"rank-{job.rank}-of-{job.num_processes}{_kind(obj)}.pth"
        content = _stamped(map_tensors(_own_part, _on_host(obj)), save_id)
        older = group.call_on_all(lambda: _older_sets(target, job))
    else:
        group.call_on_all(lambda: _refuse_loss(obj))
        _refuse_other_copies(obj, group)
        content = _unshard(obj) if sharded else _on_host(obj)
        older = []
    writes = by_rank or job.rank == 0
    group.call_on_all(lambda: _check_target(target) if writes else None)
    if target.is_symlink():  # what it leads to is written, as by torch.save()
        target = target.resolve()
    partial = unfinished(target)
    try:
        group.call_on_all(lambda: _write(content, target, partial) if writes else None)
        # Only now: if a rank could not write, the files of the last save stay.
        group.call_on_all(lambda: partial.replace(target) if writes else None)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    if job.rank == 0:
        for path in older:
            path.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Any:
    """Load a file of `torchacc.save()` to the CPU; from a folder of rank files, the file of this rank.

    Args:
        path: A file, or a folder with the rank files of the same number of ranks.

    Raises:
        CheckpointError: The file does not exist, is damaged, or would execute code; or the rank files are of another
            number of ranks or of different saves.
    """
    target = Path(path)
    return load_pth(_own_file(target, read_job()) if target.is_dir() else target)


def _kind(obj: Any) -> str:
    """Return the part of a rank file's name that tells what is in it."""
    keys = set(obj) if isinstance(obj, Mapping) else set()
    has_model, has_optimizer = "model" in keys, bool(keys & {"optimizer", "param_groups"})
    return "" if has_model == has_optimizer else "-model" if has_model else "-optimizer"


def _is_sharded(tree: Any) -> bool:
    """Return whether an object holds a part of something of which other processes hold the rest."""
    if any(_says_sharded(part) for part in _mappings(tree)):
        return True
    is_distributed = any(hasattr(tensor, "to_local") for tensor in tensors_in(tree))
    return is_distributed or any(sharded.shards.coordinates.is_split for sharded in _models(tree))


def _says_sharded(part: Mapping[Any, Any]) -> bool:
    """Return whether a dict has the metadata of one of several shards."""
    metadata = part.get(_METADATA)
    return isinstance(metadata, Mapping) and metadata["world_size"] > 1


def _models(tree: Any) -> set[ShardedModel]:
    """Return the models of which an object holds shards."""
    owners = map(model_state.shard_of, tensors_in(tree))
    return {owner[0] for owner in owners if owner is not None}


def _check_usable(tree: Any, *, split: bool) -> None:
    """Refuse what has no values, and shards of a model that cannot be used, or that no slice for each process is."""
    for tensor in tensors_in(tree):
        if tensor.is_meta:
            raise CheckpointError(f"a tensor of {tensor.dtype} is on the device meta, and has no values")
        if tensor.is_nested or any(getattr(tensor, "names", ())):  # which later versions of PyTorch have not
            cure = "nested: save its unbind()" if tensor.is_nested else "named: save its rename(None)"
            raise CheckpointError(f"a tensor of {tensor.dtype} is {cure}")
    for sharded in _models(tree):
        sharded.status.check_usable()
        if split:
            model_state.refuse_split(sharded, "a file for each rank")


def _refuse_loss(tree: Any) -> None:
    """Refuse what is said, or can be seen, to be a part of something, and cannot be put together."""
    for tensor in tensors_in(tree):
        if hasattr(tensor, "to_local") and model_state.shard_of(tensor) is None:
            raise CheckpointError(f"a DTensor of shape {tuple(tensor.shape)} {_UNKNOWN}")
    for part in _mappings(tree):
        if _says_sharded(part):
            others = [t for t in tensors_in({k: v for k, v in part.items() if k != _METADATA}) if _may_be_shard(t)]
            if others:
                raise CheckpointError(f"a tensor of shape {tuple(others[0].shape)} beside shard_metadata {_UNKNOWN}")


_UNKNOWN = (
    "is a copy of a shard, or one that this function does not know, of which rank 0 alone would keep its own: save "
    "what model.state_dict() and optimizer.state_dict() return as it is, or pass master_only=False"
)


def _may_be_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is not put together could be a part of something: neither a buffer nor a number."""
    known = model_state.shard_of(tensor) is not None or model_state.is_buffer(tensor)
    known |= tensor.layout is not torch.strided
    return tensor.dim() > 0 and tensor.is_floating_point() and not known


def _refuse_other_copies(tree: Any, group: ProcessGroup) -> None:
    """Refuse tensors of which each process has another: rank 0 would keep its own only. Collective."""
    own = [_digest(tensor) if _may_be_shard(tensor) else (tuple(tensor.shape), "") for tensor in tensors_in(tree)]
    digests = group.all_gather_objects(own)
    for other in digests:
        differing = next((a for a, b in zip(digests[0], other, strict=False) if a != b and (a[1] or b[1])), None)
        if differing is not None or len(other) != len(digests[0]):
            what = "its tensors are others" if differing is None else f"a tensor of shape {differing[0]} is another"
            raise CheckpointError(
                f"{what} on other ranks, and rank 0 alone would keep its own. A copy of a shard? Save what "
                "model.state_dict() and optimizer.state_dict() return as it is, or pass master_only=False"
            )


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    host = tensor.detach().cpu().contiguous()
    return tuple(tensor.shape), digest(as_bytes(host)) if host.numel() else ""


def _mappings(tree: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(tree, Mapping):
        yield tree
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ():
        yield from _mappings(part)


def _older_sets(target: Path, job: Job) -> list[Path]:
    """Return the rank files of other numbers of ranks beside this one, which are to be removed once it is there.

    A set that is complete again must not be mixed with an older one, nor an older one be loaded as the newest.

    Raises:
        CheckpointError: There are such files that do not say that `save()` has written them.
    """
    if not _RANK_FILE.fullmatch(target.name) or not target.parent.is_dir():
        return []
    kind = target.name.partition(f"-of-{job.num_processes}")[2]
    found = []
    for path in sorted(target.parent.iterdir()):
        match = _RANK_FILE.fullmatch(path.name)
        if match and int(match[2]) != job.num_processes and path.name.endswith(f"-of-{match[2]}{kind}"):
            if not isinstance(_save_id(path), str):
                raise CheckpointError(
                    f"{target.parent} holds {path.name}, of {match[2]} ranks, which does not say that torchacc.save() "
                    f"has written it; beside the files of {job.num_processes} ranks, either could be loaded for the "
                    "other: move it, or name another folder"
                )
            found.append(path)
    return found


def _on_host(tree: Any) -> Any:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        owner = model_state.shard_of(tensor)
        if owner is not None:
            return model_state.to_host(owner[0], tensor)
        return tensor.detach().cpu()

    return map_tensors(copied, tree)


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a distributed tensor that a script has made of the model's."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _stamped(tree: Any, save_id: str) -> Any:
    """Return a tree whose shard metadata say which call of save() they are of."""
    if not isinstance(tree, Mapping):
        return tree
    stamped = {
        key: {**value, "save_id": save_id} if key == _METADATA else _stamped(value, save_id)
        for key, value in tree.items()
    }
    return _with_versions(stamped, tree)


def _with_versions(replacing: dict[Any, Any], tree: Mapping[Any, Any]) -> Any:
    """Return what replaces a mapping in a tree; of a module's state with the versions of modules, as PyTorch has it."""
    if not hasattr(tree, "_metadata"):
        return replacing
    state: Any = OrderedDict(replacing)
    state._metadata = tree._metadata
    return state


def _unshard(tree: Any) -> Any:
    """Return an object with full tensors, on rank 0; on others what is left without them. Collective."""
    if isinstance(tree, Mapping):
        if {"state", "param_groups", _METADATA} <= set(tree):
            return _unshard_optimizer(tree)
        found: dict[Any, Any] = {}
        for key, value in tree.items():
            owner = model_state.shard_of(value) if isinstance(value, torch.Tensor) else None
            if owner is not None:
                found |= _unshard_weights(*owner, key, value)
            elif key != _METADATA:
                found[key] = _unshard(value)
        return _with_versions(found, tree)
    if isinstance(tree, list | tuple):
        return type(tree)(map(_unshard, tree))
    if isinstance(tree, torch.Tensor) and model_state.shard_of(tree) is not None:
        raise CheckpointError("a single shard has no name to be put together by: save the model's whole state_dict()")
    return _on_host(tree)


def _unshard_weights(sharded: ShardedModel, parameter: nn.Parameter, key: Any, shard: torch.Tensor) -> dict[Any, Any]:
    """Return what a shard of a model's state is a part of, by its key, or of a flat one by all original names."""
    local_shard = sharded.shards[parameter]
    parts = model_state.gathered(sharded, local_shard, shard, rank0_only=True)
    if local_shard.names == (local_shard.key,):
        return dict.fromkeys([key], *parts.values()) if parts else {}
    names_of = {planned.name: planned.names for planned in sharded.plan.parameters}
    return {name: part for first, part in parts.items() for name in names_of[first]}


def _unshard_optimizer(own: Mapping[str, Any]) -> Any:
    models = _models(own["state"])
    if len(models) == 1:
        return optimizer_state.unshard_optim_state(models.pop(), own, rank0_only=True)
    return {key: value for key, value in own.items() if key != _METADATA}


def _check_target(target: Path) -> None:
    """Refuse what a file cannot replace."""
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder: name a file for what rank 0 alone writes")
    if target.exists() and not target.is_file():
        raise CheckpointError(f"{target} is a device or the like, which a file would replace: name a file")


def _write(content: Any, target: Path, partial: Path) -> None:
    """Write a file by another name, and see that it can be loaded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_unfinished(target.parent)
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        load_pth(partial, target, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error.strerror or error}") from None
    except RuntimeError as error:  # how torch.save reports a full disk
        raise CheckpointError(f"{target} was not written: {(str(error) or repr(error)).splitlines()[0]}") from None


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
    of_set = [path for path, _, count in found if count == job.num_processes and path.name.endswith(_suffix(own[0]))]
    saves = {save_id: path for path in of_set if (save_id := _save_id(path)) is not None}
    if len(saves) > 1:
        one, other = list(saves.values())[:2]
        raise CheckpointError(
            f"{one} and {other} are of different saves: the last one was cut short, and took the place of a part of "
            "the one before. Load another checkpoint"
        )
    return own[0]


def _suffix(path: Path) -> str:
    """Return what the names of a set's files end with, behind the rank."""
    return path.name[path.name.index("-of-") :]


def _save_id(path: Path) -> str | None:
    """Return of which call of `save()` a rank file says that it is, without reading its tensors."""
    try:
        contents = read_pth(path)
    except CheckpointError:
        return None  # whoever loads it will say why
    metadata = [part[_METADATA] for part in _mappings(contents) if isinstance(part.get(_METADATA), Mapping)]
    return metadata[0].get("save_id") if metadata else None
