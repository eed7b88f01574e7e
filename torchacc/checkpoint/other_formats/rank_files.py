"""Sets of rank files, torchacc's own and torch_xla's: found, checked, and described by where each shard lies.

The form of these files is in docs/design/checkpoints.md. Nothing here reads a tensor.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from torchacc.checkpoint.other_formats.new_tensors import read_chunks, replace_leaves
from torchacc.checkpoint.other_formats.pth import read_pth
from torchacc.checkpoint.other_formats.sharded_parameters import XLA_SHARD, Sharded, ShardedParameter
from torchacc.checkpoint.own_format.regular_files import FileState
from torchacc.checkpoint.own_format.safetensors_files import DTYPES, FileRegion
from torchacc.errors import CheckpointError, listed
from torchacc.logging import get_logger

Part = Literal["model", "optimizer"]

_MAX_SIZE = 2**63 - 1
_MAX_NAMED = 8
_NAMED_AS_RANK_FILE = re.compile(r"rank-\d+-of-\d+")
_BUFFER_DTYPES = {torch.complex128, *DTYPES.values()}
"""What buffers can be cast to."""
_log = get_logger(__name__)


@dataclass(frozen=True)
class RankFile:
    """What one rank saved; tensors are regions."""

    path: Path
    contents: Mapping[str, Any]
    metadata: Mapping[str, Any]
    """How it is sharded."""
    state: FileState
    """Of before it was read."""

    @property
    def rank(self) -> int:
        """Which shard it is."""
        return int(self.metadata["rank"])

    @property
    def world_size(self) -> int:
        """How many shards there are."""
        return int(self.metadata["world_size"])

    @property
    def replica(self) -> int:
        """Which copy of the shard it is."""
        return int(self.metadata.get("replica", 0))

    @property
    def is_bare_optimizer(self) -> bool:
        """Whether it is an optimizer's state with `shard_metadata` in it."""
        return "state" in self.contents and "param_groups" in self.contents

    def part(self, part: Part) -> Mapping[str, Any] | None:
        """Return the model's or the optimizer's state, or None where it has none."""
        if part == "optimizer" and self.is_bare_optimizer:
            return self.contents
        found = self.contents.get(part)
        return found if isinstance(found, Mapping) else None


