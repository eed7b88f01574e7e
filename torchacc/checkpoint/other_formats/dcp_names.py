"""What the keys of a `torch.distributed.checkpoint` folder mean: which is a parameter's, which an optimizer's."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchacc.checkpoint.other_formats.dcp_files import METADATA, DcpFolder
from torchacc.errors import CheckpointError

_MODEL = re.compile(r"model|state_dict|model_state_dict")
_OPTIMIZER = re.compile(r"optim|optimizer|optimizer_\d+|optimizer_state_dict")
_OF_OPTIMIZER = re.compile(r"(state|param_groups)(?:\.(.*))?", re.DOTALL)
_WRAPPERS = {"_orig_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""What torch_xla's FSDPv2, FSDP, torch.compile and activation checkpointing put into names."""


@dataclass
class OptimizerContents:
    """An optimizer in a folder, by the model's names."""

    groups: list[dict[str, Any]]
    """Their settings, and the names of their `parameters`."""
    tensors: dict[str, str]
    """`<parameter name>/<state name>` -> key."""
    values: dict[str, dict[str, Any]]
    """Parameter name -> state name -> what is not a tensor."""


@dataclass
class Contents:
    """What a folder holds."""

    model: dict[str, str]
    """Name of a parameter or a buffer -> key."""
    optimizer: OptimizerContents | None
    left: list[str]
    """Keys of anything else."""


@dataclass
class _Keys:
    """Keys by what they are: the rest of each key -> the key."""

    model: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def sort_keys(folder: DcpFolder, parameter_names: Sequence[str] | None = None) -> Contents:
    """Find a model and its optimizer in a folder.

    Args:
        folder: The folder.
        parameter_names: Names of the optimizer's parameters, in its order; None to find them.

    Raises:
        CheckpointError: There is no model, or it cannot be known which parameter a state belongs to.
    """
    keys = _sorted_apart(folder)
    model: dict[str, str] = {}
    for name, key in keys.model.items():
        if "_flat_param" in name:
            raise CheckpointError(
                f"{folder.path}: {key} is a flat parameter of FSDP1, whose members are not noted: save it with "
                "StateDictType.SHARDED_STATE_DICT"
            )
        if key not in folder.tensors:
            keys.left.append(key)
        elif model.setdefault(_plain(name), key) != key:
            raise CheckpointError(f"{folder.path}: {model[_plain(name)]} and {key} are both {_plain(name)}")
    if not model:
        raise CheckpointError(
            f"{folder.path / METADATA} names no parameters of a model: they are looked for under 'model', or at the top"
        )
    return Contents(model, _optimizer(folder, model, keys, parameter_names), keys.left)


def _sorted_apart(folder: DcpFolder) -> _Keys:
    keys = _Keys()
    for key in [*folder.tensors, *folder.values]:
        kind, rest = _kind(folder.key_paths.get(key), key)
        if kind == "":
            keys.left.append(key)
        else:
            of_kind: dict[str, str] = getattr(keys, kind)
            if of_kind.setdefault(rest, key) != key:
                raise CheckpointError(f"{folder.path} holds both {of_kind[rest]} and {key}: save one of them alone")
    bare = [key for key in keys.left if key in folder.tensors and len(folder.key_paths.get(key, (key,))) == 1]
    if bare and (not keys.model or not folder.key_paths):
        # A model's state by itself; one of Llama's names begins with "model.", and another does not.
        keys.model = {key: key for key in [*keys.model.values(), *bare]}
        keys.left = [key for key in keys.left if key not in bare]
    return keys


def _kind(path: tuple[Any, ...] | None, key: str) -> tuple[str, str]:
    """Return what a key belongs to, a field of `_Keys` or nothing, and the rest of it."""
    parts = [str(part) for part in path] if path is not None else key.split(".")
    # Without the path it is not known which dots are in a parameter's name.
    for index, part in enumerate(parts[:-1] if path is not None else parts[:1]):
        rest = ".".join(parts[index + 1 :])
        if _MODEL.fullmatch(part):
            return "model", rest
        found = _OF_OPTIMIZER.fullmatch(rest) if _OPTIMIZER.fullmatch(part) else None
        if found:
            return ("state" if found[1] == "state" else "groups"), found[2] or ""
    return "", key


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _optimizer(
    folder: DcpFolder, model: Mapping[str, str], keys: _Keys, parameter_names: Sequence[str] | None
) -> OptimizerContents | None:
    if not keys.state and not keys.groups:
        return None
    states = _states(folder, model, keys.state)
    groups = _groups(folder, model, keys.groups)
    name_of = _namer(folder, model, groups, states, parameter_names)
    contents = OptimizerContents([], {}, {})
    for group in groups:
        names = [name_of(reference) for reference in group["params"]]
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        contents.groups.append({**settings, "parameters": names})
    held = {name for group in contents.groups for name in group["parameters"]}
    for reference, entries in states.items():
        name = name_of(reference)
        if name not in held:
            raise CheckpointError(f"{folder.path}: the optimizer has state of {name}, which is in none of its groups")
        for state, key in entries.items():
            if key in folder.tensors:
                contents.tensors[f"{name}/{state}"] = key
            else:
                contents.values.setdefault(name, {})[state] = folder.value(key)
    return contents


