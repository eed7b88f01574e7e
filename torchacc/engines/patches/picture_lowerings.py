"""Resizing and pooling of pictures, which torch_xla computes in another way than PyTorch."""

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from torchacc.engines import registry


def nearest(
    x: torch.Tensor, size: Sequence[int], scale_h: float | None = None, scale_w: float | None = None
) -> torch.Tensor:
    """Resize pictures; torch_xla goes by their sizes, also where the caller gives a scale that does not divide them."""
    for dim, after, scale in zip((2, 3), size, (scale_h, scale_w), strict=True):
        before = x.shape[dim]
        ratio = 0.5 if after == 2 * before else _ratio(before, after, scale)
        place = (torch.arange(after, device=x.device) * ratio).long().clamp(max=before - 1)
        x = x.index_select(dim, place)
    return x


def bilinear(
    x: torch.Tensor,
    size: Sequence[int],
    align_corners: bool,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> torch.Tensor:
    """Resize pictures linearly; torch_xla goes by their sizes here, too."""
    if not x.is_floating_point():
        wide = bilinear(x.float(), size, align_corners, scale_h, scale_w)
        return wide.round().to(x.dtype)
    for dim, after, scale in zip((2, 3), size, (scale_h, scale_w), strict=True):
        before = x.shape[dim]
        index = torch.arange(after, device=x.device)
        if align_corners:
            place = index * ((before - 1) / max(after - 1, 1))
        else:
            place = ((index + 0.5) * _ratio(before, after, scale) - 0.5).clamp(min=0)
        low = place.long().clamp(max=before - 1)
        weight = (place - low).to(x.dtype).view(-1, *[1] * (3 - dim))
        high = (low + 1).clamp(max=before - 1)
        x = x.index_select(dim, low) * (1 - weight) + x.index_select(dim, high) * weight
    return x


def _ratio(before: int, after: int, scale: float | None) -> float:
    """Return how far apart in a picture the places of neighbours in the resized one are, as PyTorch has it."""
    return before / after if scale is None or after == before else 1 / scale


def max_pool_values(num_dims: int, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the largest of each window; torch_xla's own is for windows without gaps alone."""
    values: torch.Tensor = getattr(torch.ops.aten, f"max_pool{num_dims}d_with_indices")(x, *arguments)[0]
    return values


def _max_pool(
    num_dims: int,
    original: Callable[..., Any],
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of each window, and its place in the picture: the first of several equal ones, as PyTorch.

    torch_xla's gradient of windows with gaps is that of windows without, and it takes arguments that PyTorch refuses.
    """
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    pool = getattr(torch.ops.aten, f"max_pool{num_dims}d_with_indices")
    sizes = pool(_without_data(x), *options)[0].shape[-num_dims:]
    if set(dilation) == {1}:
        return original(x, *options)  # type: ignore[no-any-return]
    places = torch.zeros((), dtype=torch.int64, device=x.device)
    of_each_dim = (for_each(option, num_dims) for option in (kernel_size, stride or kernel_size, padding, dilation))
    each = zip(sizes, x.shape[-num_dims:], *of_each_dim, strict=True)
    for dim, (size, length, kernel, step, pad, gap) in enumerate(each):
        begin = torch.arange(size, device=x.device)[:, None] * step - pad
        first = torch.where(begin < 0, begin % gap, begin)
        place = begin + torch.arange(kernel, device=x.device) * gap
        place = torch.where((place < 0) | (place >= length), first, place)  # which then counts twice
        shape = [1] * (2 * num_dims)
        shape[dim], shape[num_dims + dim] = size, kernel
        places = places * length + place.view(shape)
    windows = x.flatten(-num_dims).index_select(-1, places.flatten()).view(*x.shape[:-num_dims], *sizes, -1)
    values, chosen = windows.max(-1)
    places = places.reshape(*sizes, -1).expand(windows.shape)
    return values, torch.squeeze_copy(places.gather(-1, torch.unsqueeze_copy(chosen, -1)), -1)


def _max_pool_backward(
    original: Callable[..., Any], grad: torch.Tensor, x: torch.Tensor, *options: Any
) -> torch.Tensor:
    """Return the gradient; XLA's partitioner gets it wrong for windows that reach over pictures' parts on devices."""
    engine = registry.active_engine()
    if engine is None:
        return original(grad, x, *options)  # type: ignore[no-any-return]
    place = engine.with_whole_rows
    return place(original(place(grad), place(x), *options))


def _without_data(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor for which PyTorch checks an operation's arguments, and tells the shape of its result."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _avg_pool(
    num_dims: int,
    original: Callable[..., Any],
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Return the mean of each window, or its sum divided by a number of the caller's, which torch_xla ignores.

    Nor does torch_xla know how many values a window has that `ceil_mode` lets end behind the picture.
    """
    options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    sizes = getattr(torch.ops.aten, f"avg_pool{num_dims}d")(_without_data(x), *options).shape[-num_dims:]
    if not ceil_mode and divisor_override is None:  # PyTorch has checked them above, which torch_xla does not
        return original(x, *options)  # type: ignore[no-any-return]
    kernels, steps, pads = (for_each(option, num_dims) for option in (kernel_size, stride or kernel_size, padding))
    sides: list[int] = []  # the last dimension first, as pad() has it
    counts = torch.ones((), dtype=x.dtype, device=x.device)
    for size, length, kernel, step, pad in zip(sizes, x.shape[-num_dims:], kernels, steps, pads, strict=True):
        sides = [pad, max((size - 1) * step + kernel - length - pad, 0), *sides]
        border = pad if count_include_pad else 0
        starts = torch.arange(size, device=x.device) * step - pad
        ends = (starts + kernel).clamp(max=length + border)
        counts = counts.unsqueeze(-1) * (ends - starts.clamp(min=-border))
    means = original(torch.nn.functional.pad(x, sides), kernels, steps, (0,) * num_dims, False, True, None)
    return means * (prod(kernels) / (divisor_override or counts))  # type: ignore[no-any-return]


def for_each(option: Sequence[int], num_dims: int) -> list[int]:
    """Return an option for each dimension, as it may be given once for all."""
    return list(option) if len(option) == num_dims else list(option) * num_dims


POOLS: dict[str, Callable[..., Any]] = {
    "max_pool2d_with_indices": functools.partial(_max_pool, 2),
    "max_pool3d_with_indices": functools.partial(_max_pool, 3),
    "avg_pool2d": functools.partial(_avg_pool, 2),
    "avg_pool3d": functools.partial(_avg_pool, 3),
}
"""By name; their first argument is torch_xla's own operation."""

POOL_GRADIENTS: dict[str, Callable[..., Any]] = {
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "max_pool3d_with_indices_backward": _max_pool_backward,
}
"""As `POOLS`, of what autograd calls itself."""
