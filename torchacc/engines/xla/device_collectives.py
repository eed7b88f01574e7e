"""PJRT's own collectives, as part of the program: on a TPU or GPU, with one process per device."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch

from torchacc.engines.process_group import ProcessGroup
from torchacc.engines.sample_rows import SampleGatherer
from torchacc.engines.xla.collectives import Collectives, GatheredParameter, ParameterGatherer, weight_places
from torchacc.engines.xla.gather import Weight
from torchacc.engines.xla.sharded_tensor import local_of
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import RowLayout


class DeviceCollectives(Collectives):
    """Collectives on device tensors along the mesh's axes."""

    def __init__(
        self, mesh: Mesh, rank: int, ordinals: Sequence[int], check_same_call: Callable[[str], None] = lambda what: None
    ) -> None:
        """Find the process's place on the mesh by its rank.

        Args:
            mesh: The mesh.
            rank: The process.
            ordinals: PJRT's number of the device of each process, by rank, which collectives on devices take.
            check_same_call: Raises unless every process calls it with the same words.
        """
        super().__init__(mesh, rank, check_same_call)
        self._shards = [[ordinals[rank] for rank in group] for group in mesh.groups(Role.SHARD)]
        self._replicas = [[ordinals[rank] for rank in group] for group in mesh.groups(Role.REPLICATE)]

    def make_gatherer(self, parameters: list[GatheredParameter], *, reshard_after_forward: bool) -> ParameterGatherer:
        """Return the gatherer of a unit with these parameters."""
        return _DeviceGatherer(parameters, self, reshard_after_forward=reshard_after_forward)

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

    def unshard(self, shard: torch.Tensor, rows: RowLayout) -> torch.Tensor:
        """Return the unsharded tensor from this process's shard of it."""
        import torch_xla.core.xla_model as xm

        gathered = xm.all_gather(shard, dim=0, groups=self._shards, pin_layout=False)
        return rows.unshard(gathered.reshape(self.num_shards, -1))

    def reduce_scatter_mean(self, parameter: GatheredParameter, full: torch.Tensor) -> torch.Tensor:
        """Return this process's shard of the mean of a full parameter over all devices."""
        import torch_xla.core.xla_model as xm

        shard: torch.Tensor = xm.reduce_scatter(
            xm.REDUCE_SUM,
            parameter.rows.pad(full),
            scale=1 / self.num_devices,
            scatter_dim=0,
            shard_count=self.num_shards,
            groups=self._shards,
            pin_layout=False,
        )
        if self.num_devices > self.num_shards:
            shard = xm.all_reduce(xm.REDUCE_SUM, shard, groups=self._replicas, pin_layout=False)
        return shard


class DeviceSampleGatherer(SampleGatherer):
    """Collectives of rows in the program of the devices."""

    def __init__(self, group: ProcessGroup, mesh: Mesh, ordinals: Sequence[int]) -> None:
        """Take PJRT's number of each process's device. Collective: every process."""
        super().__init__(group, mesh)
        self._devices = [[ordinals[rank] for rank in self.ranks]]  # there is no axis but those of data

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes."""
        import torch_xla.core.xla_model as xm

        if rows.device.type == "cpu":
            return super().gather(rows)
        gathered: torch.Tensor = xm.all_gather(rows, dim=0, groups=self._devices, pin_layout=False)
        return gathered

    def sum_of_own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of this process's rows."""
        import torch_xla.core.xla_model as xm

        if gradient.device.type == "cpu":
            return super().sum_of_own(gradient)
        total: torch.Tensor = xm.reduce_scatter(
            xm.REDUCE_SUM,
            gradient.to(torch.promote_types(gradient.dtype, torch.float32)),
            scale=1.0,
            scatter_dim=0,
            shard_count=len(self.ranks),
            groups=self._devices,
            pin_layout=False,
        )
        return total.to(gradient.dtype)


class _DeviceGatherer(ParameterGatherer):
    def __init__(
        self, parameters: list[GatheredParameter], collectives: DeviceCollectives, *, reshard_after_forward: bool
    ) -> None:
        super().__init__(parameters)
        self.keeps_weights = not reshard_after_forward
        self._collectives = collectives
        self._places = weight_places(parameters)

    def gather(self) -> list[torch.Tensor]:
        full = [
            _DeviceGather.apply(parameter.shard, parameter, self._collectives, parameter.dtype)
            for parameter in self.parameters
        ]
        return [
            part for parameter, tensor in zip(self.parameters, full, strict=True) for part in parameter.parts(tensor)
        ]

    def read(self, parameter: GatheredParameter) -> torch.Tensor:
        """Return a full parameter in the dtype of its shards, connected to them for autograd."""
        read: torch.Tensor = _DeviceGather.apply(parameter.shard, parameter, self._collectives, parameter.shard.dtype)
        return read

    def gather_for_backward(self, weight: Weight) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        parameter, index = self._places[weight]
        shard = local_of(parameter.shard).clone()
        # Without the barrier XLA sees that this is the gather of forward, and keeps its result instead.
        xm.optimization_barrier_([shard])
        return parameter.parts(self._collectives.unshard(shard.to(parameter.dtype), parameter.rows))[index]


class _DeviceGather(torch.autograd.Function):
    """Return a parameter unsharded; its gradient is the mean over all devices of the parameter's."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, parameter: GatheredParameter, collectives: DeviceCollectives, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.parameter, ctx.collectives = parameter, collectives
        local = parameter.weights[0].with_unique_hash(local_of(shard))
        return collectives.unshard(local.to(dtype), parameter.rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        dtype = ctx.parameter.shard.dtype
        mean = ctx.collectives.reduce_scatter_mean(ctx.parameter, grad.to(ctx.collectives.sum_dtype(dtype)))
        return mean.to(dtype), None, None, None