def _states(folder: DcpFolder, model: Mapping[str, str], keys: Mapping[str, str]) -> dict[str | int, dict[str, str]]:
    """Return the state of each parameter, by its name or number: state name -> key."""
    states: dict[str | int, dict[str, str]] = {}
    for rest, key in keys.items():
        parts = rest.split(".")
        names = ((_plain(".".join(parts[:cut])), ".".join(parts[cut:])) for cut in range(len(parts) - 1, 0, -1))
        name, state = next((split for split in names if split[0] in model), (None, ""))
        if name is None and not parts[0].isdigit():
            raise CheckpointError(f"{folder.path}: {key} is an optimizer's state of no parameter of the model")
        if name is None:
            state = ".".join(parts[1:])
        if "." in state:
            raise CheckpointError(
                f"{folder.path}: {key} lies in a container in the optimizer's state of {name or parts[0]}, which is "
                "not supported: save the model alone"
            )
        states.setdefault(int(parts[0]) if name is None else name, {})[state] = key
    return states


def _groups(folder: DcpFolder, model: Mapping[str, str], keys: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: their settings, and names or numbers of their `params`."""
    numbered: dict[int, dict[str, str]] = {}
    by_name: dict[str, dict[str, str]] = {}
    for rest, key in keys.items():
        reference, _, setting = rest.rpartition(".")
        if not rest:
            return [dict(group) for group in folder.value(key)]
        if _plain(reference) in model:
            by_name.setdefault(_plain(reference), {})[setting] = key
        elif reference.isdigit():
            numbered.setdefault(int(reference), {})[setting] = key
        else:
            raise CheckpointError(f"{folder.path}: {key} is a setting of no group and of no parameter of the model")
    if numbered:
        return [_read(folder, numbered[index]) for index in sorted(numbered)]
    groups: list[dict[str, Any]] = []
    for name, settings in by_name.items():
        own = _read(folder, settings)
        alike = next((group for group in groups if _same(group, own)), None)
        if alike is None:
            groups.append(alike := {**own, "params": []})
        alike["params"].append(name)
    return groups


def _read(folder: DcpFolder, keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: folder.read(key) if key in folder.tensors else folder.value(key) for name, key in keys.items()}


def _same(group: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    # By their text: a setting may be a tensor.
    return {key: repr(value) for key, value in group.items() if key != "params"} == {
        key: repr(value) for key, value in settings.items()
    }


def _namer(
    folder: DcpFolder,
    model: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str | int, Mapping[str, str]],
    parameter_names: Sequence[str] | None,
) -> Callable[[str | int], str]:
    """Return what finds the model's name of a parameter by which the optimizer calls it."""
    numbers = [reference for group in groups for reference in group["params"] if isinstance(reference, int)]
    noted = [name for group in groups for name in group.get("param_names") or ()]
    names: dict[int, str] = {}
    if numbers:
        given = parameter_names or ([_plain(name) for name in noted] if len(noted) == len(numbers) else None)
        if given is None:
            given = _align(folder, model, states, numbers, len(groups))
        elif len(given) != len(numbers):
            raise CheckpointError(
                f"{folder.path}: its optimizer has {len(numbers)} parameters, and parameter_names names {len(given)}"
            )
        names = dict(zip(numbers, given, strict=True))

    def name_of(reference: str | int) -> str:
        name = names.get(reference) if isinstance(reference, int) else _plain(reference)
        if name is None or name not in model:
            raise CheckpointError(
                f"{folder.path}: its optimizer has the parameter {name or reference}, which its model has not"
            )
        return name

    return name_of


def _align(
    folder: DcpFolder,
    model: Mapping[str, str],
    states: Mapping[str | int, Mapping[str, str]],
    numbers: Sequence[int],
    num_groups: int,
) -> list[str]:
    """Return the names of numbered parameters: the model's, in order, less buffers, tied names and frozen ones.

    What to leave out is known where the shapes allow one way only.
    """

    def fits(number: int, name: str) -> bool:
        tensors = (folder.tensors[key] for key in states.get(number, {}).values() if key in folder.tensors)
        shapes = {stored.size for stored in tensors if stored.size}
        return not shapes or folder.tensors[model[name]].size in shapes

    def match(numbers: Sequence[int], names: Sequence[str]) -> list[str | None]:
        left = iter(names)
        return [next((name for name in left if fits(number, name)), None) for number in numbers]

    names = list(model)
    first = match(numbers, names)  # each parameter as early as possible, and as late
    last = match(numbers[::-1], names[::-1])[::-1]
    if num_groups > 1 or None in first or first != last:
        raise CheckpointError(
            f"{folder.path}: its optimizer numbers its {len(numbers)} parameters, in {num_groups} groups, and which of "
            f"the model's {len(names)} tensors they are is not certain: pass parameter_names=, in the optimizer's order"
        )
    return [name for name in first if name is not None]
