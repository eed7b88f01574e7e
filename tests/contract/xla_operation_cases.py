"""Cases about operations and modules that torch_xla computes in another way than PyTorch."""

import math
from collections.abc import Callable

import pytest
import torch
from casekit import (
    MULTIPROCESS,
    SPMD,
    XLA,
    X,
    case,
    check_equal,
    check_parameters,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
    step,
)
from torch import nn
from xla_forward_cases import check_two_steps

import torchacc
from torchacc.engines import registry

IMAGES = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(5))


class Scaled(nn.Module):
    """Applies a function to its input times a parameter."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


def replaced(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 1] = 0.5
    y[x < -1] = x[x < -1] * 2
    return y


def integers(x: torch.Tensor) -> torch.Tensor:
    whole = (x.detach() * 10).int()
    shifted = (whole >> 1) + torch.bitwise_right_shift(whole, 2) + (whole >> torch.ones_like(whole))
    counts = (whole > 0).count_nonzero(1)[:, None] + (whole > 0).cumsum(1)
    assert shifted.dtype == torch.int32
    assert counts.dtype == torch.int64
    return x * (shifted + counts) + histogram(whole)


def resized(x: torch.Tensor) -> torch.Tensor:
    picture, resize = x.view(-1, 1, 2, 4), nn.functional.interpolate
    return sum(
        resize(picture, scale_factor=scale, mode=mode).sum((1, 2, 3)) * weight
        for weight, scale in enumerate((2.0, 1.3, (2.6, 1.4)), 1)
        for mode in ("nearest", "bilinear")
    ) + resize(picture, size=(3, 5), mode="bilinear", align_corners=True).square().sum((1, 2, 3))


def pooled(x: torch.Tensor) -> torch.Tensor:
    picture, pool = x.reshape(1, 1, 4, 8), nn.functional.max_pool2d
    with_gaps = (
        pool(picture, 2, dilation=2).sum() + pool(picture, 3, stride=2, padding=1, dilation=(1, 3)).square().sum()
    )
    tight = (
        pool(picture, (2, 3), dilation=(1, 2), padding=(1, 1), ceil_mode=True).sum() + pool(picture, 2).square().sum()
    )
    block = nn.functional.max_pool3d(x.reshape(1, 1, 2, 4, 4), 2, stride=1, dilation=(1, 2, 2))
    equal = torch.stack([x.detach(), x, x * 1, x.detach()], -1).reshape(1, 1, 8, 16)  # the first one's gradient counts
    first, places = pool(equal, 3, stride=2, padding=1, dilation=2, return_indices=True)
    summed = nn.functional.avg_pool2d(picture, 3, 2, 1, ceil_mode=True, divisor_override=2)
    weighed = (first * places).mean() / 100 + summed.square().mean() / 10
    # Windows that overlap where the picture's height lies over devices.
    column = nn.functional.max_pool1d(x.t()[None], 2, 1).square().mean()
    weighed = weighed + pool(picture, (2, 3), 1).square().mean() + pool(picture, 3, 1).square().mean() + column
    return x + with_gaps + tight + block.square().sum() + weighed


def decomposed(x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(2, 4, 4)
    block = blocks.clone()
    block.diagonal(1, 0, 1).mul_(3)
    diagonals = block.square().sum() + (x.reshape(4, 4, 2).diagonal(1, 0, 1) * x[0, :3]).sum()
    slices = x.clone()
    slices[:, 2:6].diagonal().mul_(3)
    diagonals = diagonals + (x[:, :4].diagonal() * x[1:].diagonal(1)[0]).sum() + slices.square().sum()
    parts = torch.linalg.matrix_norm(blocks, "nuc").sum() + torch.linalg.matrix_norm(x[:, :4], 2)
    square = x[:, :4] + 5 * torch.eye(4, device=x.device)
    return x * (diagonals + parts + torch.logdet(square @ square.T) + torch.linalg.slogdet(square)[1])


def spectrum(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(4, device=x.device)
    waves = torch.stft(x.reshape(1, -1), 4, window=window, return_complex=True)
    return x * torch.view_as_real(waves).square().sum() + torch.fft.irfft(torch.fft.rfft(x)[:, :4] * 2, n=8)


def at_bounds(x: torch.Tensor) -> torch.Tensor:
    """Return activations where their slope jumps; what a gradient is there is a convention, as of ReLU6 at 0."""
    functional = nn.functional
    activations = (functional.relu6, functional.hardtanh, functional.hardsigmoid, functional.hardswish)
    found = torch.zeros_like(x)
    for place, weight in ((-3.0, 1.0), (-1.0, 0.1), (0.0, 0.01), (1.0, 2.0), (3.0, 0.2), (6.0, 0.02), (0.4, 5.0)):
        exactly = x - x.detach() + place
        for activation in activations:
            found = found + weight * (activation(exactly) + activation(exactly * 1.0, inplace=True))
    return found


def by_order(x: torch.Tensor) -> torch.Tensor:
    """Return rows moved by indices that come straight from a sort."""
    order = x.detach()[0].sort().indices
    moved = x.index_select(1, order) * 2 + torch.zeros_like(x).index_add(1, order, x, alpha=3)
    return (moved * torch.ones_like(x).index_add_(1, order, x.square()) + moved[:, order]) / 100


def by_group(x: torch.Tensor) -> torch.Tensor:
    """Return rows, multiplied by the matrix of their group as mixtures of experts do, and each by its own where not."""
    ends = torch.tensor([1, 1, len(x)], dtype=torch.int32, device=x.device)
    matrices = torch.linspace(-1, 1, 3 * 64, device=x.device).view(3, 8, 8) * x.mean()
    if x.device.type == "xla":
        return torch._grouped_mm(x, matrices, offs=ends)
    return torch.cat([x[:1] @ matrices[0], x[1:] @ matrices[2]])


def averaged(x: torch.Tensor) -> torch.Tensor:
    picture, pool = x.reshape(1, 1, 4, 8), nn.functional.avg_pool2d
    one = pool(picture.square(), 9, ceil_mode=True).sum() + pool(picture, (3, 20), ceil_mode=True).square().sum()
    return x + one + pool(picture, 3, 2, 1, ceil_mode=True).square().sum() + pool(picture, (2, 3)).square().sum()


def convolved(x: torch.Tensor) -> torch.Tensor:
    """Return what convolutions in groups make of a row's numbers taken for channels."""
    conv1d, conv2d = nn.functional.conv1d, nn.functional.conv2d
    weight = torch.linspace(-0.3, 0.3, 8 * 12, device=x.device).view(12, 8) * (1 + x.mean())
    row, bias = x[:, :, None].expand(-1, -1, 3), weight[:, 0]
    wide = conv1d(row * torch.arange(3, device=x.device), weight[:, :2, None], bias, groups=4)
    tall = conv2d(wide[..., None], weight[:, :3, None, None], groups=4) + conv2d(
        wide[..., None], weight[:, :1, None, None].expand(-1, -1, 3, 1), padding=(1, 0), groups=12
    )
    alone = conv1d(row[0], weight[:, :4, None], groups=2)
    return x + torch.tanh(tall).mean((1, 2, 3))[:, None] + torch.tanh(alone).mean()


