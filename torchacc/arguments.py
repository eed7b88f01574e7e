"""Refuse wrong arguments of `accelerate()`, and what cannot be done with a sharded model."""

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from torchacc.config import Config
from torchacc.engines.sharded_model import HANDLE
from torchacc.errors import CheckpointError, ConfigError, EngineError, UnknownNameError, shown
from torchacc.logging import get_logger

_log = get_logger(__name__)

_WRAPPERS = {
    "DataParallel": "torch.nn.DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FSDPModule": "fully_shard()",
    "FullyShardedDataParallel": "PyTorch's FullyShardedDataParallel",
    "OptimizedModule": "torch.compile()",
    "XlaFullyShardedDataParallel": "torch_xla's FullyShardedDataParallel",
}
"""Names of the classes of what is put around a model, and what they are of."""


class Accelerated(tuple[Any, ...]):
    """The tuple that `accelerate()` returns with a loader or an optimizer; using it as a model raises an error."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # such as copy and pickle look for
            raise AttributeError(name)
        raise UnknownNameError(f"{self._taken_for_a_model()}, and .{name} is the model's")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to run."""
        raise ConfigError(f"{self._taken_for_a_model()}, and is not to be called")

    def _taken_for_a_model(self) -> str:
        names = ["model", *("optimizer" if isinstance(part, torch.optim.Optimizer) else "loader" for part in self[1:])]
        return (
            f"accelerate() has returned a tuple: write `{', '.join(names)} = torchacc.accelerate(…)`. This is all of it"
        )


def check(model: Any, dataloader: Any, config: Any, optimizer: Any) -> None:
    """Refuse arguments of `accelerate()` that are something else than it takes.

    Raises:
        ConfigError: One of them is.
    """
    order = "torchacc.accelerate(model, loader, config, optimizer=optimizer)"
    if isinstance(dataloader, nn.Module) and not isinstance(model, nn.Module):
        raise ConfigError(f"accelerate() got a {_name(model)} first, and the model after it: the order is {order}")
    if isinstance(model, Accelerated):
        raise ConfigError(f"{model._taken_for_a_model()}, and accelerate() has done its work")
    if isinstance(dataloader, Config | nn.Module | torch.optim.Optimizer):
        raise ConfigError(
            f"dataloader = a {_name(dataloader)}: it stands where the loader is expected. The order is {order}; pass "
            "None for no loader, or what follows by name"
        )
    check_config("config", config, f". The order is {order}")
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer = the class {_name(optimizer)}: make one of the model's parameters, "
            f"{_name(optimizer)}(model.parameters(), lr=…)"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer = a {_name(optimizer)}: one torch.optim.Optimizer of the model is expected")


def check_config(name: str, config: Any, hint: str = "") -> None:
    """Refuse what is passed for a config and is none.

    Args:
        name: The argument's name.
        config: What was passed; None is for the default.
        hint: What the message ends with, where it is of another type.

    Raises:
        ConfigError: It is no Config.
    """
    if isinstance(config, dict):
        raise ConfigError(f"{name} = a dict: make a Config of it, torchacc.Config.from_dict({name})")
    if isinstance(config, str | PathLike):
        raise ConfigError(f"{name} = {shown(config)}: read the file, torchacc.Config.from_yaml({shown(config)})")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"{name} = a {_name(config)}: a torchacc.Config is expected{hint}")


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that something has been put around, or that PyTorch has sharded.

    Raises:
        ConfigError: It is one.
    """
    wrapper = _wrapper(model)
    if wrapper is not None:
        raise ConfigError(f"accelerate() got a model inside of {wrapper}: {_instead_of(wrapper)}")


def check_gradients(model: nn.Module) -> None:
    """Refuse lookups with sparse gradients, which no engine can exchange; warn of gradients that shards will not have.

    Raises:
        ConfigError: A module has sparse gradients.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} is an nn.{type(module).__name__} with sparse=True, and sparse gradients cannot "
                "be summed over devices: build it with sparse=False, whose numbers are the same with SGD and Adagrad, "
                "and step it with an optimizer for dense gradients, such as AdamW"
            )
    held = next((name for name, parameter in model.named_parameters() if parameter.grad is not None), None)
    if held is not None:  # a step may have used it already, as where a model comes with its optimizer's state
        _log.warning(
            "the parameter %r already has a gradient, which is dropped: a model is sharded without its gradients. Call "
            "model.zero_grad(set_to_none=True) before accelerate(), or the backward() again after it",
            held,
        )


