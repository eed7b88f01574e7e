"""Patches of PyTorch itself that hold while an engine runs, each with the versions it is for."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from packaging.specifiers import SpecifierSet

_CUDA_AUTOCAST_ASKS_FOR_TORCH_XLA = SpecifierSet(">=2.9,<2.14")


@contextmanager
def cuda_autocast_is_optional() -> Iterator[None]:
    """Let `torch.cuda.amp.autocast(dtype=torch.bfloat16)` do nothing, with PyTorch's warning, where there is no CUDA.

    So it is on a machine without torch_xla. With torch_xla installed, PyTorch takes CUDA's autocast for available
    (`torch/cuda/amp/common.py`), and raises that the device does not support bfloat16. The precision of a script
    comes from `config.compute`.
    """
    if importlib.metadata.version("torch") not in _CUDA_AUTOCAST_ASKS_FOR_TORCH_XLA:
        yield
        return
    from torch.cuda.amp import common

    original = common.amp_definitely_not_available
    common.amp_definitely_not_available = lambda: not torch.cuda.is_available()
    try:
        yield
    finally:
        common.amp_definitely_not_available = original
