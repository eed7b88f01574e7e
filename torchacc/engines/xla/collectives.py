"""Collectives between XLA processes on the host: XLA's CPU client has none of its own."""

import torch
import torch.distributed as dist

from torchacc.engines.process_group import ProcessGroup
from torchacc.topology import Topology


class HostCollectives:
    """Collectives on host tensors along the mesh's axes, one process per device."""

    def __init__(self, topology: Topology, group: ProcessGroup) -> None:
        """Make the process groups. Collective: every process."""
        self.num_devices = topology.num_devices
        self.num_shards = topology.size("fsdp")
        self._shards = group.own_subgroup(topology.groups("fsdp"))
        self._replicas = group.own_subgroup(topology.groups("dp"))

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather the shards of a tensor.

        Args:
            shard: A contiguous tensor of shape (n,).

        Returns:
            A tensor of shape (num_shards, n).
        """
        if self.num_shards == 1:
            return shard.unsqueeze(0)
        whole = shard.new_empty(self.num_shards * shard.numel())
        dist.all_gather_into_tensor(whole, shard, group=self._shards)
        return whole.view(self.num_shards, -1)

    def reduce_scatter_mean(self, whole: torch.Tensor) -> torch.Tensor:
        """Average a tensor over all devices, and return this device's shard of the result.

        Args:
            whole: A contiguous tensor of shape (num_shards, n).

        Returns:
            A tensor of shape (n,).
        """
        shard = whole[0]
        if self.num_shards > 1:
            shard = whole.new_empty(whole.shape[1])
            dist.reduce_scatter_tensor(shard, whole.view(-1), group=self._shards)
        if self.num_devices > self.num_shards:
            dist.all_reduce(shard, group=self._replicas)
        return shard.div_(self.num_devices)

    def combine_over_shards(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce a tensor over the shards of one replica."""
        if self.num_shards > 1:
            dist.all_reduce(value, op=op, group=self._shards)
        return value
