"""What model families need to train well on XLA; each patch has the versions that it is for.

A patch of another library is a context, entered for one forward of a sharded model and undone when it ends.
"""

import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchacc.engines.patches import dense_experts, transformers_masks
from torchacc.engines.patches.softmax_lowerings import all_rows_see_something
from torchacc.engines.patches.split_heads import in_autocast_dtype
from torchacc.logging import get_logger

_log = get_logger(__name__)

Attention = Callable[..., torch.Tensor]
"""Takes what `scaled_dot_product_attention()` takes."""


def prepare(model: nn.Module, *, partitioned: bool, spread: Collection[str] = ()) -> None:
    """Make the changes to a model that last.

    Args:
        model: The user's model.
        partitioned: Whether XLA partitions its program over devices.
        spread: The names of modules whose experts are spread over these, in a way of computing of their own.
    """
    _use_static_experts(model, {model.get_submodule(name) for name in spread})
    if partitioned:
        _use_partitionable_layer_norm(model)
        _keep_samples_and_tokens_apart(model)


@contextmanager
def patches(replace_attention: Callable[[Attention], Attention] | None = None) -> Iterator[None]:
    """Hold the patches of other libraries for one forward.

    Args:
        replace_attention: Returns what computes attention in place of PyTorch's function.
    """
    with (
        _attention_in_one_dtype(replace_attention),
        transformers_masks.without_questions(),
        dense_experts.without_copies(),
    ):
        yield


@contextmanager
def _attention_in_one_dtype(replace_attention: Callable[[Attention], Attention] | None) -> Iterator[None]:
    """Give attention's inputs the dtype of autocast, which XLA's leaves as they are, unlike that of other devices.

    Queries and keys that were turned by their positions are float32, and values are not.
    """
    original = functional.scaled_dot_product_attention
    compute = original if replace_attention is None else replace_attention(original)

    def lowered(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.get_autocast_dtype("xla")) if is_float else value

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("xla"):
            args, kwargs = tuple(map(lowered, args)), {name: lowered(value) for name, value in kwargs.items()}
        has_mask = kwargs.get("attn_mask") is not None or any(value is not None for value in args[3:4])
        with nullcontext() if has_mask else all_rows_see_something():
            return compute(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def chooses_experts(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers that lets its experts' implementation be chosen."""
    can_choose = getattr(module, "_can_set_experts_implementation", None)
    return can_choose is not None and bool(can_choose())


def _use_static_experts(model: nn.Module, others: Collection[nn.Module]) -> None:
    """Switch mixtures of experts to shapes that do not depend on the data: others would compile at every step.

    Also those of a model inside of another, which transformers tells nothing of the inner one's experts. But for models
    that have some of the `others`.
    """
    for module in model.modules():
        if not chooses_experts(module) or any(each in others for each in module.modules()):
            continue
        if getattr(module.config, "_experts_implementation", None) != dense_experts.COPYING:
            _log.info("mixture of experts: each expert computes all tokens, in shapes that do not depend on the data")
            module.set_experts_implementation(dense_experts.COPYING)  # type: ignore[operator]


def _keep_samples_and_tokens_apart(model: nn.Module) -> None:
    """Compute transformers' Conv1D, the linear layer of GPT-2, without joining samples and tokens into one dimension.

    Between a matmul of joined ones and a sum over a token's features XLA does not fuse, and writes what it could keep.
    """
    for module in model.modules():
        if (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D"):
            module.forward = types.MethodType(_conv1d, module)


def _conv1d(self: Any, x: torch.Tensor) -> torch.Tensor:
    tokens, weight, bias = in_autocast_dtype(x, self.weight, self.bias)
    return torch.einsum("...i,io->...o", tokens, weight) + bias


def _use_partitionable_layer_norm(model: nn.Module) -> None:
    """Compute LayerNorm from means: XLA's own lowering cannot be partitioned, and gathers all activations."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = types.MethodType(_layer_norm, module)  # type: ignore[method-assign]


def _layer_norm(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(-len(self.normalized_shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + self.eps)
    if self.weight is not None:
        y = y * self.weight
    if self.bias is not None:
        y = y + self.bias
    # Under autocast PyTorch's layer_norm returns float32 too.
    return y if torch.is_autocast_enabled("xla") else y.to(x.dtype)
