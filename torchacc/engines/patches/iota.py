"""The numbers 0, 1, 2 and so on as one operation of XLA's."""

import functools
from typing import Any

import torch


def iota(length: int, device: torch.device) -> torch.Tensor:
    """Return 0, 1, ... length - 1 in int64; torch_xla's arange() writes them all into the program.

    That takes the host 12 ms for as many as GPT-2 has words, each time.
    """
    numbers: torch.Tensor = _operation()(torch.zeros((), dtype=torch.int64, device=device), length=length)
    return numbers


@functools.cache
def _operation() -> Any:
    import torch_xla.core.xla_op_registry as registry

    return registry.register("iota", _iota)


def _iota(zero: Any, length: int) -> Any:
    from torch_xla.core import xla_builder as xb

    return xb.Op.iota(zero.builder(), xb.mkshape(xb.Type.S64, [length]), 0) + zero.broadcast([length])
