"""Calls that are written in another way than they are meant, answered by how to write them."""

import functools
import inspect
from collections.abc import Callable
from os import PathLike
from typing import ParamSpec, TypeVar

from torch import nn

from torchacc.config.names import did_you_mean
from torchacc.errors import CheckpointError

P = ParamSpec("P")
T = TypeVar("T")


def path_first(usage: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions that take a folder first, and a model, and all else, by name.

    Args:
        usage: How such a function is called.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        folder = next(name for name in signature.parameters if name != "self")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in signature.parameters), None)
                hint = did_you_mean(unknown, signature.parameters) if unknown else ""
                raise CheckpointError(f"{error}: {hint or f'write {usage}'}") from None
            if not isinstance(given[folder], str | PathLike):
                raise CheckpointError(f"a {type(given[folder]).__name__} in place of a folder's name: write {usage}")
            if not isinstance(given["model"], nn.Module):
                raise CheckpointError(
                    f"model = a {type(given['model']).__name__}, and not what accelerate() returned, of a tuple the "
                    f"first: write {usage}"
                )
            return function(*args, **kwargs)

        return checked

    return decorate
