"""Operations that torch_xla computes in another way than PyTorch, or not at all, written with those that it has right.

They are registered with PyTorch's dispatcher for the device `xla`, once for the process: so they hold wherever the
operation is called from, PyTorch itself included, and in backward.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from torchacc.engines.patches import picture_lowerings, random_lowerings
from torchacc.engines.patches.activation_lowerings import ACTIVATIONS, WITH_NAN
from torchacc.engines.patches.extreme_lowerings import AROUND_EXTREMES, EXTREMES
from torchacc.engines.patches.iota import iota
from torchacc.engines.patches.loss_lowerings import AROUND_LOSSES
from torchacc.engines.patches.softmax_lowerings import AROUND_SOFTMAX
from torchacc.errors import EngineError

_library: torch.library.Library | None = None  # what is registered lasts as long as this


@functools.cache
def install() -> None:
    """Register the operations."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overriding torch_xla's own
        for key, lowerings in _LOWERINGS.items():
            for name, lowering in lowerings.items():
                _library.impl(name, lowering, key, allow_override=True)
            for name, lowering in _AROUND_ORIGINAL[key].items():
                original = torch.library.get_kernel(f"aten::{name}", key)
                around = functools.partial(_call_around, lowering, original)
                _library.impl(name, around, key, with_keyset=True, allow_override=True)
    _refuse_packed_in_loops()


