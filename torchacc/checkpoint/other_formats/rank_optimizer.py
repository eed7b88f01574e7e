"""The optimizer in a set of rank files: which state belongs to which parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchacc.checkpoint.other_formats.rank_files import RankFiles
from torchacc.checkpoint.other_formats.sharded_parameters import Sharded, ShardedParameter, ShardFormat
from torchacc.checkpoint.own_format.safetensors_files import FileRegion
from torchacc.errors import CheckpointError


@dataclass(frozen=True)
class OptimizerGroup:
    """One of an optimizer's groups of parameters."""

    settings: Mapping[str, Any]
    """What `param_groups` says of it, without the parameters."""
    keys: Sequence[str]
    """The parameters in it."""


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state, in terms of parameters instead of ids."""

    groups: tuple[OptimizerGroup, ...]
    ids: Mapping[str, int]
    """What the files call each parameter."""
    states: Mapping[str, Mapping[str, Any]]
    """For each parameter that has any state, its entries: `Sharded`, or what every rank has alike, as rank 0 has it."""

    @property
    def sharded(self) -> list[Sharded]:
        """All entries that are sharded."""
        return [entry for state in self.states.values() for entry in state.values() if isinstance(entry, Sharded)]


def read_optimizer(files: RankFiles) -> OptimizerState:
    """Return the state in rank files of an optimizer.

    Raises:
        CheckpointError: It cannot be known which parameter a state belongs to, or the ranks contradict one another.
    """
    parts = [file.part("optimizer") or {} for file in files.files]
    try:
        groups = [_group(group, keys) for group, keys in _keyed(files, parts[0]["param_groups"])]
        ids = {
            key: id_
            for group, given in zip(groups, parts[0]["param_groups"], strict=True)
            for key, id_ in zip(group.keys, given["params"], strict=True)
        }
        if len(ids) < sum(len(group.keys) for group in groups):
            raise ValueError("a parameter is in it twice")
        states = {}
        for key, id_ in ids.items():
            by_rank = [part["state"].get(id_, {}) for part in parts]
            if any(by_rank):
                states[key] = _entries(files, files.parameters[key], by_rank)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{files.paths[0]}: its optimizer is not what an optimizer's state_dict() gives ({error!r})"
        ) from None
    return OptimizerState(tuple(groups), ids, states)


def _group(group: Mapping[str, Any], keys: Sequence[str]) -> OptimizerGroup:
    return OptimizerGroup({name: value for name, value in group.items() if name not in ("params", "param_names")}, keys)


def _keyed(files: RankFiles, groups: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Return each group with the parameters of its parameters, in their order."""
    if all("param_names" in group for group in groups):
        return [(group, [_key_of(files, name) for name in group["param_names"]]) for group in groups]
    number = sum(len(group["params"]) for group in groups)
    if len(groups) == 1 and number == len(files.parameters):
        return [(groups[0], list(files.parameters))]  # the model's order, as torch_xla's users make their optimizers
    raise CheckpointError(
        f"{files.paths[0]}: its optimizer has {number} parameters in {len(groups)} groups, the model has "
        f"{len(files.parameters)}, and which is which is not noted. Make the optimizer from named_parameters(), which "
        "notes it, or add the list 'param_names' to each of its groups, with keys of the model's state"
    )


def _key_of(files: RankFiles, name: str) -> str:
    # torch_xla drops a wrapper from the keys of a state dict which named_parameters() has.
    for key in (name, name.replace("_fpw_module.", "")):
        if key in files.parameters:
            return key
    for parameter in files.parameters.values():
        if [member for member, _ in parameter.members] == [name]:
            return parameter.key
    raise CheckpointError(f"{files.paths[0]}: its optimizer has {name}, which shard_metadata does not know")


def _entries(files: RankFiles, parameter: ShardedParameter, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = by_rank[0]
    for file, state in zip(files.files, by_rank, strict=True):
        if state.keys() != first.keys():
            other = ", ".join(sorted(state.keys() ^ first.keys()))
            raise CheckpointError(
                f"{file.path}: the optimizer's state of {parameter.key} differs from rank 0's in {other}: "
                "these are not files of one save"
            )
    entries: dict[str, Any] = {}
    for name, value in first.items():
        entries[name] = value
        # What has no dimension is a number that each rank has.
        if (
            isinstance(value, FileRegion)
            and value.shape
            and any(parameter.is_shard(value.shape, each, len(by_rank)) for each in ShardFormat)
        ):
            entries[name] = files.gather(parameter, f"{parameter.key}/{name}", (state[name] for state in by_rank))
        elif isinstance(value, FileRegion) and value.shape:
            raise CheckpointError(
                f"{files.paths[0]}: the optimizer's {name} of {parameter.key} has the shape {value.shape}, neither "
                "that of its parameter nor a single number: it cannot be put together"
            )
    return entries
