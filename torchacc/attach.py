"""Give a sharded model its methods, and let the optimizers of its parameters find it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from torchacc import arguments
from torchacc.checkpoint import model_state, optimizer_state
from torchacc.engines import outside_gradients, registry
from torchacc.engines.patches import safetensors_writing, torch_patches
from torchacc.engines.sharded_model import HANDLE, ShardedModel
from torchacc.errors import CheckpointError, ConfigError
from torchacc.launch import progress


def attach(sharded: ShardedModel) -> None:
    """Give the model its new methods, and let the optimizers of its parameters find it."""
    model = sharded.model
    vars(model)[HANDLE] = sharded
    model.register_forward_pre_hook(lambda *_: sharded.check_call(), prepend=True)
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
    arguments.refuse_on(model, sharded.engine.device, sharded.plan.master_dtype)
    for parameter in sharded.shards:
        vars(parameter)[HANDLE] = sharded
    _watch_optimizers()
    safetensors_writing.install()


def _save_pretrained(own: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse transformers' `save_pretrained()` without full weights: it would write this process's shards alone."""
    if kwargs.get("state_dict") is None:
        if hasattr(own.__self__, "peft_config"):
            raise CheckpointError(
                "model.save_pretrained() would write the shards of this process alone. Call state = "
                "torchacc.full_state_dict(model) on every process, and on one model.save_pretrained(folder, "
                "state_dict=state), which writes the adapters; torchacc.checkpoint.save(folder, model=model) is for "
                "resuming"
            )
        raise CheckpointError(
            "model.save_pretrained() would write the shards of this process alone: torchacc.checkpoint.save(folder, "
            "model=model), called by every process, writes a folder that from_pretrained() opens. Or hand it full "
            "weights: model.save_pretrained(folder, state_dict=torchacc.full_state_dict(model))"
        )
    return own(save_directory, *args, **kwargs)


@functools.cache
def _watch_optimizers() -> None:
    """Register hooks that prepare optimizers of sharded models for their steps, also those that are made later."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    for patch in (
        torch_patches.optimizer_states(_on_state_dict, _on_load_state_dict),
        torch_patches.clearing_of_gradients(_on_zero_grad),
        torch_patches.clipping_of_gradients(_on_clip),
        torch_patches.unscaling_of_gradients(_on_unscale),
    ):
        torch_patches.hold_until_exit(patch)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    closure = _closure_of(args, kwargs)
    models = _models_of(optimizer)
    engine = registry.active_engine()
    if not models and engine is not None and engine.job.launched:
        outside_gradients.note_step(optimizer)
    for sharded in models:
        progress.stepping()
        is_among_first = sharded.before_step(optimizer, makes_gradients=closure is not None)
        if is_among_first and sharded is models[0]:
            outside_gradients.compare(optimizer, sharded.engine)
    if closure is None or not models:
        return None
    closure = _completing_gradients(models, models[0].with_mean_loss(closure))
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def _completing_gradients(models: Sequence[ShardedModel], closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure of an optimizer's step that raises where it leaves gradients incomplete."""

    @functools.wraps(closure)
    def run() -> Any:
        loss = closure()
        for sharded in models:
            sharded.status.check_window("optimizer.step()")
        return loss

    return run


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharded in _models_of(optimizer):
        sharded.after_step(optimizer)
        progress.stepped()


def _on_state_dict(optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> dict[str, Any]:
    models = _models_of(optimizer)
    for sharded in models:
        sharded.status.check_complete()
    return optimizer_state.with_metadata(models, optimizer, own)


def _on_load_state_dict(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    models = _models_of(optimizer)
    if not models:
        return given
    for sharded in models:
        sharded.status.check_complete()
    if len(models) > 1 or not optimizer_state.holds_only(models[0], optimizer):
        raise CheckpointError(
            "this optimizer holds parameters of several models, or of none that is sharded, whose states cannot be "
            "told apart: make one optimizer for each sharded model"
        )
    return optimizer_state.optim_state_dict_to_load(models[0], optimizer, given)


def _on_zero_grad(optimizer: torch.optim.Optimizer) -> None:
    for sharded in _models_of(optimizer):
        sharded.on_zero_grad(optimizer)


def _on_unscale(optimizer: torch.optim.Optimizer) -> None:
    for sharded in _models_of(optimizer):
        sharded.on_unscale()


def _on_clip(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        if isinstance(parameter, ReplacedParameter):
            parameter.grad  # noqa: B018 - which says why it cannot be clipped
        elif (sharded := getattr(parameter, "__dict__", {}).get(HANDLE)) is not None:
            sharded.status.check_clipping("clipping gradients")


def _closure_of(args: Any, kwargs: Any) -> Any:
    """Return what computes the gradients in an optimizer's step with these arguments, itself among them, or None."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def _models_of(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    owners = [vars(p).get(HANDLE) for group in optimizer.param_groups for p in group["params"]]
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


@contextmanager
def replaced_parameters_refused(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model is sharded: the parameters that it had before then refuse to be used."""
    # Weakly, so that what nobody else holds goes as soon as its shard is there.
    before = [TensorWeakRef(parameter) for parameter in model.parameters()]
    yield
    now = set(model.parameters())
    for each in before:
        parameter = each()
        if type(parameter) is nn.Parameter and parameter not in now:
            parameter.__class__ = ReplacedParameter


class ReplacedParameter(nn.Parameter):
    """A parameter that is in no model any more, as its shard has taken its place: its values are of before."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function that asks for no values and no gradient.

        Raises:
            ConfigError: It is another.
        """
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if (attribute or func.__name__) in _ASKS_FOR_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ConfigError(
            f"{attribute or func.__name__} of a parameter that was listed before accelerate(), and that sharding has "
            "replaced: an optimizer, an average or a clipping of it would do nothing to the model, without a word. "
            "List parameters after accelerate(), from model.parameters() of then; hand in an optimizer that was made "
            "before: model, loader, optimizer = torchacc.accelerate(model, loader, config, optimizer=optimizer)"
        )


_ASKS_FOR_NO_VALUES = {
    "__hash__", "__len__", "__repr__", "device", "dim", "dtype", "element_size", "is_complex", "is_floating_point",
    "is_leaf", "is_sparse", "layout", "ndim", "nelement", "numel", "requires_grad", "shape", "size",
}  # fmt: skip