def _call_around(lowering: Callable[..., Any], original: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return lowering(functools.partial(original.call_boxed, keys), *args, **kwargs)


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Normalise each channel; torch_xla's keeps a biased running variance, and has no backward in eval mode.

    From means, as LayerNorm in `model_patches.py`, XLA can partition it, too.
    """
    shape = [1, -1, *[1] * (x.dim() - 2)]
    dtype = torch.promote_types(x.dtype, torch.float32)
    if training:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.to(dtype)
        mean = wide.mean(dims)
        var = (wide - mean.view(shape)).square().mean(dims)
        _update(running_mean, mean, momentum)
        count = x.numel() // x.shape[1]
        _update(running_var, var * (count / max(count - 1, 1)), momentum)
    else:
        assert running_mean is not None
        assert running_var is not None
        wide, mean, var = x.to(dtype), running_mean.to(dtype), running_var.to(dtype)
    scale = torch.rsqrt(var + eps)
    y = (wide - mean.view(shape)) * (scale if weight is None else scale * weight).view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def _update(running: torch.Tensor | None, new: torch.Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Put the source's values, in their order, where the mask is set; torch_xla's shapes would depend on the data.

    Where PyTorch raises that there are fewer values than places, the places left over become NaN: only the device
    could know, and it would have to be waited for. That happens for a dtype that has no NaN.
    """
    if mask.dtype != torch.bool or source.dtype != x.dtype:
        raise RuntimeError(f"masked_scatter: a mask of {mask.dtype}, and values of {source.dtype} for {x.dtype}")
    x, mask = torch.broadcast_tensors(x, mask)
    place = mask.reshape(-1).long().cumsum(0) - 1
    count = source.numel()
    values = source.reshape(-1) if count else x.new_zeros(1)
    chosen = values[place.clamp(0, max(count - 1, 0))]
    if count < mask.numel():
        if x.is_floating_point() or x.is_complex():
            chosen = torch.where(place < count, chosen, torch.nan)
        elif int(mask.sum()) > count:
            raise RuntimeError(f"masked_scatter: {int(mask.sum())} places are to be set, and source has {count} values")
    return torch.where(mask, chosen.view(x.shape), x)


def _masked_scatter_(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.copy_(_masked_scatter(x.clone(), mask.expand_as(x), source))


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Count values in bins of one width; torch_xla asks the host, which has none for whole numbers."""
    flat = x.reshape(-1)
    low, high = (flat.amin(), flat.amax()) if min == max else (flat.new_full((), min), flat.new_full((), max))
    if min == max:
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    scaled = (flat - low) * bins
    place = scaled // (high - low) if not x.is_floating_point() else (scaled / (high - low)).floor()
    place = place.long().clamp(0, bins - 1)
    counted = (flat >= low) & (flat <= high)
    return torch.zeros(bins, dtype=x.dtype, device=x.device).index_add_(0, place, counted.to(x.dtype))


class _CumSum(torch.autograd.Function):
    """Sum up integers in int64; torch_xla stays in the input's dtype, where bools are bools."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        ctx.dim, ctx.dtype = dim, x.dtype
        if dtype is None and not (x.is_floating_point() or x.is_complex()):
            dtype = torch.int64
        with torch._C._AutoDispatchBelowAutograd():
            return torch.cumsum(x if dtype is None else x.to(dtype), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.to(ctx.dtype).flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim), None, None


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    summed: torch.Tensor = _CumSum.apply(x, dim, dtype)
    return summed


class _IndexAdd(torch.autograd.Function):
    """Add rows at indices; torch_xla ends the process where these come straight from `sort()`, with the values."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: float
    ) -> torch.Tensor:
        ctx.dim, ctx.alpha = dim, alpha
        ctx.save_for_backward(index)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.index_add(x, dim, index + 0, source, alpha=alpha)  # the sum is a value of its own

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad, None, None, grad.index_select(ctx.dim, index) * ctx.alpha, None


class _IndexSelect(torch.autograd.Function):
    """Take rows at indices, which may come straight from `sort()`, as in `_IndexAdd`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.shape = dim, x.shape
        ctx.save_for_backward(index)
        with torch._C._AutoDispatchBelowAutograd():
            return x.index_select(dim, index + 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add(ctx.dim, index, grad), None, None


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    selected: torch.Tensor = _IndexSelect.apply(x, dim, index)
    return selected


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    added: torch.Tensor = _IndexAdd.apply(x, dim, index, source, alpha)
    return added


def _index_add_(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    return x.copy_(_index_add(x.clone(), dim, index, source, alpha=alpha))


def _grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply each group of rows by a matrix of its own; torch_xla has none, and PyTorch's reads the host's memory.

    Args:
        x: Rows, group after group, of shape (S, K).
        weight: The groups' matrices, of shape (E, K, N).
        offs: Where each group ends, of shape (E,).
        bias: Not supported, as in PyTorch.
        out_dtype: The result's, that of `x` by default.
    """
    if x.dim() != 2 or weight.dim() != 3 or offs is None or bias is not None:
        raise EngineError(
            f"torch._grouped_mm() of shapes {tuple(x.shape)} and {tuple(weight.shape)} does not run on XLA: it takes "
            "rows (S, K), matrices (E, K, N) and `offs` there. Use torch.bmm()"
        )
    rows = torch.arange(x.shape[0], device=x.device)
    group = (rows[:, None] >= offs).sum(1).clamp(max=weight.shape[0] - 1)
    return torch.bmm(x[:, None], weight[group])[:, 0].to(out_dtype or x.dtype)


def _count_nonzero(x: torch.Tensor, dim: Sequence[int] | int | None = None) -> torch.Tensor:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    counted = (x != 0).long()
    return counted.sum(dims) if dims else counted.sum()


def _shift_right(x: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """Divide by a power of two and round down; torch_xla rounds negative numbers towards zero."""
    bits = torch.iinfo(x.dtype).bits + (not x.dtype.is_signed)
    if not isinstance(by, torch.Tensor):
        by = torch.full((), int(by), dtype=x.dtype, device=x.device)
    dtype = torch.promote_types(x.dtype, by.dtype)
    x, by = x.to(dtype), by.to(dtype)
    is_small = (by >= 0) & (by < bits - 1)
    low = torch.where(is_small, by, 0)
    halved = torch.div(x, torch.bitwise_left_shift(torch.ones_like(low), low), rounding_mode="floor")
    return torch.where(is_small, halved, torch.where(x < 0, -1, 0).to(dtype))


def _diagonal(
    original: Callable[..., Any], x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Return diagonals; torch_xla's are others where a dimension comes behind the two."""
    order, _ = _last(x.dim(), dim1, dim2)
    return original(torch.permute_copy(x, order), offset, -2, -1)  # type: ignore[no-any-return]


def _diagonal_scatter(
    original: Callable[..., Any], x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    order, back = _last(x.dim(), dim1, dim2)
    scattered = original(torch.permute_copy(x, order), source, offset, -2, -1)
    return torch.permute_copy(scattered, back)


def _last(num_dims: int, *dims: int) -> tuple[list[int], list[int]]:
    """Return the order of dimensions in which these come last, and the one that puts them back."""
    dims = tuple(dim % num_dims for dim in dims)
    order = [dim for dim in range(num_dims) if dim not in dims] + list(dims)
    return order, sorted(range(num_dims), key=order.__getitem__)


def _as_strided_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """Put values in the places of a strided view; torch_xla mixes them up where strides do not fall."""
    places = torch.full([1] * len(size), storage_offset or 0, device=x.device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [-1 if other == dim else 1 for other in range(len(size))]
        places = places + (torch.arange(length, device=x.device) * step).view(shape)
    return x.reshape(-1).scatter(0, places.reshape(-1), source.reshape(-1)).view(x.shape)


def _norm(
    x: torch.Tensor,
    p: float | None = None,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the norm of vectors; torch_xla's of order infinity is 1."""
    found: torch.Tensor = torch.linalg.vector_norm(x, 2 if p is None else p, dim or None, keepdim, dtype=dtype)
    return found


def _conv(
    num_dims: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> torch.Tensor:
    """Convolve; where each place is by itself, groups of channels are multiplied: XLA partitions that one wrongly."""
    options = [picture_lowerings.for_each(option, num_dims) for option in (stride, padding, dilation)]
    is_pointwise = set(weight.shape[2:]) == {1} and set(options[0]) == {1} and set(options[1]) == {0}
    if groups == 1 or not is_pointwise or x.dim() != num_dims + 2:
        unbatched = x.dim() == num_dims + 1
        y = torch.ops.aten.convolution(
            x[None] if unbatched else x, weight, bias, *options, False, [0] * num_dims, groups
        )
        return y[0] if unbatched else y  # type: ignore[no-any-return]
    batch, places = x.shape[0], x.shape[2:]
    grouped = x.reshape(batch, groups, x.shape[1] // groups, math.prod(places))
    matrices = weight.view(groups, weight.shape[0] // groups, weight.shape[1])
    y = torch.matmul(matrices, grouped).reshape(batch, weight.shape[0], *places)
    return y if bias is None else y + bias.view(-1, *[1] * num_dims)


def _cumsum_of_any(
    original: Callable[..., Any], x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum up integers in int64, also where autograd has no part: in inference_mode(), and into `out`."""
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    x = x if dtype is None else x.to(dtype)
    return original(x, dim) if x.numel() else x.clone()


def _roll(original: Callable[..., Any], x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
    """Roll a tensor; torch_xla ends the process where it has no elements."""
    return original(x, shifts, dims) if x.numel() else x.clone()


def _nll_loss(
    original: Callable[..., Any],
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the loss; torch_xla ends the process where there is one sample without a dimension for samples."""
    if x.dim() != 1:
        return original(x, target, weight, reduction, ignore_index)  # type: ignore[no-any-return]
    loss = original(x[None], target.reshape(1), weight, reduction, ignore_index)
    return loss.reshape(target.shape) if reduction == 0 else loss  # type: ignore[no-any-return]


def _arange(
    original: Callable[..., Any], start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **place: Any
) -> torch.Tensor:
    """Return numbers at steps; torch_xla counts the steps in single precision, so that arange(0, 1, 0.1) has 11."""
    like = torch.arange(start, end, step, dtype=dtype, device="meta")
    if all(isinstance(number, int) for number in (start, end, step)):
        index = iota(len(like), place["device"])
        index = index if step == 1 else index * step
        return (index + start if start else index).to(like.dtype)
    if not (like.dtype.is_floating_point or like.dtype.is_complex):  # PyTorch cuts off the step, not each number
        start, step = int(start), int(step)
    index = original(0, len(like), 1, dtype=torch.float64, **place)
    return (index * step + start).to(like.dtype)  # type: ignore[no-any-return]


def _linspace(
    original: Callable[..., Any], start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **place: Any
) -> torch.Tensor:
    """Return numbers at equal steps; torch_xla cuts off whole numbers elsewhere."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return original(start, end, steps, dtype=dtype, **place)  # type: ignore[no-any-return]
    return torch.linspace(start, end, steps, dtype=dtype).to(place["device"])


def _copy(
    original: Callable[..., Any], x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy into a tensor; torch_xla gives it the shape of what comes from the host, where that is to be broadcast."""
    if source.device.type == "cpu" and source.shape != x.shape:
        source = source.expand(x.shape)
    return original(x, source, non_blocking)  # type: ignore[no-any-return]


def _packed(*arguments: Any) -> Any:
    """Refuse packed sequences: PyTorch reads from the host's memory how long they are."""
    raise EngineError(
        "a recurrent layer over a packed sequence does not run on XLA, whose programs have fixed shapes: give it the "
        "padded batch, without pack_padded_sequence(), and mask what it returns for the padding"
    )


def _refuse_packed_in_loops() -> None:
    """Refuse packed sequences in the GRU that torch_xla puts in the place of PyTorch's, too."""
    from torch_xla.experimental.gru import GRU

    own = GRU.forward

    @functools.wraps(own)
    def forward(self: Any, input: Any, hx: torch.Tensor | None = None) -> Any:
        return _packed() if isinstance(input, PackedSequence) else own(self, input, hx)

    GRU.forward = forward


def _istft(*arguments: Any, **options: Any) -> torch.Tensor:
    """Refuse what ends the process in torch_xla, in forward or in backward."""
    raise EngineError(
        "torch.istft() does not run on XLA: compute it outside of the model, on the CPU, or use torch.fft.irfft() of "
        "windows that do not overlap"
    )


def _on_host(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return an operation that runs on the host: torch_xla's gives wrong numbers, or not all that backward needs."""
    operation = getattr(torch.ops.aten, name)

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(found.to(x.device) for found in operation(x.cpu(), *args, **kwargs))

    return run


_NORMS = {
    f"norm.{overload}": _norm for overload in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dtype", "ScalarOpt_dim_dtype")
}

_REFUSED: dict[str, Callable[..., Any]] = {
    **{f"{kind}.data": _packed for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "istft": _istft,
}

_COMPOSED: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "masked_scatter": _masked_scatter,
    "masked_scatter_": _masked_scatter_,
    "_grouped_mm": _grouped_mm,
    **ACTIVATIONS,
    "upsample_nearest2d": picture_lowerings.nearest,
    "upsample_bilinear2d": picture_lowerings.bilinear,
    **_NORMS,
    **random_lowerings.DROPOUT,
}
"""Of differentiable operations, so that autograd's part of each follows."""

_LOWERINGS: dict[str, dict[str, Callable[..., Any]]] = {
    "AutogradXLA": {
        **_COMPOSED,
        **_REFUSED,
        "conv1d": functools.partial(_conv, 1),
        "conv2d": functools.partial(_conv, 2),
        "conv3d": functools.partial(_conv, 3),
        "cumsum": _cumsum,
        "index_add": _index_add,
        "index_add_": _index_add_,
        "index_select": _index_select,
        "max_pool2d": functools.partial(picture_lowerings.max_pool_values, 2),
        "max_pool3d": functools.partial(picture_lowerings.max_pool_values, 3),
    },
    "XLA": {
        **_COMPOSED,
        "histc": _histc,
        "count_nonzero": _count_nonzero,
        "count_nonzero.dim_IntList": _count_nonzero,
        "__rshift__.Scalar": _shift_right,
        "__rshift__.Tensor": _shift_right,
        "bitwise_right_shift.Tensor": _shift_right,
        "bitwise_right_shift.Tensor_Scalar": _shift_right,
        "as_strided_scatter": _as_strided_scatter,
        **WITH_NAN,
        **EXTREMES,
        "_linalg_svd": _on_host("_linalg_svd"),
        "_linalg_slogdet": _on_host("_linalg_slogdet"),
    },
}
"""By the dispatcher's key, which says whether autograd has had its part yet."""

_AROUND_ORIGINAL: dict[str, dict[str, Callable[..., Any]]] = {
    "AutogradXLA": {**picture_lowerings.POOLS, "nll_loss_nd": _nll_loss, **AROUND_LOSSES, **AROUND_SOFTMAX},
    "XLA": {
        **picture_lowerings.POOLS,
        **picture_lowerings.POOL_GRADIENTS,
        "nll_loss_nd": _nll_loss,
        "diagonal_copy": _diagonal,
        "diagonal_scatter": _diagonal_scatter,
        **AROUND_EXTREMES,
        "copy": _copy,
        "cumsum": _cumsum_of_any,
        "roll": _roll,
        "arange.start_step": _arange,
        "linspace": _linspace,
        **random_lowerings.AROUND_RANDOM,
    },
}
"""By the dispatcher's key; their first argument is what there was for that key, torch_xla's or autograd's."""
