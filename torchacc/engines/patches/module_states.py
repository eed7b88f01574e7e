"""Run modules' hooks and overrides on a state as PyTorch's own `state_dict()` and `load_state_dict()` do.

By hooks, by methods of theirs in place of PyTorch's, and by the versions that a state's metadata has.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@contextmanager
def saving_full(model: nn.Module, full: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context manager in which `state_dict()` of a model and its modules has full tensors in place of parameters.

    Args:
        model: The model.
        full: The full tensors by the names of the unsharded model, those of a module in its order.
    """
    own_save: Any = nn.Module._save_to_state_dict
    modules = set(model.modules())
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in full.items():
        by_module.setdefault(name[: name.rfind(".") + 1], {})[name] = tensor

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self not in modules:
            own_save(self, destination, prefix, keep_vars)
            return
        destination.update(by_module.get(prefix, {}))
        for name, buffer in self._buffers.items():
            if buffer is not None and name not in self._non_persistent_buffers_set:
                destination[prefix + name] = buffer if keep_vars else buffer.detach()
        if type(self).get_extra_state is not nn.Module.get_extra_state:
            destination[prefix + _EXTRA_STATE] = self.get_extra_state()

    nn.Module._save_to_state_dict = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._save_to_state_dict = own_save  # type: ignore[method-assign]


@contextmanager
def loading_through(model: nn.Module, load: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which a model's own `load_state_dict()` ends in another function than PyTorch's.

    Args:
        model: The model.
        load: Called with what it calls PyTorch's with.
    """
    own_load: Any = nn.Module.load_state_dict

    def through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return load(*args, **kwargs) if self is model else own_load(self, *args, **kwargs)

    nn.Module.load_state_dict = through  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.load_state_dict = own_load  # type: ignore[method-assign]


def has_own_loading(model: nn.Module) -> bool:
    """Return whether the class of a model has a `load_state_dict()` in place of PyTorch's."""
    return type(model).load_state_dict is not nn.Module.load_state_dict


def converted(model: nn.Module, state: Mapping[str, Any], strict: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a state as its modules have changed it for themselves, and what they found wrong; load nothing.

    Args:
        model: The model.
        state: What `load_state_dict()` was called with.
        strict: As it was called.
    """
    metadata: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
    errors: list[str] = []
    own_load: Any = nn.Module._load_from_state_dict

    def call_hooks(self: nn.Module, *args: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(*args)

    def convert(module: nn.Module, part: dict[str, Any], prefix: str) -> None:
        module._load_from_state_dict(part, prefix, dict(metadata.get(prefix[:-1], {})), strict, [], [], errors)
        for name, child in module._modules.items():
            if child is not None:
                of_child = {key: value for key, value in part.items() if key.startswith(f"{prefix}{name}.")}
                for key in of_child:
                    del part[key]
                convert(child, of_child, f"{prefix}{name}.")
                part |= of_child

    found = dict(state)
    nn.Module._load_from_state_dict = call_hooks  # type: ignore[method-assign, assignment]
    try:
        convert(model, found, "")
    finally:
        nn.Module._load_from_state_dict = own_load  # type: ignore[method-assign]
    return found, errors


def call_post_hooks(model: nn.Module, keys: Any) -> None:
    """Call the hooks that PyTorch calls once a state is loaded, those of modules inside of others first.

    Args:
        model: The model.
        keys: What `load_state_dict()` is about to return, which the hooks may change.
    """
    for child in model.children():
        call_post_hooks(child, keys)
    for hook in model._load_state_dict_post_hooks.values():
        hook(model, keys)
