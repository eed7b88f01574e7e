"""A model that each device has as a whole, and computes with in the dtype of its parameters: nothing is gathered.

Parameters stay the tensors that they are, and a step is PyTorch's own, but for gradients, which are averaged over the
devices where there are several.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchacc.engines.device_losses import average_scalars
from torchacc.engines.gloo import gloo_silenced
from torchacc.engines.initial_values import materialise_parameters, move_buffers
from torchacc.engines.native.activation_offload import SaveActivationsOnHost
from torchacc.engines.native.autocast import autocast_to
from torchacc.engines.native.gradient_reducer import GradientReducer
from torchacc.engines.native.gradients import accumulates
from torchacc.engines.native.native_model import NativeModel
from torchacc.engines.native.native_shards import ReplicatedShards
from torchacc.engines.native.recomputed_forward import install_recompute
from torchacc.engines.patches import torch_patches


class ReplicatedModel(NativeModel):
    """A model whose parameters are ordinary tensors."""

    _average: GradientReducer | None = None
    """What averages gradients, where there are other devices."""

    @cached_property
    def shards(self) -> ReplicatedShards:
        """What this process holds of the parameters: all of them."""
        return ReplicatedShards(self.engine, self.model, self.plan)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Move the model to the device."""
        device = self.engine.device
        move_buffers(self.model, device)
        originals = {planned.name: self.model.get_parameter(planned.name) for planned in self.plan.parameters}
        self._compile_units()
        self._install_forward(self._run)
        materialise_parameters(self.model, self.plan.parameters, self.plan, device)
        moved: dict[torch.Tensor, nn.Parameter] = {
            original: self.model.get_parameter(name) for name, original in originals.items()
        }
        for original, parameter in moved.items():
            parameter.data = parameter.data.to(device)
            parameter.grad = None  # as of a parameter that a shard replaces
            vars(parameter).update({key: value for key, value in vars(original).items() if key not in vars(parameter)})
        if self.engine.job.num_processes > 1:
            self._average = GradientReducer(dict(self.model.named_parameters()), self.status, make_group())
        if torch_patches.knows_clipping():
            self._register_total_norm()
        if self.plan.recomputed:
            install_recompute(self.model, self.plan, self._compiled)
        return moved

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward in the dtype of its parameters, and give its scalars their means over all devices."""
        device = self.engine.device.type
        if self._compiled is not None:
            kwargs = self._compiled.without_cache(kwargs)
        offloads = self.plan.activations_on_host and device != "cpu"
        with autocast_to(None, device), SaveActivationsOnHost() if offloads else nullcontext():
            output = inner(*args, **kwargs)
        return output if self._average is None else average_scalars(output, self.engine.group.all_reduce_mean)

    def _watch_backward(self, output: torch.Tensor) -> torch.Tensor:
        average = self._average
        if average is None:
            return super()._watch_backward(output)

        def note(gradient: torch.Tensor) -> None:
            if accumulates():
                average.begin()

        if output.grad_fn is not None:  # else it is a parameter
            output.register_hook(note)
        return output

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Context manager whose backwards leave this process's own gradients in the parameters."""
        with nullcontext() if self._average is None else self._average.holding():
            yield

    def _drop_window(self) -> None:
        """Leave gradients to zero_grad(): the parameters hold those of a window themselves."""
        if self._average is not None:
            self._average.drop_window()


def make_group() -> dist.ProcessGroup:
    """Return a group of all processes that nothing else uses. Collective: every process."""
    with gloo_silenced():
        group: dist.ProcessGroup = dist.new_group()
    return group
