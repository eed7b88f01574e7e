"""Norms under a lower compute dtype: keep the precision of running statistics, and take inputs that are not lowered."""

from typing import Any

import torch
from torch import nn

from torchacc.engines.patches.private_names import NormBase


def keep_precision_of_statistics(model: nn.Module) -> None:
    """Cast scale and shift of norms with running statistics to the statistics' dtype, as PyTorch's kernels need it.

    FSDP2 lowers a unit's parameters together. For the time of such a norm's forward they are cast up again, as instance
    attributes, which hide registered parameters of the same names.
    """
    for module in model.modules():
        if isinstance(module, NormBase) and module.affine and module.running_mean is not None:
            module.register_forward_pre_hook(_cast_up)
            module.register_forward_hook(_uncover, always_call=True)


def lower_inputs_of_norms(model: nn.Module, lowered: torch.dtype) -> None:
    """Cast float32 inputs of norms down, which PyTorch's CPU kernels refuse beside lowered weights.

    Elsewhere autocast computes such norms in float32.
    """

    def lower(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each.to(lowered) if torch.is_tensor(each) and each.is_floating_point() else each for each in args)

    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.register_forward_pre_hook(lower)


def _cast_up(module: nn.Module, args: Any) -> None:
    statistics = module.get_buffer("running_mean")
    for name in ("weight", "bias"):
        module.__dict__[name] = module.get_parameter(name).to(statistics.dtype)


def _uncover(module: nn.Module, args: Any, output: Any) -> None:
    for name in ("weight", "bias"):
        module.__dict__.pop(name, None)
