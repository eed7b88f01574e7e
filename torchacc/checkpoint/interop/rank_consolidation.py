"""Plan how the shards in rank files become full tensors in one `.pth` file, or in a folder that Hugging Face opens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchacc.checkpoint.format.regular_files import read_regular
from torchacc.checkpoint.format.safetensors_files import FileRegion, plan_safetensors, safetensors_index
from torchacc.checkpoint.interop.pth import NewTensor
from torchacc.checkpoint.interop.rank_files import RankFiles, Sharded
from torchacc.checkpoint.interop.rank_optimizer import OptimizerState, read_optimizer
from torchacc.checkpoint.interop.rank_transfers import (
    ConversionPlan,
    NewFile,
    PthFile,
    SafetensorsFile,
    SmallFile,
    Source,
    Transfer,
)
from torchacc.errors import CheckpointError

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 27
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.json", "chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
)
_INPUT_EMBEDDINGS = (".wte.weight", ".embed_tokens.weight", ".word_embeddings.weight", ".embed_in.weight")
_HEAD = "lm_head.weight"


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


def plan_model(files: RankFiles, target: Path, output: Output) -> ConversionPlan:
    """Plan to write a full model.

    Args:
        files: The model's rank files.
        target: The file to write, or the folder if the format is safetensors.
        output: How.
    """
    transfers: list[Transfer] = []
    tensors = full_model(files, transfers, output)
    new = (
        [PthFile(target, {"model": tensors})]
        if output.format == "pth"
        else _hugging_face(files, tensors, target, output)
    )
    written = {file.path for file in new}
    stale = [path for path in target.glob("model*.safetensors*") if path not in written]
    return ConversionPlan(files.paths, tuple(new), tuple(transfers), tuple(stale))


def full_model(files: RankFiles, transfers: list[Transfer], output: Output) -> dict[str, Any]:
    """Return a model's full state by original name, tied aliases included, and add what it is to be copied from.

    torch_xla does not note which parameters are tied. Where the model's `config.json` says that the head is tied, and
    there is none, it is added: what a causal language model's `load_state_dict()` expects.
    """
    state: dict[str, Any] = {}
    for sharded in files.sharded_model():
        state |= full_tensors(sharded, transfers, dtype=output.dtype)
    for name, (value, dtype) in files.unsharded().items():
        state[name] = carry(value, name, transfers, dtype=dtype and _cast(dtype, output.dtype))
    aliases = dict(files.tied) or tied_head(_folder(files, output), state)
    return state | {alias: state[name] for alias, name in aliases.items() if name in state}


def full_tensors(
    sharded: Sharded, transfers: list[Transfer], *, dtype: torch.dtype | None = None, entry: str = ""
) -> dict[str, NewTensor]:
    """Return the full tensors that a parameter is made of, and add what they are to be copied from.

    Args:
        sharded: The parameter in all rank files.
        transfers: What to add to.
        dtype: What floating tensors are cast to.
        entry: Added to the tensors' names in messages.
    """
    own = _cast(sharded.slots[0].dtype, dtype)
    new = {name: NewTensor(name + entry, own, shape) for name, shape in sharded.parameter.members}
    transfers.append(Transfer(sharded.sources, tuple(new.values())))
    return new


def carry(value: Any, name: str, transfers: list[Transfer], *, dtype: torch.dtype | None = None) -> Any:
    """Return what a rank file holds with a new tensor for each one in it, each of its own, and add their transfers."""
    if isinstance(value, FileRegion):
        new = NewTensor(name, dtype or value.dtype, value.shape)
        transfers.append(Transfer((Source(value, value.numel),), (new,)))
        return new
    if isinstance(value, Mapping):
        return {key: carry(item, f"{name}.{key}" if name else str(key), transfers) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(carry(item, f"{name}.{index}", transfers) for index, item in enumerate(value))
    return value


def plan_optimizer(files: RankFiles, target: Path) -> ConversionPlan:
    """Plan to write an optimizer's full state, `{"optimizer": …}`, as that of the unsharded model has it.

    The order of ids is that of the parameters in the original groups, and in a group with flattened ones the model's
    own, as far as the files know it; `param_names` has the original names.
    """
    transfers: list[Transfer] = []
    optimizer = read_optimizer(files)
    groups = [_names(files, list(group.keys)) for group in optimizer.groups]
    ids = {name: index for index, name in enumerate(name for names in groups for name in names)}
    state = _full_states(files, optimizer, transfers)
    contents = {
        "state": {ids[name]: state[name] for name in ids if name in state},
        "param_groups": [
            {
                **carry(group.settings, "param_groups", transfers),
                "params": [ids[name] for name in names],
                "param_names": names,
            }
            for group, names in zip(optimizer.groups, groups, strict=True)
        ],
    }
    return ConversionPlan(files.paths, (PthFile(target, {"optimizer": contents}),), tuple(transfers))


def _names(files: RankFiles, keys: list[str]) -> list[str]:
    parameters = [files.parameters[key] for key in keys]
    names = [name for parameter in parameters for name, _ in parameter.members]
    if all(len(parameter.members) == 1 for parameter in parameters):
        return names
    order = {name: index for index, name in enumerate(files.order)}
    return sorted(names, key=order.__getitem__)


def _full_states(files: RankFiles, optimizer: OptimizerState, transfers: list[Transfer]) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for key, entries in optimizer.states.items():
        members = files.parameters[key].members
        for entry, value in entries.items():
            if isinstance(value, Sharded):
                parts: dict[str, Any] = dict(full_tensors(value, transfers, entry=f"/{entry}"))
            else:  # each its own: a step that parameters share is incremented once for each of them
                parts = {name: carry(value, f"{name}/{entry}", transfers) for name, _ in members}
            for name, part in parts.items():
                states.setdefault(name, {})[entry] = part
    return states


def _hugging_face(files: RankFiles, state: Mapping[str, Any], target: Path, output: Output) -> list[NewFile]:
    by_name: dict[str, NewTensor] = {}
    stored = set()
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
    new: list[NewFile] = [SafetensorsFile(target / name, layout, by_name) for name, layout in layouts.items()]
    if len(layouts) > 1:
        new.append(SmallFile(target / "model.safetensors.index.json", safetensors_index(layouts).encode()))
    folder = _folder(files, output)
    if folder.resolve() != target.resolve():
        new += [SmallFile(target / path.name, _config_data(path, output)) for path in pretrained_files(folder)]
    return new


def pretrained_files(folder: Path) -> list[Path]:
    """Return what there is in a folder of a model's `config.json` and its tokenizer."""
    names = (_CONFIG, "generation_config.json", *_TOKENIZER)
    return [folder / name for name in names if (folder / name).is_file()]


def _config_data(path: Path, output: Output) -> bytes:
    """Return the content of a file beside the model; the config names the dtype that `from_pretrained` gives it."""
    if path.name != _CONFIG or output.dtype is None:
        return path.read_bytes()
    config = _read_config(path.parent)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return (json.dumps({**config, key: str(output.dtype).removeprefix("torch.")}, indent=2) + "\n").encode()


def tied_head(folder: Path, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the head that a state lacks where `config.json` says that it is tied: its name -> its other name."""
    config = _read_config(folder)
    architectures = config.get("architectures") or []
    has_head = any(name.endswith(("LMHeadModel", "ForCausalLM")) for name in architectures)
    embeddings = [name for name in state if f".{name}".endswith(_INPUT_EMBEDDINGS)]
    if has_head and config.get("tie_word_embeddings") and _HEAD not in state and len(embeddings) == 1:
        return {_HEAD: embeddings[0]}
    return {}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / _CONFIG, _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / _CONFIG} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _folder(files: RankFiles, output: Output) -> Path:
    return output.config_from or files.paths[0].parent


def _cast(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > 1 else own
