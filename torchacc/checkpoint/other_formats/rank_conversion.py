"""Consolidate rank files into full tensors, or reshard them for another number of ranks: no device, no job."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any, Literal

import torch

from torchacc.checkpoint.other_formats.conversion import (
    ConversionPlan,
    NewFile,
    Progress,
    execute,
    pth_file,
    safetensors_file,
    small_file,
    verified_sources,
)
from torchacc.checkpoint.other_formats.new_tensors import NewTensor
from torchacc.checkpoint.other_formats.pretrained_folder import pretrained_files, tied_head
from torchacc.checkpoint.other_formats.rank_contents import full_model, full_optimizer, resharded
from torchacc.checkpoint.other_formats.rank_files import Part, RankFiles, find_rank_files
from torchacc.checkpoint.own_format.safetensors_files import plan_safetensors, safetensors_index
from torchacc.errors import CheckpointError


@dataclass(frozen=True)
class Output:
    """How a consolidated model is written."""

    format: Literal["pth", "safetensors"] = "pth"
    """One `.pth` file, `{"model": …}`, or a folder that `from_pretrained` opens."""
    max_shard_size: int | None = None
    """Bytes of tensors in one safetensors file."""
    dtype: torch.dtype | None = None
    """What floating tensors are cast to; None leaves them as they are."""
    config_from: Path | None = None
    """The folder with `config.json` and the tokenizer; None for that of the rank files."""


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    workers: int | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Consolidate the rank files of `torchacc.save(…, master_only=False)`, or of torch_xla's FSDP, into one model.

    It runs in one process, without a device, and needs memory for a few chunks only. The output gets its name once the
    checksums of everything that was read are verified.

    Args:
        ckpt_prefix: A folder, or the prefix of the paths of the rank files.
        ckpt_suffix: A glob pattern for the rest of their paths. Other files are ignored.
        save_path: The file to write; if empty, `consolidated.pth` in the folder, or
            `ckpt_prefix + "_consolidated.pth"`.
        save_model: If True, the file `{"model": …}` is written, otherwise the tensors are consolidated in memory.
        workers: Number of threads that copy; None for one per core, up to 8.
        verify: If True, the checksums of all tensors in the rank files are verified before anything is written, and the
            output is read back. Otherwise only the checksums of what is copied are verified.
        progress: Called from any thread with the number of bytes processed since its last call.

    Returns:
        The unsharded tensors by original name, on the CPU, with tied names on the same memory, and the path of the
        file. The tensors are mapped from the file, and read when they are used. The path is None if no file is written.

    Raises:
        CheckpointError: A rank file is missing, damaged, duplicated, or of another save; or the output cannot be
            written.
    """
    files = find_model_files(ckpt_prefix, ckpt_suffix)
    if not save_model:
        return _in_memory(files, workers), None
    target = _target(ckpt_prefix, save_path, Output())
    execute(_plan_model(files, target, Output()), workers=workers, verify=verify, progress=progress)
    state: dict[str, Any] = torch.load(target, mmap=True, weights_only=True)["model"]
    return state, str(target)


def plan_consolidation(prefix: str, suffix: str, save_path: str, output: Output) -> ConversionPlan:
    """Plan what `consolidate_sharded_model_checkpoints()` does, in any format; a folder of safetensors has no `.pth`.

    Raises:
        CheckpointError: The files are not a complete set.
    """
    return _plan_model(find_model_files(prefix, suffix), _target(prefix, save_path, output), output)


def find_model_files(prefix: str, suffix: str) -> RankFiles:
    """Return the rank files of a model that are in a folder, or whose paths begin with a prefix; checked.

    Raises:
        CheckpointError: They are not a complete set.
    """
    if Path(prefix).is_dir():
        suffix = suffix.lstrip("/")
        return find_rank_files(_matching(Path(prefix), suffix), "model", where=str(Path(prefix) / suffix))
    # What exists is meant as it is named, whatever characters it has; anything else may be a pattern.
    found = glob(escape(prefix) + suffix)
    if not found:
        ends = [index + 1 for index, character in enumerate(prefix) if character == "/"]
        there = max((end for end in ends if Path(prefix[:end]).is_dir()), default=0)
        found = glob(escape(prefix[:there]) + prefix[there:] + suffix)
    return find_rank_files(map(Path, found), "model", where=prefix + suffix)


