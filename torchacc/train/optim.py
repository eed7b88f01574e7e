"""Make the optimizer that a stage names, and the schedule of its learning rate."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchacc.config.names import nearest
from torchacc.engines.fused_steps import can_fuse
from torchacc.engines.optimizers import find_optimizer
from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import ConfigError, in_one_line, shown
from torchacc.train.config import Schedule, SchedulerConfig

DECAYS: Mapping[Schedule, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""What is left of the distance to the lowest learning rate, from 1, by the progress after the warm-up, from 0 to 1."""

_NEED_MORE = {
    "LBFGS": "it computes the loss several times for each step",
    "SparseAdam": "it needs sparse gradients",
    "Muon": "it takes matrices alone, and a model has biases and norms too",
    "Rprop": "it needs the gradient of all data in each step, and parameters that are not sharded",
}
"""Optimizers that a loop of one forward and one backward per step cannot serve, and why."""
_OF_THE_SCRIPT = {"self", "params", "named_parameters"}
_IMPLEMENTATIONS = {"foreach", "fused"}
_OF_OTHER_LOOPS = {"differentiable": "no step is differentiated here", "capturable": "no CUDA graph is captured here"}
"""Options that only another loop has a use for, and why."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of torch.optim with this name, in any case.

    Raises:
        ConfigError: There is none, or it needs another loop.
    """
    found = find_optimizer(name, "optimizer.name")
    if found.__name__ in _NEED_MORE:
        reason = _NEED_MORE[found.__name__]
        raise ConfigError(f"optimizer.name = {shown(name)} cannot train here, as {reason}: use adamw")
    return found


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the optimizer does not have, or values that it does not take, before anything is built.

    Args:
        name: The optimizer's name.
        options: What is passed to it beside the parameters.

    Raises:
        ConfigError: It names the option.
    """
    cls = optimizer_class(name)
    known = inspect.signature(cls).parameters.keys() - _OF_THE_SCRIPT
    for option, value in options.items():
        if option not in known:
            raise ConfigError(
                f"optimizer.{option} = {shown(value)}: {cls.__name__} has no such option; {nearest(option, known)}"
            )
        if option in _OF_OTHER_LOOPS and value:
            raise ConfigError(f"optimizer.{option} = {shown(value)}: {_OF_OTHER_LOOPS[option]}; leave it out")
    try:
        _step_once(cls, options)
    except Exception as error:  # of any class, as not every option is checked before it is used
        problem = f"{type(error).__name__}: {in_one_line(error)}"
        raise ConfigError(f"optimizer: {cls.__name__} refuses {shown(dict(options))}: {problem}") from None


def make_optimizer(model: nn.Module, name: str, options: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer of the parameters that are trained. Weight decay leaves out biases and norms.

    It steps by PyTorch's fused kernels where there are any, unless an option says otherwise.

    Args:
        model: The model that accelerate() returned.
        name: The name of an optimizer of torch.optim, in any case.
        options: What is passed to it, such as `lr`; as `check_options()` takes them.

    Raises:
        ConfigError: There is no such optimizer; or `flatten_parameters` has joined weights with biases.
    """
    cls = optimizer_class(name)
    options = {**_implementation(model, cls, options), **options}
    decay = options.get("weight_decay", _default(cls, "weight_decay"))
    if not decay:
        return cls([parameter for parameter in model.parameters() if parameter.requires_grad], **options)
    decayed, spared = _split_for_decay(model)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return cls([group for group in groups if group["params"]], **options)


def _implementation(model: nn.Module, cls: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option for the fastest step that the model's device has."""
    engine = sharded_model(model).engine
    is_scaled = engine.config.compute.fp16  # a fused step would take over the scaler's work
    if engine.is_lazy or is_scaled or _IMPLEMENTATIONS & options.keys() or not can_fuse(cls, engine.device):
        return {}
    return {"fused": True}


def make_scheduler(optimizer: Optimizer, config: SchedulerConfig, total_steps: int) -> LambdaLR:
    """Make the scheduler of a stage, to be stepped after each step of the optimizer.

    Args:
        optimizer: The optimizer.
        config: The schedule.
        total_steps: Steps of the stage.

    Raises:
        ConfigError: The warm-up is longer than the stage.
    """
    if config.warmup_steps > total_steps:
        raise ConfigError(
            f"scheduler.warmup_steps = {config.warmup_steps}: the stage has {total_steps} steps, so that its learning "
            f"rate would never be reached: write at most {total_steps}"
        )
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))


def lr_factor(step: int, config: SchedulerConfig, total_steps: int) -> float:
    """Return what the learning rate is multiplied with in one step, counted from 0.

    The warm-up rises evenly to 1, which its last step has; the decay ends at `min_lr_ratio` after the last step.
    """
    warmup, lowest = config.warmup_steps, config.min_lr_ratio
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return lowest + (1.0 - lowest) * DECAYS[config.name](progress)


def _step_once(cls: type[Optimizer], options: Mapping[str, Any]) -> None:
    """Step a weight and a bias, as some options are looked at no earlier."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    cls(parameters, **options).step()


def _split_for_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of two or more dimensions when unsharded, and the others."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    shards = sharded_model(model).shards
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        local_shard = shards[parameter]
        is_weight = {len(shape) > 1 for _, shape in local_shard.members}
        if len(is_weight) > 1:
            raise ConfigError(
                f"optimizer.weight_decay leaves out biases and norms, which flatten_parameters joins with weights in "
                f"{local_shard.key}: write flatten_parameters: false, or weight_decay: 0"
            )
        (decayed if is_weight.pop() else spared).append(parameter)
    return decayed, spared


def _default(cls: type[Optimizer], option: str) -> Any:
    parameter = inspect.signature(cls).parameters.get(option)
    return None if parameter is None else parameter.default