def classified(x: torch.Tensor) -> torch.Tensor:
    """Return rows times losses of classes by number, of which some do not count."""
    entropy, target = nn.functional.cross_entropy, torch.arange(len(x), device=x.device) * 3 % 8
    some = torch.where(target == 3, -100, target)
    found = [
        entropy(x, target),
        entropy(x * 2, some),
        entropy(x, some, reduction="sum"),
        entropy(x, target, x.detach()[0] ** 2),
    ]
    found += [entropy(x, target, ignore_index=0), entropy(x, target, label_smoothing=0.1)]
    return x * (sum(found) + entropy(x, some, reduction="none").square().sum())


def attended(x: torch.Tensor) -> torch.Tensor:
    """Return rows and what attention makes of them without a mask, with a causal one, and where a token sees none."""
    heads, attention = x.reshape(1, 2, 4, -1), nn.functional.scaled_dot_product_attention
    sees = torch.arange(4, device=x.device)[:, None] > torch.arange(4, device=x.device)
    found = [attention(heads, heads, heads), attention(heads, heads, heads, is_causal=True)]
    found += [attention(heads, heads, heads, sees), attention(heads, heads, heads, attn_mask=sees)]
    return x + sum(each.square() for each in found).reshape(x.shape)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: nn.functional.elu(x, 0.5) + nn.functional.selu(x) + nn.functional.celu(x, 2.0),
    "elu-in-place": lambda x: nn.functional.elu(x * 2, inplace=True),
    "at-bounds": at_bounds,
    "attended": attended,
    "averaged": averaged,
    "by-group": by_group,
    "by-order": by_order,
    "classified": classified,
    "convolved": convolved,
    "cumsum": lambda x: x.cumsum(1) * x.detach().long().cumsum(1),
    "boolean-index": lambda x: x[x > 0].sum() + x.masked_select(x < 1).square().sum() + replaced(x),
    "masked-scatter": lambda x: x.masked_scatter(x > 0, x * 3).masked_scatter(x[:, :1] < 0, x.flip(1)),
    "pooled": pooled,
    "resized": resized,
    "extremes": lambda x: (
        x + x.amax() + x.amin((0, 1)) + x.amax(1, keepdim=True) + torch.cat([x, x.detach()]).cummax(0)[0].sum()
    ),
    "norms": lambda x: x * sum(x.norm(p) + torch.norm(x, p, 1)[:, None] for p in (math.inf, -math.inf, 1, 2, 3)),
    "decomposed": decomposed,
    "spectrum": spectrum,
}


