"""Import and export of `torch.distributed.checkpoint` folders: FSDP2's, torch_xla's under SPMD, or one process's.

Both run in one process, without a device and without a process group, in the memory that the largest tensor takes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchacc.checkpoint.other_formats.dcp_files import FILES, DcpFolder, write_dcp
from torchacc.checkpoint.other_formats.dcp_names import Contents, sort_keys
from torchacc.checkpoint.other_formats.pretrained_folder import HEAD, pretrained_files, tied_head
from torchacc.checkpoint.own_format import json_codec
from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder, StoredTensor
from torchacc.checkpoint.own_format.safetensors_files import SafetensorsLayout, plan_safetensors
from torchacc.checkpoint.own_format.unfinished import unfinished_paths
from torchacc.checkpoint.run_state import reraise_as_corrupt
from torchacc.checkpoint.save_plan import MAX_SHARD_SIZE, TensorWrite
from torchacc.checkpoint.saver import TotalProgress, write_folder
from torchacc.engines import quantized_state
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_Stored = dict[str, StoredTensor]
"""Key in the folder that is written -> the tensor in the checkpoint."""


def export_dcp(
    checkpoint: str | PathLike[str],
    target: str | PathLike[str],
    *,
    tied: Mapping[str, str] | None = None,
    progress: TotalProgress | None = None,
) -> None:
    """Convert a torchacc checkpoint to a `torch.distributed.checkpoint` folder. Runs in one process.

    The keys are those of `{"model": …, "optim": …}` with the results of `torch.distributed.checkpoint.state_dict
    .get_state_dict()`, with the optimizer flattened or not: `dcp.load()` and `set_state_dict()` load it at any number
    of processes. The state of the scheduler, the position in the data, random states, `extra` and the extra state of
    modules are not converted.

    Args:
        checkpoint: A folder of `torchacc.checkpoint.save()`, or a Hugging Face checkpoint.
        target: The folder to write. It must be empty, or not exist.
        tied: Tied parameters, name -> its name in the checkpoint, for a checkpoint that does not record them.
        progress: Called with the bytes of each tensor that is copied, and the bytes of all tensors.

    Raises:
        CheckpointError: The checkpoint is damaged, or the folder cannot be written.
    """
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already: name another folder, or remove it first")
    with CheckpointFolder(checkpoint) as folder, unfinished_paths([target], *FILES) as [path]:
        path.mkdir()
        stored: _Stored = {}
        with reraise_as_corrupt(folder.path):
            state: dict[str, Any] = {"model": _model_state(folder, {**_aliases(folder), **(tied or {})}, stored)}
            if folder.has("optimizer.json"):
                state["optim"] = _optimizer_state(folder, stored)
        total = sum(_meta(tensor).nbytes for tensor in stored.values())

        def read(key: str) -> torch.Tensor:
            tensor = stored[key].read()
            if progress is not None:
                progress(tensor.nbytes, total)
            return tensor

        write_dcp(path, state, read)


def import_dcp(
    source: str | PathLike[str],
    checkpoint: str | PathLike[str],
    config_from: str | PathLike[str] | None = None,
    *,
    parameter_names: Sequence[str] | None = None,
    optimizer_class: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    progress: TotalProgress | None = None,
) -> None:
    """Convert a `torch.distributed.checkpoint` folder to a torchacc checkpoint. Runs in one process.

    It reads the state of a model, at the top level or under "model", and of an optimizer under "optim" or "optimizer",
    keyed by parameter names, flattened or not, or by parameter numbers. Prefixes of wrappers are dropped.

    Args:
        source: A folder of `dcp.save()`.
        checkpoint: The folder to write.
        config_from: A folder with `config.json` and a tokenizer to copy.
        parameter_names: The names of the optimizer's parameters, in its order. Needed only if the optimizer's state is
            keyed by numbers that shapes cannot resolve.
        optimizer_class: The class of the optimizer, such as "AdamW", which these folders do not record; None to let an
            optimizer of any class load the state.
        max_shard_size: Maximum bytes of tensors in one file; a larger tensor gets a file of its own.
        progress: Called with the bytes of each tensor that is copied, and the bytes of all tensors.

    Raises:
        CheckpointError: The folder is incomplete, could execute code, or holds unknown entries; or the checkpoint
            cannot be written.
    """
    folder = DcpFolder(Path(source))
    contents = sort_keys(folder, parameter_names)
    if contents.left:
        _log.info("%s: left out %d entries, such as %s", source, len(contents.left), ", ".join(contents.left[:4]))
    files = {}
    if config_from is not None:
        files = pretrained_files(_existing(Path(config_from)))
        _leave_out_tied_head(folder, contents, Path(config_from))
    tensors: dict[str, torch.Tensor] = {}  # those of optimizer.json
    if contents.optimizer is not None:
        described = {
            "class": optimizer_class,
            "groups": contents.optimizer.groups,
            "values": contents.optimizer.values,
        }
        files["optimizer.json"] = (json.dumps(json_codec.encode(described, tensors, "optimizer")) + "\n").encode()
    layouts = _lay_out(folder, contents, tensors, max_shard_size)
    keys = {**contents.model, **(contents.optimizer.tensors if contents.optimizer is not None else {})}
    writes = _tensors_to_write(folder, layouts, keys, tensors)
    write_folder(checkpoint, layouts, files, writes, progress=progress)


def _model_state(folder: CheckpointFolder, aliases: Mapping[str, str], stored: _Stored) -> dict[str, torch.Tensor]:
    """Return the model's state, tied names included, on the device meta; and note where each is by its key."""
    strange = sorted(set(aliases.values()) - folder.model.keys())
    if strange:
        raise CheckpointError(f"{folder.path} holds no {', '.join(strange)}, to which other names are to be tied")
    names = {name: name for name in folder.model} | dict(aliases)
    stored |= {f"model.{name}": folder.model[source] for name, source in names.items()}
    return {name: _meta(folder.model[source]) for name, source in names.items()}


