"""Which linear layers compute in float8, and why the others do not: plain data, for which torchao is not needed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from torchacc.chunked_loss.model_loss import find_head, output_layer
from torchacc.config.names import nearest
from torchacc.errors import ConfigError
from torchacc.parallel.units import fits

if TYPE_CHECKING:
    from torchacc.config import Config

MULTIPLE = 16
"""What float8's kernels need the sides of a weight to divide by, and the rows that a gradient is summed over."""
_HEADS = frozenset({"classifier", "embed_out", "lm_head", "output", "score"})
"""Names of layers outside of the repeated ones that make what the loss is computed of."""
_CONV1D = "Conv1D"
"""Transformers' linear layer of GPT-2 and its like."""
_MOST_REASONS = 4


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of a model that compute in float8."""

    recipe: str
    """`tensorwise` or `rowwise`."""
    names: tuple[str, ...]
    """The layers, in the model's order."""
    others: Mapping[str, str]
    """The linear layers that do not, each with the reason."""
    are_gathered: bool
    """Whether what devices gather of a weight is in float8."""
    are_emulated: bool
    """Whether products are those of float32, of numbers that are rounded to float8."""

    @property
    def weights(self) -> frozenset[str]:
        """Names of the layers' weights."""
        return frozenset(f"{name}.weight".lstrip(".") for name in self.names)

    def __str__(self) -> str:
        how = [self.recipe]
        how += ["gathered in float8"] if self.are_gathered else []
        how += ["emulated"] if self.are_emulated else []
        lines = [f"  {len(self.names)} linear layers in float8 ({', '.join(how)}): {_briefly(self.names)}"]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.others.items():
            by_reason.setdefault(reason, []).append(name)
        lines += [f"  not in float8, {reason}: {_briefly(names)}" for reason, names in by_reason.items()]
        return "\n".join(lines)


def select_float8(model: nn.Module, config: "Config") -> Float8Layers:
    """Choose the layers that compute in float8, as the config asks for.

    Of the layers of the class nn.Linear, that can: the ones that `compute.fp8_layers` names, else all that are large
    enough to gain by it and do not make the logits.

    Args:
        model: The user's model; it is only read.
        config: A resolved config.

    Returns:
        The layers.

    Raises:
        ConfigError: No layer is left, or a pattern of the config names none.
    """
    compute = config.compute
    linear = [name for name, module in model.named_modules() if _is_linear(module)]
    _check_patterns(model, linear, {"fp8_layers": compute.fp8_layers, "fp8_skip": compute.fp8_skip})
    chosen = _Chosen(model, config)
    others = {name: reason for name in linear if (reason := chosen.why_not(name)) is not None}
    names = tuple(name for name in linear if name not in others)
    for pattern in sorted(compute.fp8_layers or ()):
        if not any(_lies_in(name, pattern) for name in names):
            name = next(name for name in linear if _lies_in(name, pattern))
            raise ConfigError(
                f"compute.fp8_layers has the pattern {pattern!r}, and {name!r} cannot compute in float8: "
                f"{others[name]}. Leave the pattern out"
            )
    if not names:
        reasons = dict.fromkeys(others.values())
        listed = "; ".join(
            f"{reason}: {_briefly([n for n in others if others[n] == reason])}" for reason in [*reasons][:_MOST_REASONS]
        )
        raise ConfigError(
            f"compute.fp8 = True, and no linear layer of {type(model).__name__} would compute in float8"
            f"{f' ({listed})' if listed else ', as it has none'}. config.compute.fp8_min_features = {MULTIPLE} takes "
            "small layers, too; else set config.compute.fp8 = False"
        )
    gathers = compute.fp8_recipe == "tensorwise" and not config.dist.fsdp.cpu_offload
    return Float8Layers(compute.fp8_recipe, names, others, gathers, compute.fp8_emulate)


class _Chosen:
    """The choice of layers of one model."""

    def __init__(self, model: nn.Module, config: "Config") -> None:
        self._model = model
        self._compute = config.compute
        head = output_layer(model)
        self._logits = {name for name, module in model.named_modules() if module is head}
        self._chunked = find_head(model) if config.compute.chunked_loss else None
        self._holders: dict[nn.Parameter, list[str]] = {}
        for path, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(parameter, []).append(f"{path}.{leaf}".lstrip("."))

    def why_not(self, name: str) -> str | None:
        """Return why a linear layer does not compute in float8; None where it does."""
        layer, compute = self._model.get_submodule(name), self._compute
        cannot = self._why_it_cannot(name, layer)
        if cannot is not None:
            return cannot
        if any(_lies_in(name, pattern) for pattern in compute.fp8_skip or ()):
            return "as compute.fp8_skip has it"
        assert isinstance(layer, nn.Linear)
        if compute.fp8_layers is not None:
            if not any(_lies_in(name, pattern) for pattern in compute.fp8_layers):
                return "as compute.fp8_layers does not name it"
        elif self._makes_logits(name):
            return "as it makes the logits"
        elif compute.fp8_min_features is None and not _gains(layer, compute.fp8_recipe):
            return "as it is too small to gain by it"
        if min(layer.in_features, layer.out_features) < (compute.fp8_min_features or 0):
            return f"as it has fewer than {compute.fp8_min_features} inputs or outputs"
        return None

    def _why_it_cannot(self, name: str, layer: nn.Module) -> str | None:
        if type(layer) is not nn.Linear:
            return f"as a {type(layer).__name__} is not an nn.Linear"
        weight = layer._parameters.get("weight")
        if weight is None or "forward" in vars(layer):
            return "as its weight is computed, or its forward replaced"
        if len(self._holders[weight]) > 1:
            others = [other for other in self._holders[weight] if other != f"{name}.weight".lstrip(".")]
            return f"as its weight is tied to {others[0]}"
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            return f"as its inputs or outputs are not a multiple of {MULTIPLE}"
        if name == self._chunked:
            return "as compute.chunked_loss computes with its weight"
        return None

    def _makes_logits(self, name: str) -> bool:
        *path, last = name.split(".")
        return name in self._logits or (last in _HEADS and not any(part.isdigit() for part in path))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == _CONV1D


def _gains(layer: nn.Linear, recipe: str) -> bool:
    """Return whether a layer is faster in float8 on an H100, casts included, as torchao has measured it.

    The sizes are those by which torchao's own recipes filter layers.
    """
    inputs, outputs = layer.in_features, layer.out_features
    if recipe == "rowwise":
        return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
    return inputs > 4096 or outputs > 1024


def _lies_in(name: str, pattern: str) -> bool:
    """Return whether a layer, or a module around it, fits a pattern."""
    parts = name.split(".")
    return any(fits(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _check_patterns(model: nn.Module, linear: Sequence[str], options: Mapping[str, set[str] | None]) -> None:
    for option, patterns in options.items():
        for pattern in sorted(patterns or ()):
            if not any(_lies_in(name, pattern) for name in linear):
                hint = nearest(pattern, _brief_names(linear)) if linear else "it has none"
                raise ConfigError(
                    f"compute.{option} has the pattern {pattern!r}, in which no linear layer of {type(model).__name__} "
                    f"lies; {hint}"
                )


def _briefly(names: Sequence[str]) -> str:
    return ", ".join(_brief_names(names))


def _brief_names(names: Sequence[str]) -> list[str]:
    """Return the names with a * for the numbers of layers, each once."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(model)" for name in names))