@case([SPMD], each=FUNCTIONS)
def function_gives_the_same(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check_two_steps(lambda: Scaled(function), {"x": X})


def histogram(x: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's; of whole numbers it has none on a CPU."""
    return torch.histc(x if x.device.type == "xla" else x.float(), 8, -8, 8).float()


@case([SPMD])
def whole_numbers_are_pytorchs() -> None:
    model, plain = sharded_and_plain(lambda: Scaled(integers))
    with torch.no_grad():
        check_equal(plain_value(model(part(X))), plain(X), "result")


def kept_nan(x: torch.Tensor) -> torch.Tensor:
    """Return what functions that choose among values make of a NaN."""
    x = torch.where(x == 2, torch.nan, x)
    table, functional = x.view(2, 3), nn.functional
    numbers = [x.max(), x.min(), x.amax(), x.amin(), x.argmax(), x.argmin(), x.norm(math.inf)]
    numbers += [*table.max(1), *table.min(0), table.argmax(0), table.argmin(1, keepdim=True), torch.aminmax(x).max]
    numbers += [x.clamp(0, 1), x.clamp(max=1), torch.clamp(x, x * 0, x * 0 + 1), torch.maximum(x * 0, x), x.relu()]
    numbers += [torch.minimum(torch.ones_like(x), x), functional.threshold(x, 1, 5), functional.softshrink(x, 1.5)]
    numbers += [x.bfloat16().topk(2).values, *x.bfloat16().sort(stable=True), x.bfloat16().kthvalue(6).values]
    numbers += [functional.max_pool1d(x[None], 2, 1), functional.hinge_embedding_loss(x, -torch.ones_like(x))]
    return torch.cat([number.flatten().float() for number in numbers])


EQUAL = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0, 1.0])
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "steps": lambda x: torch.arange(0, 1, 0.1, device=x.device),
    "steps-of-one": lambda x: torch.arange(0.5, 4, device=x.device),
    "whole-steps": lambda x: torch.linspace(4.3, 1, 50, dtype=torch.int64, device=x.device),
    "last-largest": lambda x: x.cummax(0)[1],
    "last-smallest": lambda x: x.cummin(0)[1],
    "with-nan": lambda x: torch.stack([(x / 0 - x / 0).max(0)[0], torch.cat([x, x / 0 - x / 0]).cummax(0)[0].sum()]),
    "kept-nan": kept_nan,
    "nothing-rolled": lambda x: x[:0].roll(1),
    "one-sample": lambda x: nn.functional.cross_entropy(x, torch.tensor(2, device=x.device), reduction="none"),
    "count": lambda x: x.count_nonzero(),
    "strided": lambda x: torch.as_strided_scatter(x, x[:4].view(2, 2) + 5, (2, 2), (1, 2), 1),
    "set-by-none": lambda x: x.masked_scatter(x > 9, x[:0]),
}