@dataclass(frozen=True)
class RankFiles:
    """A complete set of rank files, by rank."""

    part: Part
    files: tuple[RankFile, ...]

    @cached_property
    def parameters(self) -> dict[str, ShardedParameter]:
        """What is sharded, by key, in torch_xla's order of parameters."""
        first, *others = self.files
        for other in others:
            if any(other.metadata.get(name) != first.metadata.get(name) for name in ("shard_info", "flatten_info")):
                raise CheckpointError(
                    f"{first.path} and {other.path} are sharded differently: they are not of one save"
                )
        try:
            parameters = list(_parameters(first.metadata))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{first.path}: its shard_metadata makes no sense ({error!r})") from None
        members = [name for parameter in parameters for name, _ in parameter.members]
        for names in ([parameter.key for parameter in parameters], members):
            twice = sorted({name for name, count in Counter(names).items() if count > 1})
            if twice:
                raise CheckpointError(f"{first.path}: its shard_metadata has {', '.join(twice)} twice")
        return {parameter.key: parameter for parameter in parameters}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read."""
        return tuple(file.path for file in self.files)

    @property
    def states(self) -> tuple[tuple[Path, FileState], ...]:
        """The files that are read, each as it was before."""
        return tuple((file.path, file.state) for file in self.files)

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """A model's aliases, to the name that is stored; torch_xla does not note them."""
        first = self.files[0]
        tied: Mapping[str, str] = first.metadata.get("tied") or {}
        sharded = {name for parameter in self.parameters.values() for name, _ in parameter.members}
        stored = sharded | ({original_name(key) for key in first.part("model") or {}} - tied.keys())
        for alias, name in tied.items():
            if alias in sharded:
                raise CheckpointError(
                    f"{first.path}: its shard_metadata says that {alias} is tied to {name}, and has both: it "
                    "contradicts itself"
                )
            if name not in stored:
                raise CheckpointError(
                    f"{first.path}: its shard_metadata says that {alias} is tied to {name}, which is not there"
                )
        return tied

    @property
    def order(self) -> Sequence[str]:
        """The original names in the model's order, as far as that is known."""
        known = self.files[0].metadata.get("parameters")
        return known or [name for parameter in self.parameters.values() for name, _ in parameter.members]

    def gather(self, parameter: ShardedParameter, name: str, found: Iterable[Any]) -> Sharded:
        """Return the shards of one tensor from what each file has in its place."""
        regions = tuple(found)
        for file, region in zip(self.files, regions, strict=True):
            if not isinstance(region, FileRegion):
                raise CheckpointError(f"{file.path} has no {name}: it is not of the same save as {self.files[0].path}")
        return Sharded(parameter, name, regions)

    def sharded_model(self) -> list[Sharded]:
        """Return the model's sharded tensors, in the order of the files."""
        states = [file.part("model") or {} for file in self.files]
        self._check_keys(states)
        keys = [
            *(key for key in states[0] if key in self.parameters),
            *(key for key in self.parameters if key not in states[0]),
        ]
        return [self.gather(self.parameters[key], key, (state.get(key) for state in states)) for key in keys]

    def unsharded(self) -> dict[str, tuple[Any, torch.dtype | None]]:
        """Return what is not sharded, such as buffers: original name to rank 0's value, and original dtype."""
        first = self.files[0]
        dtypes = {}
        for key, entry in (first.metadata.get("buffer_info") or {}).items():
            dtype = entry.get("_orig_dtype") if isinstance(entry, Mapping) else None
            if dtype not in _BUFFER_DTYPES:
                raise CheckpointError(f"{first.path}: its shard_metadata does not say which dtype the buffer {key} had")
            dtypes[original_name(key)] = dtype  # torch_xla writes other prefixes here than into the state dict
        found: dict[str, tuple[Any, torch.dtype | None]] = {}
        sharded = {name for parameter in self.parameters.values() for name, _ in parameter.members}
        for key, value in (first.part("model") or {}).items():
            name = original_name(key)
            if key in self.parameters or key in self.tied:
                continue
            if name in sharded or name in found:
                raise CheckpointError(f"{first.path} has {name} twice, one of them as {key}")
            found[name] = value, dtypes.get(name, value.dtype) if isinstance(value, FileRegion) else None
        return found

    def _check_keys(self, states: Sequence[Mapping[str, Any]]) -> None:
        for file, state in zip(self.files, states, strict=True):
            for key in state.keys() ^ states[0].keys():
                lacking, having = (file, self.files[0]) if key in states[0] else (self.files[0], file)
                raise CheckpointError(f"{lacking.path} has no {key}, which {having.path} has: they are not of one save")
            for key in state:
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"{file.path}: its model has the key {key!r}, which is not a parameter's name"
                    )
                if key.rpartition(".")[2].startswith(XLA_SHARD) and key not in self.parameters:
                    raise CheckpointError(f"{file.path}: {key} is a shard, but shard_metadata does not say of what")


def original_name(key: str) -> str:
    """Return a parameter's or a buffer's name without the wrappers that torch_xla puts into it."""
    return key.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def find_rank_files(paths: Iterable[Path], part: Part, *, where: str) -> RankFiles:
    """Find one complete set of rank files among files, and check that it is one.

    Files that are no rank files are passed over, as are those without the part; of replicas the lowest is taken.
    Files that resharding wrote are passed over where their originals are there. Of several saves the newest that is
    complete is taken, with a warning, where each file says of which save it is.

    Args:
        paths: Where to look.
        part: What the files must have.
        where: What `paths` came of, for messages.

    Raises:
        CheckpointError: Ranks are missing, also because a file cannot be read, or there twice; or the files are of
            different saves, and which to take is not known.
    """
    found: list[RankFile] = []
    reasons: list[str] = []
    for path in sorted(paths):
        try:
            file = read_rank_file(path) if path.is_file() else None
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            found += [file] if file is not None and file.part(part) is not None else []
    originals = [file for file in found if not file.metadata.get("resharded")]
    try:
        chosen, passed_over = _choose(originals or found, part)
    except CheckpointError as error:
        raise CheckpointError("; ".join([f"{where}: {error}", *reasons])) from None
    if passed_over:
        newest = listed([str(file.path) for file in chosen])
        others = "; ".join([*passed_over, *reasons])
        _log.warning("%s: the %s is of the newest complete save, %s; passed over: %s", where, part, newest, others)
    _check_moment(chosen)
    return RankFiles(part, chosen)


