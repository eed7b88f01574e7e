"""Weights that FSDP2 gathers in float8, while their shards stay the tensors that they are.

torchao's own way is a parameter whose shard is a tensor subclass, which would show in optimizers, checkpoints and in
all that a script computes with it. Here FSDP2 alone is told, where it asks a shard how that is gathered; what it
gathers is the same, to the last bit.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from torchacc.engines.patches.private_names import FSDPParam


class Float8Gather:
    """How one weight is gathered: FSDP2 has it in the place of the shard."""

    scale: torch.Tensor
    """The full weight's, by which it is multiplied before it is rounded; set before each forward."""

    def __init__(self, parameter: FSDPParam) -> None:
        layer: Any = parameter._module_info.module
        self._parameter = parameter
        self._mm_config = layer.linear_mm_config
        self.dtype: torch.dtype = layer.config.cast_config_weight.target_dtype

    @property
    def padded(self) -> torch.Tensor:
        """This process's rows, with those of zeros that make it as many as on the first process; of one dimension."""
        return self._parameter._sharded_param_data

    @property
    def _version(self) -> int:
        """How often the shard was written to."""
        local: Any = self._parameter.sharded_param
        return int(local._local_tensor._version)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what this process gives to be gathered, and the scale."""
        rows = self.padded.view(self._parameter.padded_sharded_param_size)
        rounded = hp_tensor_and_scale_to_float8(rows, self.scale, self.dtype, self._mm_config, GemmInputRole.WEIGHT)
        return (rounded._data.view(torch.uint8),), self.scale  # bytes: gloo does not know float8

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], scale: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the unsharded weight, and the tensors in it to be freed; or give an earlier one the scale."""
        if out is not None:
            unsharded: Any = out
            unsharded._scale = scale
            return None
        data = outputs[0].view(self.dtype)
        role = GemmInputRole.WEIGHT
        return Float8TrainingTensor(data, scale, dtype, self._mm_config, gemm_input_role=role), (data,)


class Float8Parameter(FSDPParam):
    """FSDP2's parameter of such a weight."""

    gather: Float8Gather

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.gather


class Float8Gathers:
    """All weights of a model that are gathered in float8."""

    def __init__(self, parameters: Sequence[FSDPParam], group: Any) -> None:
        """Extend FSDP2 to gather weights in float8.

        Args:
            parameters: FSDP2's; at least one.
            group: The process group of the devices that share them; None where each has all of them.
        """
        self._group = group
        self._gathers = []
        for parameter in parameters:
            parameter.__class__ = Float8Parameter
            assert isinstance(parameter, Float8Parameter)
            parameter.gather = Float8Gather(parameter)
            parameter._init_extensions()
            self._gathers.append(parameter.gather)

    @torch.no_grad()
    def update_scales(self) -> None:
        """Compute the scales of all weights as they are now, with one collective. Collective: every process.

        So they follow whatever has changed a weight: a step, a checkpoint, a script.
        """
        largest = torch.stack(torch._foreach_norm([gather.padded for gather in self._gathers], inf)).float()
        if self._group is not None:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self._group)
        for gather, scale in zip(self._gathers, amax_to_scale(largest, self._gathers[0].dtype), strict=True):
            gather.scale = scale
