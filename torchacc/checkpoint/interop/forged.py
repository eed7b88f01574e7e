"""Check what a checkpoint says of a run beside tensors, before any of it is put into the run."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError, in_one_line

_KINDS: tuple[tuple[type, ...], ...] = ((Number,), (str,), (bytes,), (list, tuple), (Mapping,), (torch.Tensor,))
_NUMPY_WORDS = 624


@contextmanager
def making_sense(what: object) -> Iterator[None]:
    """Say of errors of what a file holds that it is the file which makes no sense.

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


def check_alike(path: Path, part: str, own: Any, saved: Any) -> None:
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


def check_random_states(path: Path, saved: Any) -> None:
    """Refuse states of generators that those would not take, by trying.

    Raises:
        CheckpointError: They would not.
    """
    try:
        if type(saved) is not list:
            raise TypeError("it is no list")
        for state in saved:
            random.Random().setstate(state["python"])
            np.random.RandomState().set_state(state["numpy"])
            if not 0 <= state["numpy"][2] <= _NUMPY_WORDS:  # which numpy itself does not look at
                raise ValueError("numpy's position is out of range")
            torch.Generator().set_state(state["torch"])
            seed = state.get("xla")
            if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
                raise ValueError("XLA's seed is no number of 64 bits")
            if not isinstance(state.get("device", state["torch"]), torch.Tensor):
                raise TypeError("the device's is no tensor")
    except Exception as error:  # each generator has its own
        raise CheckpointError(
            f"{path}: its random states make no sense, torchacc has not written them like that: "
            f"{type(error).__name__}: {in_one_line(error)}"
        ) from None
