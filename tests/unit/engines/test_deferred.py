"""A deferred model's tensors, made one by one in another order, are those that the CPU gives."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchacc
from torchacc.engines import deferred
from torchacc.errors import ConfigError

SIZE = 40
"""SIZE x SIZE floats are large enough to be deferred."""


def filled(fill: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(SIZE, SIZE)
        fill(layer.weight)
        return layer

    return build


def built(make: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(make())
        return module

    return build


def made_from_one_another() -> nn.Module:
    """Weights that are made from one another, and changed after they were read."""
    module = nn.Module()
    module.first, module.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    with torch.no_grad():
        module.second.weight.copy_(module.first.weight.T * 2)
        module.first.weight[3:5, ::2].zero_()
        module.first.weight[7].copy_(torch.arange(SIZE))
        module.second.weight.data[0].add_(module.first.weight.data[1], alpha=3)
        module.second.bias.copy_(module.first.weight.sum(0))
    return module


class Looking(nn.Module):
    """Looks at values while it is built: small ones, and of large tensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5000)[::1000]]
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.largest = float(self.weight.detach().max())
        self.register_buffer("mask", torch.tril(torch.ones(SIZE, SIZE)))
        self.register_buffer("rows", torch.zeros(SIZE, SIZE, device=self.weight.device).add_(1), persistent=False)
        self.scratch = torch.full((SIZE, SIZE), 2.0)
        if self.weight.is_meta or self.weight.device.type != "cpu" or not self.weight.is_cpu:
            raise AssertionError("a constructor may leave out its initialisation for this")
        self.number_of_large = len(torch.nonzero(self.weight.detach() > 1))


def half() -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Linear(2 * SIZE, 2 * SIZE)
    finally:
        torch.set_default_dtype(default)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Embedding(SIZE, SIZE, padding_idx=3), nn.Linear(SIZE, SIZE, bias=False))
    module[1].weight = module[0].weight
    return module


def own_generator() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.cat([torch.randn(SIZE, SIZE, generator=generator), torch.empty(1, SIZE).normal_(generator=generator)])


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "transformer": lambda: nn.TransformerEncoderLayer(SIZE, 4, 64),
    "lstm": lambda: nn.LSTM(SIZE, SIZE),
    "conv": lambda: nn.Conv2d(SIZE, SIZE, 3),
    "half": half,
    "cast": lambda: nn.Linear(SIZE, SIZE).double(),
    "tied": tied,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    "trunc-normal": filled(lambda weight: nn.init.trunc_normal_(weight, std=0.02)),
    "orthogonal": filled(nn.init.orthogonal_),
    "sparse": filled(lambda weight: nn.init.sparse_(weight, 0.1)),
    "eye": filled(nn.init.eye_),
    "bernoulli": filled(lambda weight: weight.data.bernoulli_(0.3)),
    "dropout": filled(lambda weight: weight.data.copy_(nn.functional.dropout(weight.data, 0.4))),
    "poisson": filled(lambda weight: weight.data.copy_(torch.poisson(weight.data.abs() * 9))),
    "randn": built(lambda: torch.randn(SIZE, SIZE) / math.sqrt(SIZE)),
    "like": built(lambda: torch.randn_like(torch.empty(SIZE, SIZE)) + torch.rand(SIZE)),
    "transposed": built(lambda: torch.rand(SIZE, 2 * SIZE).T),
    "expanded": built(lambda: torch.rand(SIZE, SIZE)[:1].expand(SIZE, SIZE)),
    "from-small-ones": built(lambda: torch.outer(torch.arange(SIZE), torch.rand(SIZE))),
    "own-generator": built(own_generator),
    "one-from-another": made_from_one_another,
    "looking": Looking,
}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_values_and_the_generator_are_those_of_the_cpu(build):
    torch.manual_seed(3)
    expected = build()
    following = torch.rand(3)
    torch.manual_seed(3)
    model = torchacc.deferred_init(build)
    assert torch.equal(torch.rand(3), following)

    assert [*model.state_dict()] == [*expected.state_dict()]
    generator = torch.get_rng_state()
    for name, tensor in reversed(tensors(model).items()):
        value = deferred.take_values(tensor)
        assert torch.equal(value, tensors(expected)[name]), name
        assert value.dtype == tensors(expected)[name].dtype
        assert tensor.requires_grad == tensors(expected)[name].requires_grad
    assert torch.equal(torch.get_rng_state(), generator), "making values moved the generator"


def test_large_floating_point_tensors_are_deferred_and_small_ones_are_not():
    model = torchacc.deferred_init(nn.Linear, SIZE, SIZE, bias=True)
    assert model.weight.is_meta
    assert not model.bias.is_meta
    assert deferred.is_recorded(model.weight)
    assert not deferred.is_recorded(model.bias)


def test_tied_weights_stay_tied():
    model = torchacc.deferred_init(tied)
    assert model[0].weight is model[1].weight


def test_values_that_a_constructor_looks_at_are_right():
    torch.manual_seed(3)
    expected = Looking()
    torch.manual_seed(3)
    model = torchacc.deferred_init(Looking)
    assert (model.rates, model.largest) == (expected.rates, expected.largest)
    assert model.number_of_large == expected.number_of_large
    assert torch.equal(model.scratch, expected.scratch), "a tensor that is neither a parameter nor a buffer has values"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors with memory, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return output


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(32)])


def test_building_and_making_one_tensor_at_a_time_needs_the_memory_of_few():
    weight = 128 * 128 * 4
    with LiveBytes() as whole:
        deep()
    assert whole.most >= 32 * weight
    with LiveBytes() as counted:
        model = torchacc.deferred_init(deep)
        for parameter in model.parameters():
            deferred.take_values(parameter)
    assert counted.most < 6 * weight


def test_what_was_changed_after_is_refused():
    for change in (
        lambda model: nn.init.zeros_(model.weight),
        lambda model: model.half(),
        lambda model: setattr(model.weight, "data", torch.empty(SIZE, SIZE, device="meta")),
    ):
        model = torchacc.deferred_init(nn.Linear, SIZE, SIZE)
        deferred.check_unchanged(model)
        change(model)
        with pytest.raises(ConfigError, match="'weight' was changed after deferred_init"):
            torchacc.accelerate(model)


def test_a_replaced_parameter_counts_as_one_without_values():
    model = torchacc.deferred_init(nn.Linear, SIZE, SIZE)
    model.weight = nn.Parameter(torch.empty(SIZE, SIZE, device="meta"))
    assert not deferred.is_recorded(model.weight)


def test_the_meta_device_around_it_is_refused():
    with torch.device("meta"), pytest.raises(ConfigError, match="Call it without torch.device"):
        torchacc.deferred_init(nn.Linear, SIZE, SIZE)


def test_fingerprints_differ_with_the_seed_and_with_what_is_done():
    def of(seed: int, build: Callable[[], nn.Module]) -> dict[str, str]:
        torch.manual_seed(seed)
        return deferred.fingerprints(torchacc.deferred_init(build))

    linear = BUILDS["linear"]
    assert [*of(1, linear)] == ["weight"]
    assert of(1, linear) == of(1, linear)
    assert of(1, linear) != of(2, linear)
    assert of(1, linear) != of(1, filled(lambda weight: weight.data.mul_(2)))
    assert of(1, filled(lambda w: w.data.mul_(torch.ones(3)[:1]))) != of(
        1, filled(lambda w: w.data.mul_(torch.zeros(1)))
    )
