"""The small states of a checkpoint: what is in `state.json` and `optimizer.json`, and the states of random numbers."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchacc.checkpoint import model_state, optimizer_state
from torchacc.checkpoint.own_format import json_codec
from torchacc.checkpoint.own_format.safetensors_files import SafetensorsLayout, plan_safetensors
from torchacc.checkpoint.save_plan import TensorWrite
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError, in_one_line
from torchacc.logging import get_logger

_log = get_logger(__name__)

_KINDS: tuple[tuple[type, ...], ...] = ((Number,), (str,), (bytes,), (list, tuple), (Mapping,), (torch.Tensor,))
_NUMPY_WORDS = 624


@dataclass
class SmallStates:
    """The files of a checkpoint that rank 0 writes alone."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Name to content."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Copies of the tensors that the states hold."""

    def lay_out(self) -> dict[str, SafetensorsLayout]:
        """Return the file of the tensors."""
        described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return plan_safetensors(described, "state") if described else {}

    def writes(self) -> Iterator[TensorWrite]:
        """Yield the tensors and where they go."""
        for layout in self.lay_out().values():
            for name, region in layout.regions.items():
                yield TensorWrite(region, 0, self.tensors[name])


def small_states(
    sharded: ShardedModel,
    random_states: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    optimizer_values: Mapping[str, Mapping[str, Any]],
    scheduler: Any,
    loader: Any,
    extra: Any,
) -> SmallStates:
    """Collect what is neither the model's nor an optimizer's tensor.

    Args:
        sharded: The model.
        random_states: What `random_state()` gave on each process.
        optimizer: The optimizer, if one is saved.
        optimizer_values: What its state has that are not tensors, as `SavePlan` has it.
        scheduler: The scheduler, if one is saved.
        loader: The loader, if one is saved.
        extra: What the user adds.

    Raises:
        CheckpointError: It holds something that is neither numbers nor text.
    """
    described = {
        "model": sharded.plan.units[-1].module_class,
        "engine": sharded.engine.name,
        "mesh": sharded.plan.mesh.describe(),
        "tied": {alias: planned.name for planned in sharded.plan.parameters for alias in planned.aliases},
        "modules": {name: module.get_extra_state() for name, module in model_state.extra_states(sharded.model).items()},
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scheduler_class": type(scheduler).__name__,
        "loader": loader.state_dict() if loader is not None else None,
        "random": list(random_states),
        "extra": extra,
    }
    found = SmallStates()
    files = {"state.json": json_codec.encode(described, found.tensors, "state")}
    if optimizer is not None:
        names = optimizer_state.optimizer_names(sharded, optimizer)
        groups = [
            {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "parameters": of_group}
            for group, of_group in zip(optimizer.param_groups, names, strict=True)
        ]
        own = {"class": type(optimizer).__name__, "groups": groups, "values": optimizer_values}
        files["optimizer.json"] = json_codec.encode(own, found.tensors, "optimizer")
    found.files |= {name: (json.dumps(value) + "\n").encode() for name, value in files.items()}
    return found


def random_state(sharded: ShardedModel) -> dict[str, Any]:
    """Return the states of all of this process's generators of random numbers."""
    return {**sharded.engine.random_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def set_random_state(sharded: ShardedModel, saved: Sequence[Mapping[str, Any]]) -> None:
    """Put this process's generators where they were.

    Args:
        sharded: The model, whose engine has generators of its own.
        saved: What `random_state()` gave on each process.
    """
    job = sharded.engine.job
    if saved and len(saved) != job.num_processes:
        _log.info(
            "processes that saved: %d, that load: %d. The data come in the order of a run without the interruption; "
            "random numbers, such as dropout's, are others",
            len(saved),
            job.num_processes,
        )
    rank = 0 if sharded.engine.drives_all_devices else job.rank  # one program has the same numbers on all hosts
    if rank < len(saved):
        own = saved[rank]  # rank 0's decides on the order of the epochs to come
        sharded.engine.set_random_state(own)
        random.setstate(own["python"])
        np.random.set_state(own["numpy"])


@contextmanager
def reraise_as_corrupt(what: object) -> Iterator[None]:
    """Context manager that turns errors in decoding a file into a CheckpointError that names the file.

    Args:
        what: The file or folder.
    """
    try:
        yield
    except (CheckpointError, ConfigError, DataError, EngineError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} makes no sense, torchacc has not written it like that: {type(error).__name__}: "
            f"{in_one_line(error)}"
        ) from error


def check_same_structure(path: Path, part: str, own: Any, saved: Any) -> None:
    """Refuse a saved state whose values are of other kinds than those of the same names now; None goes for any.

    Raises:
        CheckpointError: It names the first.
    """
    if not isinstance(own, Mapping):
        return
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path}: the state of the {part} is a {type(saved).__name__}, and a dict is expected")
    for name in own.keys() & saved.keys():
        kind = next((kind for kind in _KINDS if isinstance(own[name], kind)), None)
        if kind is not None and saved[name] is not None and not isinstance(saved[name], kind):
            raise CheckpointError(
                f"{path}: {name!r} in the state of the {part} is a {type(saved[name]).__name__}, and it is a "
                f"{type(own[name]).__name__} now: torchacc has not written it"
            )


def check_random_states(sharded: ShardedModel, path: Path, saved: Any) -> None:
    """Refuse states of generators that those would not take, by trying.

    Args:
        sharded: The model, whose engine has generators of its own.
        path: The file, for the message.
        saved: What `random_state()` gave on each process, by any engine.

    Raises:
        CheckpointError: They would not.
    """
    try:
        if type(saved) is not list:
            raise TypeError("it is not a list")
        for state in saved:
            random.Random().setstate(state["python"])
            np.random.RandomState().set_state(state["numpy"])
            if not 0 <= state["numpy"][2] <= _NUMPY_WORDS:  # which numpy itself does not look at
                raise ValueError("numpy's position is out of range")
            sharded.engine.check_random_state(state)
            for name in state.keys() - {"python", "numpy", "torch"}:  # of this engine, or of another one
                if not isinstance(state[name], torch.Tensor) and type(state[name]) is not int:
                    raise TypeError(f"{name!r} is neither a tensor nor a seed")
    except Exception as error:  # each generator has its own
        raise CheckpointError(
            f"{path}: its random states make no sense, torchacc has not written them like that: "
            f"{type(error).__name__}: {in_one_line(error)}"
        ) from None