def _optimizer_state(folder: CheckpointFolder, stored: _Stored) -> dict[str, Any]:
    """Return the optimizer's state in both of the ways in which `get_state_dict()` names it; tensors as above."""
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in folder.optimizer.items():
        parameter, _, key = name.rpartition("/")
        if quantized_state.is_part(key):
            raise CheckpointError(
                f"{folder.path}: the optimizer's state of {parameter!r} is quantized in blocks of torchao's, which dcp "
                "does not have: convert a checkpoint that is saved without optimizer="
            )
        state.setdefault(parameter, {})[key] = _meta(tensor)
        stored[f"optim.state.{parameter}.{key}"] = tensor
    tensors = {name: tensor.read() for name, tensor in folder.state.items()}
    described = json_codec.decode(folder.read_json("optimizer.json"), tensors)
    for parameter, values in described["values"].items():
        state.setdefault(parameter, {}).update(values)
    groups: list[dict[str, Any]] = []
    flattened: dict[str, Any] = {}
    for group in described["groups"]:
        names = group.pop("parameters")
        groups.append({"params": names, "param_names": names, **group})
        for key, value in {**group, "param_names": names}.items():
            flattened |= {f"param_groups.{name}.{key}": value for name in names}
    return {"state": state, "param_groups": groups, **flattened}


def _meta(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _aliases(folder: CheckpointFolder) -> dict[str, str]:
    if folder.has("state.json"):
        described = folder.read_json("state.json")
        if "tied" in described:
            return dict(described["tied"])
    return tied_head(folder.path, folder.model)


def _leave_out_tied_head(folder: DcpFolder, contents: Contents, config_from: Path) -> None:
    """Store a tied head under its first name alone, as `save()` does; it is in such a folder under both."""
    others = {name: key for name, key in contents.model.items() if name != HEAD}
    for alias, name in tied_head(config_from, others).items():
        if alias in contents.model and torch.equal(
            folder.read(contents.model[alias]), folder.read(contents.model[name])
        ):
            del contents.model[alias]


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name the one with the model's config.json")
    return folder


def _lay_out(
    folder: DcpFolder, contents: Contents, tensors: Mapping[str, torch.Tensor], max_shard_size: int
) -> dict[str, SafetensorsLayout]:
    """Return the files of a checkpoint: the model's, the optimizer's, and those of tensors that others refer to."""
    stems = {"model": contents.model}
    if contents.optimizer is not None:
        stems["optimizer"] = contents.optimizer.tensors
    layouts: dict[str, SafetensorsLayout] = {}
    for stem, keys in stems.items():
        shapes = {
            name: (folder.tensors[key].properties.dtype, tuple(folder.tensors[key].size)) for name, key in keys.items()
        }
        layouts |= plan_safetensors(shapes, stem, max_shard_size)
    if tensors:
        layouts |= plan_safetensors({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, "state")
    return layouts


def _tensors_to_write(
    folder: DcpFolder,
    layouts: Mapping[str, SafetensorsLayout],
    keys: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[TensorWrite]:
    for layout in layouts.values():
        for name, region in layout.regions.items():
            full = folder.read(keys[name]) if name in keys else tensors[name]
            yield TensorWrite(region, 0, full.reshape(-1))
