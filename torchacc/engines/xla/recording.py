"""Record a training step for devices that are not there: nothing is moved, compiled or run, and nothing has a value."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchacc.engines.xla import runtime, tpu
from torchacc.engines.xla.partition import Spec
from torchacc.engines.xla.spmd import SpmdEngine
from torchacc.parallel.plan import ShardingPlan


@dataclass(frozen=True)
class Input:
    """A parameter of a recorded program."""

    sharding: str
    """How it lies on the devices, as XLA writes it."""
    is_donated: bool
    """Whether the program may write its result into the input's memory, as a step does with weights and state."""


@dataclass(frozen=True)
class Program:
    """A program for all devices of a mesh, which XLA's partitioner has not seen yet."""

    hlo: bytes
    """A serialized `HloModuleProto`."""
    inputs: tuple[Input, ...]
    """In the order of the program's parameters."""
    axes: tuple[int, ...] = ()
    """The sizes of the mesh's axes, the slowest first: devices are numbered along them. Empty where that is unknown."""


class RecordingEngine(SpmdEngine):
    """The SPMD engine for a mesh of any size, whose tensors have a shape, a dtype, a sharding and no values."""

    host: ClassVar[torch.device] = torch.device("meta")

    def __init__(self, *, platform: str, **options: Any) -> None:
        super().__init__(**options)
        self._platform = platform
        self._shardings: dict[int, str] = {}
        """How each tensor that was placed on the devices lies there, by torch_xla's number of it."""
        self._batches: set[int] = set()
        """Those of a batch, or of an update's numbers, which the step does not change."""

    @property
    def has_tpu_kernels(self) -> bool:
        """Whether programs may hold kernels that are written for TPUs: where that is what is recorded for."""
        return self._platform == tpu.PLATFORM

    @property
    def drops_barriers(self) -> bool:
        """Whether the compiler that is recorded for takes barriers away, as that of the CPU alone does."""
        return False

    def setup(self, plan: ShardingPlan) -> None:
        """Start the runtime. The recorded program does not depend on the number of its devices."""
        runtime.start(num_devices=2, spmd=True)

    def move_inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors that are split as those of a batch would be."""
        made = super().move_inputs(tensors)
        self._batches.update(map(_number, made))
        return made

    def transfer(self, tensors: Sequence[torch.Tensor], specs: Sequence[Spec | None]) -> list[torch.Tensor]:
        """Return tensors that are split as those of another engine would be, without values."""
        from torch_xla.core import xla_builder

        made = []
        for tensor, spec in zip(tensors, specs, strict=True):
            new = xla_builder.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
            spec = spec or (None,) * tensor.dim()
            self._shardings[_number(new)] = self.partition(spec).in_hlo()
            # Said in the program, too: what updates the tensor in place is then split alike, as that of a real one is.
            self.annotate(new, spec)
            made.append(new)
        return made

    def sync(self, *, wait: bool = False) -> None:
        """Keep what has been recorded."""

    def program(self, loss: torch.Tensor, kept: Iterable[torch.Tensor]) -> Program:
        """Return the program that computes a loss and what a step has changed.

        Args:
            loss: Of shape ().
            kept: All parameters, buffers and optimizer state on the devices, after the step.
        """
        from torch_xla import _XLAC

        after = {_number(tensor): tensor for tensor in kept}
        changed = [tensor for number, tensor in after.items() if number not in self._shardings]
        donated = self._shardings.keys() - after.keys() - self._batches
        outputs = [loss.detach(), *changed]
        numbers, _ = _XLAC._get_tensors_xla_device_data_node(outputs)
        inputs = [Input(self._shardings.get(number, "{replicated}"), number in donated) for number in numbers]
        return Program(_XLAC._get_xla_tensors_hlo_proto(outputs), tuple(inputs), self.mesh.shape)


@contextmanager
def named_operations(model: nn.Module) -> Iterator[None]:
    """Context manager in which what a module's forward records bears the module's name."""
    from torch_xla import _XLAC

    scopes: list[Any] = []
    handles: list[Any] = []
    for name, module in model.named_modules():
        if name:
            enter = functools.partial(lambda name, *_: scopes.append(_XLAC.profiler.scope_pusher(name)), name)
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(lambda *_: scopes.pop() and None, always_call=True))
    _XLAC._set_ir_debug(True)
    try:
        yield
    finally:
        _XLAC._set_ir_debug(False)
        for handle in handles:
            handle.remove()


def _number(tensor: torch.Tensor) -> int:
    from torch_xla import _XLAC

    return int(_XLAC._xla_get_tensor_id(tensor))