def read_rank_file(path: Path) -> RankFile | None:
    """Read a file, and return None if it is not a rank file.

    Raises:
        CheckpointError: It cannot be read, or it is named as a rank file and is none, or its metadata makes no sense.
    """
    state = FileState.of(path)
    contents = read_pth(path)
    for holder in (contents, contents.get("optimizer")) if isinstance(contents, Mapping) else ():
        metadata = holder.get("shard_metadata") if isinstance(holder, Mapping) else None
        if isinstance(metadata, Mapping) and {"rank", "world_size"} <= metadata.keys():
            _check_metadata(path, metadata)
            return RankFile(path, contents, metadata, state)
    if _NAMED_AS_RANK_FILE.match(path.name):
        raise CheckpointError(
            f"{path} has no 'shard_metadata' with a rank and a world_size, and cannot be joined with the other ranks' "
            "files: save model.get_shard_metadata() beside the state"
        )
    return None


def _check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse values that are not of the type that they have in every rank file."""

    def refuse(name: str, expected: str) -> None:
        raise CheckpointError(f"{path}: its shard_metadata has {name} = {metadata[name]!r}: {expected}")

    for name, least in (("world_size", 1), ("rank", 0), ("replica", 0)):
        if name in metadata and (type(metadata[name]) is not int or metadata[name] < least):
            refuse(name, f"a whole number, {least} or more, is expected")
    if metadata.get("splits_layers"):
        raise CheckpointError(
            f"{path} was saved where config.dist.tp.size split layers between processes, whose shards cannot be joined "
            "from rank files: save by torchacc.checkpoint.save()"
        )
    if metadata["rank"] >= metadata["world_size"]:
        refuse("rank", f"less than its world_size, {metadata['world_size']}, is expected")
    for name in ("shard_info", "flatten_info", "buffer_info", "tied"):
        found = metadata.get(name)
        if found is not None and not (isinstance(found, Mapping) and all(isinstance(key, str) for key in found)):
            refuse(name, "a dict by name is expected")
    if not all(isinstance(name, str) for name in (metadata.get("tied") or {}).values()):
        refuse("tied", "names are expected")
    names = metadata.get("parameters") or []
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
        refuse("parameters", "a list of names is expected")
    if not isinstance(metadata.get("save_id"), (str, type(None))):
        refuse("save_id", "a string is expected")


_OTHER: dict[Part, Part] = {"model": "optimizer", "optimizer": "model"}


def _choose(files: Sequence[RankFile], part: Part) -> tuple[tuple[RankFile, ...], list[str]]:
    """Return the files of one save, by rank, and what was passed over: the files of other saves, and why."""
    if not files:
        raise CheckpointError(
            f"no rank file with a {part!r}; every rank is to save a dict with {part!r} and 'shard_metadata'. Where "
            f"{_OTHER[part]!r} alone is saved, `torchacc reshard --part {_OTHER[part]}` converts that"
        )
    saves: dict[tuple[int, str | None], list[RankFile]] = {}
    for file in files:
        saves.setdefault((file.world_size, file.metadata.get("save_id")), []).append(file)
    if len(saves) == 1:
        return _complete_set(files), []
    if None in (ids := [save_id for _, save_id in saves]) or len(set(ids)) < len(ids):
        raise _mixed(files)
    complete: dict[tuple[int, str | None], tuple[RankFile, ...]] = {}
    faults: dict[tuple[int, str | None], str] = {}
    for save, own in saves.items():
        try:
            complete[save] = _complete_set(own)
        except CheckpointError as error:
            faults[save] = str(error)
    times = {save: max(file.path.stat().st_mtime_ns for file in own) for save, own in complete.items()}
    newest = [save for save, time in times.items() if time == max(times.values())]
    if len(newest) != 1:
        raise _mixed(files)
    passed_over = [
        f"{listed([str(file.path) for file in own])} ({faults.get(save, 'an older save')})"
        for save, own in saves.items()
        if save != newest[0]
    ]
    return complete[newest[0]], passed_over


def _check_moment(files: Sequence[RankFile]) -> None:
    """Refuse files that no `save_id` tells apart, and whose optimizers have other settings or have made other steps."""
    if any("save_id" in file.metadata or file.part("optimizer") is None for file in files):
        return
    alike = _alike(files[0])
    for other in files[1:]:
        if _alike(other) != alike:
            raise CheckpointError(
                f"the optimizers in {files[0].path} and {other.path} have made other numbers of steps, or have other "
                "settings: they are not of one save"
            )


def _alike(file: RankFile) -> Any:
    """Return the part of an optimizer's state that is the same on all ranks: all but tensors with dimensions."""

    def read(region: FileRegion) -> bytes | None:
        return None if region.shape else b"".join(map(bytes, read_chunks(region, 0, region.numel)))

    optimizer = file.part("optimizer") or {}
    return replace_leaves([optimizer.get(name) for name in ("state", "param_groups")], FileRegion, read)


