"""Tell by its graph that a loss is a sum over samples, where gradients are averaged over devices."""

from typing import Any

import torch

_SUM = 2
"""What PyTorch's losses note of `reduction="sum"`."""
_PASSED_ON = ("Alias", "Clone", "MeanLoss", "Neg", "Reshape", "Squeeze", "ToCopy", "Unsqueeze", "View")


def is_sum_over(rows: int, loss: torch.Tensor) -> bool:
    """Return whether a tensor without dimensions is nothing but a sum over rows, or such a sum and something more.

    One that is multiplied or divided may be a mean that is made by hand.

    Args:
        rows: The batch's rows.
        loss: The tensor.
    """
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if getattr(node, "_saved_reduction", None) == _SUM:
            return True
        name = node.name()
        if name == "SumBackward0":
            size = node._saved_self_sym_sizes
            if len(size) > 0 and size[0] > 1 and int(size[0]) % rows == 0:
                return True
        elif name.startswith(("Add", "Sub", *_PASSED_ON)):
            nodes += [following for following, _ in node.next_functions]
    return False
