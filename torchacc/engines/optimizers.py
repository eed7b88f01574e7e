"""Which optimizers update each element by itself, from its gradient and its own state, and so can work on shards."""

from collections.abc import Sequence

import torch

_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Lion",
}  # fmt: skip

_NUMBERS = {"eta", "mu", "mu_product", "step"}
"""Names of the state of torch.optim's optimizers that is one number for a parameter, whatever its shape."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each element by itself."""
    return bool(_ELEMENTWISE & {base.__name__ for base in type(optimizer).__mro__})


def is_for_each_element(key: str, shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Return whether a tensor of an optimizer's state lies like its parameter: no step count, or another number.

    Args:
        key: The tensor's name in the state.
        shape: The tensor's shape.
        parameter_shape: The parameter's; that of an average beside one without dimensions is a step count's, too.
    """
    return tuple(shape) == tuple(parameter_shape) and (bool(parameter_shape) or key not in _NUMBERS)
