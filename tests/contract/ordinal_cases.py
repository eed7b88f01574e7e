"""PJRT's collectives between devices whose numbers are not the ranks, played by host collectives."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from casekit import (
    MULTIPROCESS,
    RANK,
    X,
    adamw,
    by_rank,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    loss_of,
    part,
    sharded_and_plain,
    step,
)
from gathered_loss_cases import Clip, check_contrastive, of_model
from shard_reading_cases import Scaled

import torchacc
from torchacc.engines.xla import runtime
from torchacc.engines.xla.device_collectives import DeviceCollectives, DeviceSampleGatherer
from torchacc.engines.xla.multiprocess import MultiprocessEngine

ORDINALS = [1, 0]
"""The number of each rank's device, as a TPU may give them out."""


def by_ordinal(tensor: torch.Tensor) -> list[torch.Tensor]:
    runtime.sync()
    of_ranks = by_rank(runtime.to_host([tensor])[0])
    return [of_ranks[ORDINALS.index(ordinal)] for ordinal in range(len(ORDINALS))]


def own_group(groups: Sequence[Sequence[int]] | None) -> list[int]:
    return next(list(group) for group in groups or [range(len(ORDINALS))] if ORDINALS[RANK] in group)


def all_gather(tensor: torch.Tensor, dim: int, groups: Any, pin_layout: bool) -> torch.Tensor:
    found = by_ordinal(tensor)
    return runtime.to_device([torch.cat([found[ordinal] for ordinal in own_group(groups)], dim)])[0]


def reduced(kind: str, tensor: torch.Tensor, groups: Any, scale: float) -> torch.Tensor:
    found = by_ordinal(tensor)
    stacked = torch.stack([found[ordinal] for ordinal in own_group(groups)])
    return (stacked.sum(0) if kind == "sum" else stacked.amax(0)) * scale


def all_reduce(
    kind: str, tensor: torch.Tensor, scale: float = 1.0, groups: Any = None, pin_layout: bool = True
) -> torch.Tensor:
    return runtime.to_device([reduced(kind, tensor, groups, scale)])[0]


def reduce_scatter(
    kind: str, tensor: torch.Tensor, scale: float, scatter_dim: int, shard_count: int, groups: Any, pin_layout: bool
) -> torch.Tensor:
    parts = reduced(kind, tensor, groups, scale).chunk(shard_count, scatter_dim)
    return runtime.to_device([parts[own_group(groups).index(ORDINALS[RANK])].clone()])[0]


@contextmanager
def devices_numbered_otherwise() -> Iterator[None]:
    import torch_xla.core.xla_model as xm

    with pytest.MonkeyPatch.context() as patch:
        for function in (all_gather, all_reduce, reduce_scatter):
            patch.setattr(xm, function.__name__, function)
        patch.setattr(MultiprocessEngine, "ordinals", ORDINALS)
        patch.setattr(
            MultiprocessEngine,
            "make_collectives",
            lambda self: DeviceCollectives(self.mesh, self.job.rank, self.ordinals, self.group.check_same_call),
        )
        patch.setattr(
            MultiprocessEngine,
            "_sample_gatherer",
            property(lambda self: DeviceSampleGatherer(self.group, self.mesh, self.ordinals)),
        )
        yield


@case([MULTIPROCESS], each={"FULL_SHARD": "FULL_SHARD", "SHARD_GRAD_OP": "SHARD_GRAD_OP", "NO_SHARD": "NO_SHARD"})
def training_on_devices_numbered_otherwise(strategy: str) -> None:
    with devices_numbered_otherwise():
        model, plain = sharded_and_plain(Scaled, sharding_strategy=strategy)
        optimizer, plain_optimizer = adamw(model), adamw(plain)
        for _ in range(2):
            step(model, part(X), optimizer)
            step(plain, X, plain_optimizer)
        check_parameters(model, plain, 5e-6)
        model.zero_grad()
        plain.zero_grad()
        loss_of(model(part(X)) * model.scale.exp()).backward()
        loss_of(plain(X) * plain.scale.exp()).backward()
        check_gradients(model, plain)
        found = torchacc.optim_state_dict(model, optimizer)["state"]
        expected = plain_optimizer.state_dict()["state"]
        for index, entry in expected.items():
            check_equal(found[index]["exp_avg"], entry["exp_avg"], f"state {index}", 5e-6)
        check_equal(torchacc.dist.all_gather(part(X)).cpu(), X, "rows")
        loader = torchacc.shard_loader(torch.utils.data.DataLoader(X, batch_size=2), model)
        check_equal(next(iter(loader)).cpu(), X.chunk(2)[RANK], "this rank's rows of the global batch")


@case([MULTIPROCESS])
def contrastive_loss_on_devices_numbered_otherwise() -> None:
    with devices_numbered_otherwise():
        check_contrastive(Clip, of_model)
