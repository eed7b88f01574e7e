"""Models of `deferred_init()`, on two devices of each engine."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from casekit import (
    ENGINE,
    MULTIPROCESS,
    NATIVE,
    RANK,
    X,
    accelerate,
    adamw,
    case,
    case_of_each_layout,
    check_parameters,
    check_training,
    part,
    sgd,
    step,
)
from torch import nn

import torchacc

MEGABYTE = 1 << 20
LIBC = ctypes.CDLL(None)
M_MMAP_THRESHOLD = -3  # of malloc.h


class Layered(nn.Module):
    """Deferred and small parameters, one that is tied between units, a frozen one, rows that two do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 301), nn.Tanh(), nn.Linear(301, 8)) for _ in range(2)])
        self.layers[1][0].weight = self.layers[0][0].weight
        self.layers[0][2].weight.requires_grad_(False)
        self.head = nn.Linear(8, 4)
        self.register_buffer("mask", torch.rand(40, 40), persistent=False)
        self.layers[0].register_buffer("same", self.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.mask[0, 0]
        return self.head(x)


class Large(nn.Module):
    """32 units of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(32)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@case_of_each_layout
def deferred_model_is_the_plain_one(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    plain = Layered()
    torch.manual_seed(1)
    model = torchacc.deferred_init(Layered)
    assert sum(parameter.is_meta for parameter in model.parameters()) == 3
    accelerate(model, **options)
    found = torchacc.full_state_dict(model)
    assert [*found] == [*plain.state_dict()]
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(model.mask.cpu(), plain.mask)
    assert torch.equal(model.layers[0].same.cpu(), plain.mask)
    for each, optimizer, x in ((model, sgd(model), part(X)), (plain, sgd(plain), X)):
        for _ in range(2):
            step(each, x, optimizer)
    check_parameters(model, plain)


@case()
def deferred_model_in_half_precision_has_float32_masters() -> None:
    torch.manual_seed(1)
    plain = Layered().bfloat16().float()
    torch.manual_seed(1)
    model = torchacc.deferred_init(lambda: Layered().bfloat16())
    accelerate(model)
    found = torchacc.full_state_dict(model)
    for name, tensor in plain.state_dict().items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


@case()
def deferred_model_with_an_optimizer_handed_in() -> None:
    torch.manual_seed(1)
    plain = Layered()
    torch.manual_seed(1)
    model = torchacc.deferred_init(Layered)
    optimizer = adamw(model)
    accelerate(model, optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    check_training(model, plain)


@case([NATIVE, MULTIPROCESS])
def deferred_models_of_other_seeds_are_refused() -> None:
    torch.manual_seed(RANK)
    with pytest.raises(torchacc.ConfigError, match="same number on every rank"):
        accelerate(torchacc.deferred_init(Layered))
    torch.manual_seed(1)


@case([NATIVE, MULTIPROCESS])
def deferred_model_never_lies_in_memory_as_a_whole() -> None:
    torch.manual_seed(1)
    whole = 32 * 4 * MEGABYTE
    if ENGINE == MULTIPROCESS:
        # XLA's buffers fill the holes that the shards on the host leave in the heap, in part: such holes are no copies.
        LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    assert peak_of(lambda: accelerate(torchacc.deferred_init(Large))) < 0.75 * whole
    assert peak_of(lambda: accelerate(Large())) > 0.9 * whole, "this sees less than there is"


def peak_of(act: Any) -> int:
    """Return by how many bytes the memory of this process grew at its peak."""
    gc.collect()
    LIBC.malloc_trim(0)  # what other cases have freed would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = status("VmRSS")
    kept = act()
    peak = status("VmHWM") - before
    del kept
    return peak


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10
