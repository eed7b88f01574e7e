"""Optimizers: found by name, which of them can work on shards, and how one made before sharding goes over to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchacc.config.names import nearest
from torchacc.errors import ConfigError, shown

ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Lion",
}  # fmt: skip
"""Optimizers that update each element by itself, by the name of their class."""

_NUMBERS = {"eta", "mu", "mu_product", "step"}
"""Names of the state of torch.optim's optimizers that is one number for a parameter, whatever its shape."""


def find_optimizer(name: str, option: str = "--optimizer") -> type[torch.optim.Optimizer]:
    """Return a class of `torch.optim` by its name, in upper or lower case: `adamw` is `AdamW`.

    Args:
        name: The name.
        option: What was given the name, for the message.

    Raises:
        ConfigError: There is none.
    """
    own = torch.optim.Optimizer
    found = (each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, own))
    classes = {each.__name__: each for each in found if each is not own}
    by_lower = {known.lower(): each for known, each in classes.items()}
    if name.lower() not in by_lower:
        raise ConfigError(f"{option} = {shown(name)}: torch.optim has no such optimizer; {nearest(name, classes)}")
    return by_lower[name.lower()]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each element by itself."""
    return bool(ELEMENTWISE & {base.__name__ for base in type(optimizer).__mro__})


def check_split(name: str, *, is_elementwise: bool, num_stages: int, num_parts: int) -> None:
    """Refuse an optimizer where no process sees all layers, or all of a layer.

    Args:
        name: The name of its class.
        is_elementwise: Whether it is known to update each element by itself.
        num_stages: Stages of layers, `dist.pp.size`.
        num_parts: Parts of each layer, `dist.tp.size`.

    Raises:
        ConfigError: It would have to update each element by itself.
    """
    if is_elementwise:
        return
    if num_stages > 1:
        raise ConfigError(
            f"{name} is not known to update each element by itself, as it would have to where layers are in stages of "
            "dist.pp, none of which sees all: use an element-wise optimizer such as AdamW, or config.dist.fsdp.size"
        )
    if num_parts > 1:
        raise ConfigError(
            f"{name} is not known to update each element by itself, as it would have to where layers are split "
            "over dist.tp: use config.backend = 'xla' with config.dist.fsdp.use_spmd = True, or an "
            "element-wise optimizer such as AdamW"
        )


def is_of_torchao(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of torchao.optim's, which update each process's shard by itself."""
    return any(base.__module__ == "torchao.optim.adam" for base in type(optimizer).__mro__)


def is_quantized(value: Any) -> bool:
    """Return whether a value of an optimizer's state is numbers of low precision with the scales of their blocks."""
    return type(getattr(value, "_local_tensor", value)).__module__.startswith("torchao.")


def is_for_each_element(key: str, shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Return whether a tensor of an optimizer's state lies like its parameter: no step count, or another number.

    Args:
        key: The tensor's name in the state.
        shape: The tensor's shape.
        parameter_shape: The parameter's; that of an average beside one without dimensions is a step count's, too.
    """
    return tuple(shape) == tuple(parameter_shape) and (bool(parameter_shape) or key not in _NUMBERS)


def remap_optimizer(
    optimizer: torch.optim.Optimizer,
    shards: Mapping[torch.Tensor, nn.Parameter],
    shard_state: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace parameters by their shards in an optimizer that was made before sharding, in the same groups.

    Args:
        optimizer: The optimizer; its state, if it has any, is sharded too.
        shards: Original parameter -> the parameter that replaced it. Several may share one flat parameter.
        shard_state: Turns a state tensor of the original parameter's shape into that of its shard.

    Raises:
        ConfigError: The optimizer has state and parameters were flattened, so that the state has no place.
    """
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        # In place, as LBFGS keeps the list itself: it would go on with the parameters that are in no model any more.
        group["params"][:] = dict.fromkeys(shards.get(parameter, parameter) for parameter in group["params"])
    flattened = len(set(shards.values())) < len(shards)
    for parameter, entries in state.items():
        if entries and flattened:
            raise ConfigError(
                "the optimizer already has state, which cannot be moved to flattened parameters: hand in an optimizer "
                "that has made no step, or set config.dist.fsdp.flatten_parameters = False"
            )
        tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        alike = {key for key, value in tensors.items() if is_for_each_element(key, value.shape, parameter.shape)}
        optimizer.state[shards.get(parameter, parameter)] = {
            key: shard_state(parameter, value) if key in alike else value for key, value in entries.items()
        }