def _mixed(files: Sequence[RankFile]) -> CheckpointError:
    """Return the error of files that are of several saves."""
    first = files[0]
    for file in files:
        if file.world_size != first.world_size:
            return CheckpointError(
                f"{first.path} is of {first.world_size} ranks and {file.path} of {file.world_size}: choose one set, "
                f"with a pattern like 'rank-*-of-{first.world_size}*.pth'"
            )
    other = next(file for file in files if file.metadata.get("save_id") != first.metadata.get("save_id"))
    return CheckpointError(f"{first.path} and {other.path} are of different saves: keep the files of one of them")


def _complete_set(files: Sequence[RankFile]) -> tuple[RankFile, ...]:
    """Return the files of one save by rank."""
    count = files[0].world_size
    by_rank: dict[int, RankFile] = {}
    for file in sorted(files, key=lambda file: file.replica):
        other = by_rank.setdefault(file.rank, file)
        if other is not file and other.replica == file.replica:
            raise CheckpointError(f"{other.path} and {file.path} are both rank {file.rank}: keep one of them")
    # How many there are is what a file says.
    missing = list(islice((rank for rank in range(count) if rank not in by_rank), _MAX_NAMED))
    if missing:
        others = count - len(by_rank) - len(missing)
        ranks = ", ".join(map(str, missing)) + (f" and {others:,} more" if others else "")
        raise CheckpointError(f"rank {ranks} of {count} is missing: put the files of all ranks together")
    return tuple(by_rank[rank] for rank in range(count))


def _parameters(metadata: Mapping[str, Any]) -> Iterator[ShardedParameter]:
    flatten_info = metadata.get("flatten_info") or {}
    for prefix, shards in metadata["shard_info"].items():
        for suffix, info in shards.items():
            key, full_name = (f"{prefix}.{name}" if prefix else name for name in (suffix, info["_orig_name"]))
            shape = _shape(key, info["_orig_size"])
            if full_name in flatten_info:
                parent = full_name.rpartition(".")[0]
                names, shapes, _ = flatten_info[full_name]
                full_names = [f"{parent}.{name}" if parent else name for name in names]
            else:
                full_names, shapes = [full_name], [shape]
            shapes = [_shape(key, own) for own in shapes]
            parameter = ShardedParameter(key, tuple(zip(map(original_name, full_names), shapes, strict=True)), shape)
            if not parameter.members:
                raise ValueError(f"{key} has no parameters")
            if sum(prod(member) for _, member in parameter.members) != parameter.numel:
                raise ValueError(f"{key} has {parameter.numel} elements, and its parameters have others")
            yield parameter


def _shape(key: str, sizes: Any) -> tuple[int, ...]:
    if not (isinstance(sizes, (list, tuple)) and all(type(n) is int and 0 <= n <= _MAX_SIZE for n in sizes)):
        raise ValueError(f"{key} has the size {sizes!r}")
    return tuple(sizes)
