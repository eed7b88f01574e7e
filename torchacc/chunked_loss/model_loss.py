"""Compute a model's loss in chunks: its head gives lazy logits in a forward that is given labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from torchacc.chunked_loss.cross_entropy import LOGITS_OF_A_CHUNK, LossChunks
from torchacc.chunked_loss.lazy_logits import LazyLogits
from torchacc.errors import ConfigError

Forward = Callable[..., Any]

_WITHOUT = "or set config.compute.chunked_loss = False, which needs the memory of all logits"


def find_head(model: nn.Module) -> str:
    """Return the name of the module that computes a language model's logits.

    Raises:
        ConfigError: The model has none, or transformers does not say which it is.
    """
    head = output_layer(model)
    name: str | None = next((name for name, module in model.named_modules() if name and module is head), None)
    if name is None:
        raise ConfigError(
            f"compute.chunked_loss: {type(model).__name__} has no module that computes logits from hidden states, as "
            "its get_output_embeddings() would return it, as transformers' causal and masked language models have: set "
            "config.compute.chunked_loss = False"
        )
    if _vocabulary(model.get_submodule(name)) is None:
        raise ConfigError(
            f"compute.chunked_loss: {name!r}, which computes the logits of {type(model).__name__}, is a "
            f"{type(head).__name__}, which is not a linear layer that says by its `out_features` or its `weight` how "
            "many there are: set config.compute.chunked_loss = False"
        )
    return name


def output_layer(model: nn.Module) -> nn.Module | None:
    """Return the module that computes logits, as transformers' models say; None where a model does not."""
    ask = getattr(model, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except (AttributeError, NotImplementedError):
        return None


class ModelLoss:
    """The chunked loss of one model.

    Args:
        model: The model; the forward of its head is replaced.
        option: The value of `compute.chunked_loss`.
        num_devices: Devices of one program that the batch's rows are split over.
        after: As `LossChunks` has it.
    """

    def __init__(
        self,
        model: nn.Module,
        option: bool | int,
        *,
        num_devices: int = 1,
        after: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = lambda tokens, sums: tokens,
    ) -> None:
        self._model = model
        self._name = find_head(model)
        self._head = model.get_submodule(self._name)
        self._project: Forward = self._head.forward
        self._vocabulary: int = _vocabulary(self._head) or 0
        self._size = max(LOGITS_OF_A_CHUNK // self._vocabulary, 1) if option is True else int(option)
        self._num_devices = num_devices
        self._after = after
        self._signature = signature(model.forward)
        self._is_open = False
        """Whether the forward runs that the lazy logits are of."""
        self._num_losses = 0
        self._operands: list[torch.Tensor] = []
        self._given: list[LazyLogits] = []
        self._replaced: Forward | None = vars(self._head).get("forward")
        self._head.forward = self._give_lazy_logits

    def remove(self) -> None:
        """Give the head its own forward back."""
        del self._head.__dict__["forward"]
        if self._replaced is not None:
            self._head.forward = self._replaced

    def run(self, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward; with labels its loss is computed in chunks.

        Raises:
            ConfigError: The loss was computed otherwise.
        """
        if not self._finds_labels(args, kwargs):
            return forward(*args, **kwargs)
        with self._opened():
            output = forward(*args, **kwargs)
            num_losses = self._num_losses
        if not num_losses:
            raise ConfigError(
                f"compute.chunked_loss: {type(self._model).__name__} was given labels, and computes no cross entropy "
                f"of what its head {self._name!r} returns: its loss is its own. Set config.compute.chunked_loss = False"
            )
        return output

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self._is_open, self._num_losses = True, 0
        try:
            yield
        finally:
            self._is_open = False
            for lazy in self._given:
                lazy.release()
            self._given.clear()
            self._operands.clear()

    def _finds_labels(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        names = dict(zip(self._signature.parameters, args, strict=False)) | dict(kwargs)
        return any(
            value is not None and (name == "labels" or name.endswith("_labels")) for name, value in names.items()
        )

    def _give_lazy_logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stand for the forward of the head."""
        if not self._is_open:
            if self._model.training and torch.is_grad_enabled():
                raise ConfigError(
                    f"compute.chunked_loss: {type(self._model).__name__} was called in training without labels, so "
                    "that its loss would be computed from all logits: pass `labels`, call it under torch.no_grad() or "
                    f"in model.eval() for logits, {_WITHOUT}"
                )
            return self._project(hidden, *args, **kwargs)
        if args or kwargs:
            raise ConfigError(self.explain("arguments of the head beside the hidden states, for the making"))
        device = hidden.device.type
        lowers = torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if lowers else hidden.dtype
        if torch.is_grad_enabled():
            self._check_gradients(hidden, dtype)
        return LazyLogits(hidden, self._vocabulary, dtype, self)

    def _check_gradients(self, hidden: torch.Tensor, dtype: torch.dtype) -> None:
        """Refuse gradients that would be others than those of all logits."""
        if any(module._backward_hooks or module._backward_pre_hooks for module in self._head.modules()):
            raise ConfigError(
                f"compute.chunked_loss: the head {self._name!r} has a backward hook, which would never be called, as "
                f"no gradient of its logits is ever there as a whole: give it to another module, {_WITHOUT}"
            )
        if dtype == torch.float16 and not hidden.is_meta:  # there memory is planned, and nothing computed
            raise ConfigError(
                "compute.chunked_loss in float16: its gradients are computed before a scaler has scaled the loss, and "
                "small ones would become zero: use config.compute.bf16, or set config.compute.chunked_loss = False"
            )

    def note(self, lazy: LazyLogits) -> None:
        """Record lazy logits, which hold hidden states as long as the forward runs."""
        self._given.append(lazy)

    def note_operands(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record tensors that the model computes its logits with outside of its head."""
        self._operands += tensors

    def explain(self, what: str) -> str:
        """Return why something cannot be done with lazy logits, and what to write instead."""
        if self._is_open:
            return (
                f"compute.chunked_loss: between its head and its loss {type(self._model).__name__} uses {what} of its "
                "logits, which the loss in chunks does not have: set config.compute.chunked_loss = False"
            )
        return (
            f"compute.chunked_loss: {what} of the logits of a forward with labels, which were never there as a whole: "
            f"call the model without labels for logits, under torch.no_grad() or in model.eval(), {_WITHOUT}"
        )

    def cross_entropy(
        self,
        input: Any,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """Stand for `F.cross_entropy()` of lazy logits."""
        is_old = size_average is not None or reduce is not None
        if not self._is_open or weight is not None or is_old or reduction not in ("mean", "sum"):
            raise ConfigError(self.explain("a cross entropy with weights, without reduction, or after its forward,"))
        if not isinstance(input, LazyLogits) or input.ndim != 2 or target.shape != input.shape[:1]:
            raise ConfigError(self.explain("a cross entropy with other labels than one for each token"))
        self._num_losses += 1
        weights = self._weights()
        stand_ins = {id(weight): weight.detach().requires_grad_(weight.requires_grad) for weight in weights}
        chunks = LossChunks(
            partial(self._logits_of, input.steps, stand_ins),
            size=self._size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            is_mean=reduction == "mean",
            num_devices=self._num_devices,
            after=self._after,
            stand_ins=list(stand_ins.values()),
        )
        return chunks.loss(input.hidden, target, weights)

    def _logits_of(
        self, steps: Sequence[Forward], stand_ins: Mapping[int, torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        with self._standing_in(stand_ins):
            logits: torch.Tensor = self._project(hidden)
        assert logits.shape[-1] == self._vocabulary, f"{self._name} returns {logits.shape[-1]} logits"
        for step in steps:
            logits = step(logits, stand_ins)
        return logits

    @contextmanager
    def _standing_in(self, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Replace the parameters, or unsharded weights, of the head's modules by the stand-ins."""
        missing = object()
        owners = [(owner, name) for owner in self._head.modules() for name in owner._parameters]
        before = [vars(owner).get(name, missing) for owner, name in owners]
        found = [getattr(owner, name) for owner, name in owners]
        try:
            for (owner, name), tensor in zip(owners, found, strict=True):
                if tensor is not None:
                    vars(owner)[name] = stand_ins[id(tensor)]
            yield
        finally:
            for (owner, name), old in zip(owners, before, strict=True):
                if old is missing:
                    vars(owner).pop(name, None)
                else:
                    vars(owner)[name] = old

    def _weights(self) -> list[torch.Tensor]:
        """Return what the head computes with now, each tensor once: unsharded weights in the place of parameters."""
        found = [getattr(owner, name) for owner in self._head.modules() for name in owner._parameters]
        return list({id(each): each for each in (*found, *self._operands) if each is not None}.values())


def _vocabulary(head: nn.Module) -> int | None:
    """Return how many logits a head computes for a token; None where it is not a linear layer, or an adapter of one."""
    if isinstance(head, nn.Embedding):
        return None
    found = getattr(head, "out_features", getattr(head, "nf", None))
    weight = getattr(head, "weight", None)
    if found is None and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[0]
    return found if isinstance(found, int) else None
