"""Which optimizers update each element by itself, from its gradient and its own state, and so can work on shards."""

import torch

_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Lion",
}  # fmt: skip


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each element by itself."""
    return bool(_ELEMENTWISE & {base.__name__ for base in type(optimizer).__mro__})
