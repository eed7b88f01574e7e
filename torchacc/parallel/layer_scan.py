"""Decide which layers run as one loop, as plain data: those of a `ModuleList` that differ in nothing but values."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from torchacc.errors import ConfigError

_NUMBERED = {"layer_idx"}
"""Attributes that number layers, and decide over caches alone."""


def select_scanned(model: nn.Module, units: Sequence[str], *, recomputed: Sequence[str]) -> tuple[str, ...]:
    """Choose the lists of layers that are run as loops.

    Args:
        model: The model; it is only read.
        units: Names of its units.
        recomputed: Names of the modules that are recomputed in backward.

    Returns:
        Names of the `ModuleList`s.

    Raises:
        ConfigError: There are none, or their layers are not alike.
    """
    if recomputed:
        raise ConfigError(
            "config.compute.scan_layers = True recomputes each layer in backward by itself: leave memory.gc and "
            "model.gradient_checkpointing_enable() out"
        )
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.ModuleList
        and len(module) > 1
        and all(f"{name}.{key}" in units for key in module._modules)
    ]
    if not found:
        raise ConfigError(
            f"config.compute.scan_layers = True runs units that are the layers of one ModuleList as a loop, and "
            f"{type(model).__name__} has no such list of two or more: set it to False, or name the layers' class in "
            "config.dist.fsdp.wrap_layer_cls"
        )
    for name in found:
        why = next(_differences(model, name, units), None)
        if why is not None:
            raise ConfigError(
                f"config.compute.scan_layers = True runs the layers of {name!r} as a loop of one layer's code, and "
                f"{why}: set it to False"
            )
    return tuple(found)


def _differences(model: nn.Module, name: str, units: Sequence[str]) -> Iterator[str]:
    """Yield why the layers of a list cannot be one loop."""
    layers = model.get_submodule(name)
    smaller = [unit for unit in units if unit.startswith(f"{name}.") and unit.count(".") > name.count(".") + 1]
    if smaller:
        yield f"there is a smaller unit inside of them, {smaller[0]!r}"
    if getattr(getattr(model, "config", None), "scale_attn_by_inverse_layer_idx", False):
        yield "scale_attn_by_inverse_layer_idx makes attention depend on the layer's number"
    kinds = getattr(getattr(model, "config", None), "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        yield f"its config.layer_types has layers of {len(set(kinds))} kinds"
    first, *others = layers.children()
    if any(parameter in set(first.parameters()) for other in others for parameter in other.parameters()):
        yield "they share a parameter"
    if any(
        buffer_name in module._buffers and buffer_name not in module._non_persistent_buffers_set
        for module in first.modules()
        for buffer_name in module._buffers
    ):
        yield "they have buffers that a checkpoint holds, which each layer would change by itself"
    for index, other in enumerate(others, start=1):
        for (path, one), (other_path, two) in zip(first.named_modules(), other.named_modules(), strict=False):
            if path != other_path or type(one) is not type(two) or _describe(one) != _describe(two):
                yield f"layer {index} differs from the first in {path or 'itself'!r}"
                return
            if any(not _same(buffer, two._buffers[key]) for key, buffer in one._buffers.items()):
                yield f"layer {index} has a buffer of other values in {path or 'itself'!r}"
                return


def _describe(module: nn.Module) -> dict[str, object]:
    """Return what a module's computation depends on beside the values of its parameters and buffers."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key not in _NUMBERED
    }
    parameters = {
        key: None if parameter is None else (parameter.shape, parameter.dtype, parameter.requires_grad)
        for key, parameter in module._parameters.items()
    }
    return {**plain, "parameters": parameters, "buffers": list(module._buffers), "modules": list(module._modules)}


def _same(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and (one.is_meta or two.is_meta or torch.equal(one, two))