def refuse_on(model: nn.Module, device: torch.device, dtype: str) -> None:
    """Make a sharded model refuse to be copied, moved, pickled, resized, compiled or wrapped.

    Args:
        model: The model.
        device: Where it is.
        dtype: The name of its parameters' dtype.
    """
    for module in model.modules():
        if module is model or "FSDPModule" in (each.__name__ for each in type(module).__mro__):  # or FSDP2 asserts
            vars(module)["__deepcopy__"] = functools.partial(_refuse_copy, type(module).__name__)
    model._apply = functools.partial(_refuse_move, model, device, dtype)  # type: ignore[method-assign]
    vars(model)["__reduce_ex__"] = functools.partial(_refuse_pickling, type(model).__name__)
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = _refuse_resizing  # type: ignore[assignment]
    model.compile = _refuse_compiling  # type: ignore[method-assign]
    _watch_wrappers()


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    raise EngineError(
        f"copy.deepcopy() of a sharded {name}: the copy would run on the original's shards. Build a second model and "
        "load torchacc.full_state_dict(model) into it"
    )


def _refuse_move(
    model: nn.Module, device: torch.device, dtype: str, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Take the place of Module._apply(), which .to(), .cpu() and .half() call; refuse what would move or cast."""
    own = getattr(torch, dtype)
    try:
        probe = fn(torch.empty(0, dtype=own, device=device))
    except (RuntimeError, AssertionError):  # of a device that is not there
        probe = None
    if probe is None or probe.device.type != device.type or probe.dtype != own:
        raise EngineError(
            f"the model lies sharded on {device} in {dtype} and stays there: leave out .to(), .cpu(), .half() and the "
            "like. config.compute chooses the precision, torchacc.full_state_dict(model) gives CPU weights"
        )
    return model


def _refuse_pickling(name: str, protocol: int) -> NoReturn:
    raise CheckpointError(
        f"pickling this {name}, as torch.save(model) does, would write the shards of this process alone: "
        "torchacc.checkpoint.save(folder, model=model), called by every process; or on rank 0 torch.save() of "
        "torchacc.full_state_dict(model, rank0_only=True), which every process calls"
    )


def _refuse_compiling(*args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(f"model.compile() of a model of accelerate(): {_instead_of(_WRAPPERS['OptimizedModule'])}")


def _refuse_resizing(*args: Any, **kwargs: Any) -> NoReturn:
    raise EngineError(
        "resize_token_embeddings() of a sharded model: the shards are of the old size. Call it before accelerate(); or "
        "build a model of the new size, and load torchacc.full_state_dict(model) into it"
    )


@functools.cache
def _watch_wrappers() -> None:
    """Register a hook that refuses a sharded model inside of a wrapper."""

    def refuse(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and HANDLE in vars(module) and (wrapper := _wrapper(owner)) is not None:
            raise ConfigError(f"{wrapper} around a model of accelerate(): {_instead_of(wrapper)}")

    register_module_module_registration_hook(refuse)


def _wrapper(module: nn.Module) -> str | None:
    """Return what a module has been made by, if it is a wrapper."""
    if HANDLE in vars(module):
        return None
    return next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)


def _instead_of(wrapper: str) -> str:
    if wrapper == _WRAPPERS["OptimizedModule"]:
        return (
            "leave it out. Natively config.compute.compile = True compiles the model's units; XLA compiles each step "
            "by itself"
        )
    return (
        "it would average, or shard, a second time. Leave it out: accelerate() replicates over dist.dp.size and shards "
        "over dist.fsdp.size; without a config it does what DistributedDataParallel does"
    )


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