@case([SPMD])
def values_are_pytorchs() -> None:
    for name, function in VALUES.items():
        found, expected = plain_value(function(part(EQUAL))), function(EQUAL)
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@case(XLA)
def a_matrix_that_lies_where_another_lay_is_read() -> None:
    put = registry.active_engine().to_device
    rows = torch.randn(512, 256)
    x = put(rows)
    for _ in range(60):
        matrix = torch.randn(256, 512)
        torch.testing.assert_close(plain_value(x @ put(matrix)), rows @ matrix, atol=1e-3, rtol=0)


@case([SPMD])
def masked_scatter_of_too_few_values_is_noticed() -> None:
    x = part(EQUAL)
    assert plain_value(x.masked_scatter(x > 0, x[:2])).isnan().tolist() == [False] * 2 + [True] * 4
    with pytest.raises(RuntimeError, match="6 places are to be set, and source has 2 values"):
        x.long().masked_scatter(x > 0, x[:2].long())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(2, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(len(x)) % 3 + 2
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(len(x), 4, 2), lengths, True, enforce_sorted=False)
        return self.layer(packed)[0].data.sum()


@case([SPMD])
def what_torch_xla_cannot_is_refused() -> None:
    for kind in (nn.LSTM, nn.RNN):  # torch_xla refuses a GRU itself
        model, _ = sharded_and_plain(lambda kind=kind: Recurrent(kind))
        with pytest.raises(torchacc.EngineError, match="over a packed sequence does not run on XLA"):
            model(part(X))
    window = torch.hann_window(4)
    waves = torch.stft(X, 4, window=window, return_complex=True)
    with pytest.raises(torchacc.EngineError, match="istft.. does not run on XLA"):
        torch.istft(part(waves), 4, window=part(window))


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.linear = nn.Parameter(torch.tensor(2.6)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.number


@case(XLA)
def host_tensors_are_broadcast_into_parameters() -> None:
    model, plain = sharded_and_plain(Numbers)
    for each in (model, plain):
        with torch.no_grad():
            each.number.copy_(torch.tensor(0.25))
            each.linear.weight.copy_(torch.arange(8.0) / 8)
            each.linear.bias.data.copy_(torch.tensor(0.5))
    check_parameters(model, plain)
    step(model, part(X), sgd(model))
    step(plain, X, sgd(plain))
    check_parameters(model, plain)


@case([SPMD])
def pool_with_arguments_that_pytorch_refuses_is_refused() -> None:
    for pool in (nn.functional.max_pool2d, nn.functional.avg_pool2d):
        for options in ({"padding": 2}, {"padding": -1}, {"stride": 0}):
            with pytest.raises(RuntimeError, match=r"pad should be|pad must be|stride should"):
                pool(part(IMAGES), 2, **options)


NORMS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "batch": (lambda: nn.BatchNorm1d(8), X),
    "cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), IMAGES),
    "without-statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), IMAGES),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGES),
}


@case([SPMD], each=NORMS)
def norm_and_its_statistics(norm: tuple[Callable[[], nn.Module], torch.Tensor]) -> None:
    make, x = norm
    for training in (True, False):
        check_two_steps(lambda training=training: nn.Sequential(make()).train(training), {"input": x})


@case([MULTIPROCESS])
def norm_in_evaluation() -> None:
    check_two_steps(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval(), {"input": X})
