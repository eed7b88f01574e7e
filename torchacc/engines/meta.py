"""Models on the meta device: a checkpoint gives them their values, or the initialisation that was recorded."""

from collections.abc import Iterable

import torch
from torch import nn

from torchacc.engines.deferred import take_values
from torchacc.errors import ConfigError
from torchacc.parallel.plan import PlannedParameter

_UNTOUCHED = -7919
"""Stands in a buffer until the model has computed it."""


def materialise_buffers(model: nn.Module) -> None:
    """Give the buffers that lie on the meta device memory on the host, in place.

    One whose initialisation was recorded gets it. Of the others a persistent one is zeros until a checkpoint is
    loaded, and one that no checkpoint holds is computed by the model's own `_init_weights()`, as transformers' models
    have it.

    Raises:
        ConfigError: A buffer that no checkpoint holds cannot be computed.
    """
    _make_recorded_buffers(model)
    for prefix, module in model.named_modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in on_meta:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")
        computed = [name for name in on_meta if name in module._non_persistent_buffers_set]
        for name in computed:
            module.get_buffer(name).fill_(_UNTOUCHED)
        init_weights = getattr(model, "_init_weights", None)
        if computed and callable(init_weights):
            with torch.no_grad():
                init_weights(module)
        left = [name for name in computed if module.get_buffer(name).eq(_UNTOUCHED).any()]
        if left:
            raise ConfigError(
                f"the buffer {left[0]!r} of {prefix or 'the model'!r} ({type(module).__name__}) is on the meta device, "
                "no checkpoint holds it, and the model has no _init_weights() that computes it: build the module on "
                "the CPU, or register the buffer with persistent=True"
            )


def _make_recorded_buffers(model: nn.Module) -> None:
    made = {buffer: take_values(buffer) for buffer in model.buffers()}
    for module in model.modules():
        module._buffers.update({name: made[b] for name, b in module._buffers.items() if b is not None})


def materialise_parameters(model: nn.Module, parameters: Iterable[PlannedParameter], device: torch.device) -> None:
    """Replace parameters on the meta device by ones with memory, in place.

    Their values are those that their initialisation gives them, where it was recorded, else undefined.
    """
    for planned in parameters:
        old = model.get_parameter(planned.name)
        if not old.is_meta:
            continue
        values = take_values(old)
        if values.is_meta:
            values = torch.empty(planned.shape, dtype=old.dtype, device=device)
        new = nn.Parameter(values.to(device).contiguous(), requires_grad=planned.trainable)
        for name in planned.names:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = new
