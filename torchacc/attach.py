"""Give a sharded model its methods, and let the optimizers of its parameters find it."""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchacc import arguments
from torchacc.checkpoint import model_state, optimizer_state
from torchacc.engines.base import HANDLE, ShardedModel
from torchacc.engines.patches import torch_patches
from torchacc.errors import CheckpointError, ConfigError
from torchacc.launch import progress

_replaced: list[weakref.ref[nn.Parameter]] = []
"""Parameters that shards have replaced in their models, as long as somebody else holds them."""


def attach(sharded: ShardedModel) -> None:
    """Give the model its new methods, and let the optimizers of its parameters find it."""
    model = sharded.model
    vars(model)[HANDLE] = sharded
    model.register_forward_pre_hook(lambda *_: sharded.status.check_usable(), prepend=True)
    model.clip_grad_norm_ = sharded.clip_grad_norm_  # type: ignore[assignment]
    for module in model.modules():
        if module._parameters or module._buffers:  # others may be shared by models, as transformers' own `gelu` is
            module.register_state_dict_post_hook(functools.partial(model_state.note_shards, sharded))
    methods: dict[str, Callable[..., Any]] = {
        "load_state_dict": model_state.load_state_dict,
        "get_shard_metadata": model_state.shard_metadata,
        "sharded_optim_state_dict": optimizer_state.sharded_optim_state_dict,
        "full_optim_state_dict": optimizer_state.full_optim_state_dict,
        "optim_state_dict_to_load": optimizer_state.optim_state_dict_to_load,
    }
    for name, function in methods.items():
        setattr(model, name, functools.partial(function, sharded))
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = functools.partial(_save_pretrained, model.save_pretrained)  # type: ignore[assignment]
    arguments.refuse_on(model)
    for parameter in sharded.local_shards:
        vars(parameter)[HANDLE] = sharded
    _watch_optimizers()


def _save_pretrained(own: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse transformers' `save_pretrained()` without full weights: it would write this process's shards alone."""
    if kwargs.get("state_dict") is None:
        raise CheckpointError(
            "model.save_pretrained() would write the shards of this process alone: torchacc.checkpoint.save(folder, "
            "model=model), called by every process, writes a folder that from_pretrained() opens. Or hand it full "
            "weights: model.save_pretrained(folder, state_dict=torchacc.full_state_dict(model))"
        )
    return own(save_directory, *args, **kwargs)


@functools.cache
def _watch_optimizers() -> None:
    """Register hooks that prepare optimizers of sharded models for their steps, also those that are made later."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _refuse_replaced_parameters(optimizer)
        for sharded in _models_of(optimizer):
            progress.stepping()
            sharded.before_step(optimizer, makes_gradients=_has_closure(args, kwargs))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for sharded in _models_of(optimizer):
            sharded.after_step(optimizer)
            progress.stepped()

    def saved(optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        return optimizer_state.with_metadata(_models_of(optimizer), optimizer, own)

    def to_load(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        models = _models_of(optimizer)
        if not models:
            return given
        if len(models) > 1 or not optimizer_state.holds_only(models[0], optimizer):
            raise CheckpointError(
                "this optimizer holds parameters of several models, or of none that is sharded, whose states cannot be "
                "told apart: make one optimizer for each sharded model"
            )
        return optimizer_state.optim_state_dict_to_load(models[0], optimizer, given)

    def cleared(optimizer: torch.optim.Optimizer) -> None:
        _refuse_replaced_parameters(optimizer)
        for sharded in _models_of(optimizer):
            sharded.on_zero_grad(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    torch_patches.hold_until_exit(torch_patches.optimizer_states(saved, to_load))
    torch_patches.hold_until_exit(torch_patches.clearing_of_gradients(cleared))
    torch_patches.hold_until_exit(torch_patches.steps_of_schedules(_refuse_replaced_parameters))


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether an optimizer's step, called with these arguments, itself among them, computes the gradients."""
    return callable(kwargs.get("closure", args[1] if len(args) > 1 else None))


def _models_of(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    owners = [vars(p).get(HANDLE) for group in optimizer.param_groups for p in group["params"]]
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


@contextmanager
def replaced_parameters_noted(model: nn.Module) -> Iterator[None]:
    """Hold a context in which a model is sharded; afterwards optimizers of replaced parameters are refused."""
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    yield
    now = {id(parameter) for parameter in model.parameters()}
    _replaced[:] = [each for each in (*_replaced, *before) if (held := each()) is not None and id(held) not in now]


def _refuse_replaced_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of parameters that are in no model any more: it would silently train nothing.

    Raises:
        ConfigError: It holds some.
    """
    if not _replaced:
        return
    held = {id(parameter) for each in _replaced if (parameter := each()) is not None}
    if any(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} was made before accelerate(), with parameters that sharding replaces, so that "
            "it would train nothing: make it after accelerate(), from the model's parameters of then, or hand it in: "
            "model, loader, optimizer = torchacc.accelerate(model, loader, config, optimizer=optimizer)"
        )