def plan_conversion(
    folder: Path,
    parts: Iterable[Part],
    *,
    num_ranks: int = 1,
    target: Path | None = None,
    patterns: Mapping[Part, str | None] | None = None,
    names: Mapping[Part, str | None] | None = None,
    output: Output | None = None,
) -> ConversionPlan:
    """Plan to consolidate or reshard the rank files in a folder.

    Args:
        folder: Where they are.
        parts: What to convert.
        num_ranks: How many rank files to write; 1 consolidates.
        target: The folder to write into; None for the same one.
        patterns: Which files to read, for a part; by default `rank-*-of-*-<part>.pth`, or else `rank-*-of-*.pth`.
        names: How to name what is written, for a part; by default `<part>_consolidated.pth`, or
            `rank-*-of-*-<part>.pth`, in which the first star is the rank and the second one the number of ranks.
        output: How to write a consolidated model.

    Raises:
        CheckpointError: The files are not complete sets, or the options contradict one another; or, where no patterns
            are given, the parts are of different numbers of ranks.
    """
    if num_ranks < 1:
        raise CheckpointError(f"{num_ranks} ranks cannot be written: give 1 to consolidate, or more to reshard")
    output, target = output or Output(), target or folder
    if num_ranks > 1 and output != Output(config_from=output.config_from):
        raise CheckpointError("a format, a dtype and a size of files are options of consolidating: reshard to 1")
    given = {part: (patterns or {}).get(part) for part in parts}
    found = {part: _find(folder, part, pattern) for part, pattern in given.items()}
    counts = {part: len(files.files) for part, files in found.items()}
    if len(set(counts.values())) > 1 and not any(given.values()):
        each = " and ".join(f"the {part} of {count} ranks" for part, count in counts.items())
        raise CheckpointError(
            f"{folder} has {each}: they are not of one save. Say which with patterns, or take one part"
        )
    plans = []
    for part, files in found.items():
        name = (names or {}).get(part)
        if num_ranks > 1:
            path_of = _namer(target, name or f"rank-*-of-*-{part}.pth", num_ranks)
            new = [pth_file(path_of(rank), content) for rank, content in enumerate(resharded(files, num_ranks))]
            plans.append(ConversionPlan(files.states, tuple(new)))
        elif part == "optimizer":
            file = pth_file(target / (name or "optimizer_consolidated.pth"), {"optimizer": full_optimizer(files)})
            plans.append(ConversionPlan(files.states, (file,)))
        else:
            is_folder = output.format == "safetensors"
            plans.append(
                _plan_model(files, target if is_folder else target / (name or "model_consolidated.pth"), output)
            )
    return ConversionPlan(
        sources=tuple(dict.fromkeys(source for plan in plans for source in plan.sources)),
        files=tuple(file for plan in plans for file in plan.files),
        stale=tuple(path for plan in plans for path in plan.stale),
    )


def _plan_model(files: RankFiles, target: Path, output: Output) -> ConversionPlan:
    """Plan to write a full model into a file, or into a folder if the format is safetensors."""
    state = _with_tied(files, output)
    if output.format == "pth":
        return ConversionPlan(files.states, (pth_file(target, {"model": state}),))
    new = _hugging_face(files, state, target, output)
    written = {file.path for file in new}
    stale = [path for path in target.glob("model*.safetensors*") if path not in written]
    return ConversionPlan(files.states, tuple(new), tuple(stale))


def _with_tied(files: RankFiles, output: Output) -> dict[str, Any]:
    """Return a model's full state with the aliases of tied parameters.

    torch_xla does not note which parameters are tied. Where the model's `config.json` says that the head is tied, and
    there is none, it is added: what a causal language model's `load_state_dict()` expects.
    """
    state = full_model(files, output.dtype)
    aliases = dict(files.tied) or tied_head(_folder(files, output), state)
    return state | {alias: state[name] for alias, name in aliases.items() if name in state}


def _hugging_face(files: RankFiles, state: Mapping[str, Any], target: Path, output: Output) -> list[NewFile]:
    by_name: dict[str, NewTensor] = {}
    stored: set[NewTensor] = set()
    for name, value in state.items():
        if not isinstance(value, NewTensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__} and no tensor: write a .pth file, which can hold it"
            )
        if value not in stored:  # a tied one is stored once
            by_name[name] = value
            stored.add(value)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in by_name.items()}
    layouts = plan_safetensors(shapes, "model", output.max_shard_size)
    new: list[NewFile] = [safetensors_file(target / name, layout, by_name) for name, layout in layouts.items()]
    if len(layouts) > 1:
        new.append(small_file(target / "model.safetensors.index.json", safetensors_index(layouts).encode()))
    folder = _folder(files, output)
    if folder.resolve() != target.resolve():
        new += [small_file(target / name, data) for name, data in pretrained_files(folder, output.dtype).items()]
    return new


def _folder(files: RankFiles, output: Output) -> Path:
    return output.config_from or files.paths[0].parent


def _target(prefix: str, save_path: str, output: Output) -> Path:
    if save_path:
        return Path(save_path)
    ending = ".pth" if output.format == "pth" else ""
    if Path(prefix).is_dir():
        return Path(prefix) / f"consolidated{ending}"
    return Path(f"{prefix}_consolidated{ending}")


def _find(folder: Path, part: Part, pattern: str | None) -> RankFiles:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name the one that the rank files are in")
    tried = [pattern] if pattern else [f"rank-*-of-*-{part}.pth", "rank-*-of-*.pth"]
    for each in tried:
        paths = _matching(folder, each)
        if paths:
            return find_rank_files(paths, part, where=str(folder / each))
    raise CheckpointError(f"{folder} has no files {' or '.join(tried)}")


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{pattern!r} is not a pattern of files in {folder}: {error}") from None


def _namer(folder: Path, pattern: str, num_ranks: int) -> Callable[[int], Path]:
    if pattern.count("*") != 2:
        raise CheckpointError(f"{pattern!r} has to have two stars, for the rank and the number of ranks")
    before, between, after = pattern.split("*")
    return lambda rank: folder / f"{before}{rank}{between}{num_ranks}{after}"


def _in_memory(files: RankFiles, workers: int | None) -> dict[str, Any]:
    state = _with_tied(files, Output())
    new = {value: None for value in state.values() if isinstance(value, NewTensor)}
    with verified_sources(new, files.states, workers):
        tensors = {each: each.read() for each in new}
    return {name: tensors[value] if isinstance(value, NewTensor) else value for name, value in state.items()}
