"""Exchange by PJRT's own collectives, as part of the program: on a TPU or GPU, with one process per device."""

from math import inf
from typing import Any

import torch

from torchacc.engines.xla.blocks import Block
from torchacc.engines.xla.exchange import BlockGatherer, Exchange, weight_places
from torchacc.engines.xla.gather import Weight
from torchacc.topology import Topology


class DeviceExchange(Exchange):
    """Collectives on device tensors along the mesh's axes."""

    def __init__(self, topology: Topology, device: int) -> None:
        super().__init__(topology, device)
        self._shards = topology.groups("fsdp")
        self._replicas = topology.groups("dp")

    def make_gatherer(self, blocks: list[Block], *, gathers_again: bool) -> BlockGatherer:
        """Return the gatherer of a unit with these blocks."""
        return _DeviceGatherer(blocks, self, gathers_again=gathers_again)

    def average(self, scalars: torch.Tensor) -> torch.Tensor:
        """Return the mean over all devices."""
        import torch_xla.core.xla_model as xm

        # TPUs have no float64.
        mean: torch.Tensor = xm.all_reduce(xm.REDUCE_SUM, scalars.float(), scale=1 / self.num_devices, pin_layout=False)
        return mean

    def combine_norms(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm over all shards from this process's norms."""
        import torch_xla.core.xla_model as xm

        local = norms.max() if norm_type == inf else norms.pow(norm_type).sum()
        kind = xm.REDUCE_MAX if norm_type == inf else xm.REDUCE_SUM
        total: torch.Tensor = xm.all_reduce(kind, local, groups=self._shards, pin_layout=False)
        return total if norm_type == inf else total.pow(1 / norm_type)

    def all_gather(self, block: Block, shard: torch.Tensor) -> torch.Tensor:
        """Return a whole block from this process's shard of it."""
        import torch_xla.core.xla_model as xm

        gathered = xm.all_gather(shard, dim=0, groups=self._shards, pin_layout=False)
        return block.rows.join(gathered.reshape(self.num_shards, -1))

    def reduce_scatter_mean(self, block: Block, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's shard of the mean of a whole block over all devices."""
        import torch_xla.core.xla_model as xm

        shard: torch.Tensor = xm.reduce_scatter(
            xm.REDUCE_SUM,
            block.rows.pad(whole),
            scale=1 / self.num_devices,
            scatter_dim=0,
            shard_count=self.num_shards,
            groups=self._shards,
            pin_layout=False,
        )
        if self.num_devices > self.num_shards:
            shard = xm.all_reduce(xm.REDUCE_SUM, shard, groups=self._replicas, pin_layout=False)
        return shard


class _DeviceGatherer(BlockGatherer):
    def __init__(self, blocks: list[Block], exchange: DeviceExchange, *, gathers_again: bool) -> None:
        super().__init__(blocks)
        self.keeps_weights = not gathers_again
        self._exchange = exchange
        self._places = weight_places(blocks)

    def gather(self) -> list[torch.Tensor]:
        whole = [_DeviceGather.apply(block.shard, block, self._exchange) for block in self.blocks]
        return [part for block, tensor in zip(self.blocks, whole, strict=True) for part in block.parts(tensor)]

    def gather_again(self, weight: Weight) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        block, index = self._places[weight]
        shard = block.shard.detach().clone()
        # Without the barrier XLA sees that this is the gather of forward, and keeps its result instead.
        xm.optimization_barrier_([shard])
        return block.parts(self._exchange.all_gather(block, shard.to(block.dtype)))[index]


class _DeviceGather(torch.autograd.Function):
    """The whole of a block; its gradient is the mean over all devices of the block's."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, block: Block, exchange: DeviceExchange) -> torch.Tensor:
        ctx.block, ctx.exchange = block, exchange
        return exchange.all_gather(block, shard.to(block.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dtype = ctx.block.shard.dtype
        mean = ctx.exchange.reduce_scatter_mean(ctx.block, grad.to(ctx.exchange.sum_dtype(dtype)))
        return mean.to(dtype), None, None
