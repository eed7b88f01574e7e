"""Run a function of another library with some of its module's globals replaced, for that call alone."""

import functools
import importlib.metadata
import types
from collections.abc import Callable
from typing import Any

_INSTEAD = "Install those that it is tested with: `pip install 'transformers==5.23.*' 'accelerate==1.15.*'`"


def method_of(kind: type, name: str) -> Callable[..., Any]:
    """Return a method of another library's class.

    Raises:
        ImportError: It has none of that name: it is of a version that is not known here.
    """
    found: Callable[..., Any] | None = getattr(kind, name, None)
    if found is None:
        raise ImportError(
            f"transformers {importlib.metadata.version('transformers')}: {kind.__name__} has no {name}(), which "
            f"torchacc keeps from starting devices of its own. {_INSTEAD}"
        )
    return found


def with_globals_replaced(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a function with globals of its module replaced; the module itself is not changed.

    Raises:
        ImportError: The function does not use one of the names: it is of a version that is not known here.
    """
    code = function.__code__
    unknown = sorted(names.keys() - set(code.co_names))
    if unknown:
        raise ImportError(
            f"transformers {importlib.metadata.version('transformers')}: {function.__qualname__} does not use "
            f"{', '.join(unknown)}, by which torchacc keeps it from starting devices of its own. {_INSTEAD}"
        )
    copy = types.FunctionType(
        code, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)
