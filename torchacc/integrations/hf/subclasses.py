"""Trainers that are made of transformers', such as trl's, on torchacc's engines."""

from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from torchacc.env import read_job
from torchacc.errors import ConfigError
from torchacc.integrations.hf.known_trainers import refuse_uncovered
from torchacc.integrations.hf.loop import Loop
from torchacc.integrations.hf.trainer import ShardedTrainer
from torchacc.integrations.hf.training_arguments import TrainingArguments

_classes: dict[Any, Any] = {}
"""A class of arguments -> what `arguments_for()` has made of it, so that a copy is of the same class."""


def trainer_for(kind: type[Any]) -> type[Any]:
    """Return a subclass of a trainer that trains on torchacc's engines, and takes `torchacc_config`.

    What the trainer does to its model while it is built, and how it computes its loss, stays. Its model is sharded once
    it is built, as is one that it only evaluates (trl's `ref_model`).

    Args:
        kind: A subclass of `transformers.Trainer`, such as trl's `SFTTrainer`, or of your own. Its arguments are to be
            built by `arguments_for()`.

    Raises:
        ConfigError: It is no such class, or one that is known not to be right here.
    """
    if not (isinstance(kind, type) and issubclass(kind, transformers.Trainer)):
        raise ConfigError(f"trainer_for({kind!r}): pass a subclass of transformers.Trainer")
    if issubclass(kind, ShardedTrainer):
        return kind
    refuse_uncovered(kind)
    return type(kind.__name__, (_Built, kind, Loop), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def arguments_for(kind: Any) -> type[Any]:
    """Return a subclass of a trainer's arguments that starts no device; it takes the same arguments.

    Args:
        kind: A subclass of `transformers.TrainingArguments`, such as trl's `SFTConfig`.

    Raises:
        ConfigError: It is no such class.
    """
    if not (isinstance(kind, type) and issubclass(kind, transformers.TrainingArguments)):
        raise ConfigError(f"arguments_for({kind!r}): pass a subclass of transformers.TrainingArguments")
    return kind if issubclass(kind, TrainingArguments) else _arguments_class(kind)


def _arguments_class(kind: Any) -> Any:
    if kind in _classes:
        return _classes[kind]
    names: dict[str, Any] = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__reduce__": _reduced,
        "_kind": kind,
    }
    return _classes.setdefault(kind, type(kind.__name__, (TrainingArguments, kind), names))


def _reduced(arguments: Any) -> tuple[Any, ...]:
    return _rebuilt, (arguments._kind, vars(arguments))


def _rebuilt(kind: Any, values: dict[str, Any]) -> Any:
    """Return arguments as they were copied or pickled: their class has no name by which it could be imported."""
    rebuilt_class: Any = _arguments_class(kind)
    arguments = rebuilt_class.__new__(rebuilt_class)
    vars(arguments).update(values)
    return arguments


class _Built(ShardedTrainer):
    """Builds a trainer as in a process that has no device."""

    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        _describe_job_to_accelerate()
        super().__init__(*positional, **kwargs)


def _describe_job_to_accelerate() -> None:
    """Tell accelerate's state, which libraries ask for ranks, what it would start devices to find out."""
    state = PartialState._shared_state
    if state:
        return
    job = read_job()
    state |= {
        **{"_cpu": True, "backend": None, "debug": False, "device": torch.device("cpu"), "fork_launched": False},
        **{"distributed_type": DistributedType.NO, "num_processes": job.num_processes},
        **{"process_index": job.rank, "local_process_index": job.local_rank},
    }
