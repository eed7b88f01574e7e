"""What a process holds of a model's parameters that lie on XLA devices."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchacc.engines.model_shards import ModelShards
from torchacc.engines.xla import runtime
from torchacc.engines.xla.local_pieces import joined_pieces, local_pieces
from torchacc.engines.xla.sharded_tensor import ShardedTensor, as_shard, local_of
from torchacc.parallel.axes import ParameterSpec, Role
from torchacc.parallel.hosts import LocalTiles
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.sharding import LocalShard, ShardCoordinates, partitioned_shape, unsharded

if TYPE_CHECKING:
    from torchacc.engines.xla.collectives import ParameterGatherer
    from torchacc.engines.xla.multiprocess import MultiprocessEngine
    from torchacc.engines.xla.spmd import SpmdEngine
    from torchacc.engines.xla.xla_engine import XlaEngine


class XlaShards(ModelShards):
    """The parameters of a model that lie on XLA devices."""

    engine: "XlaEngine"

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the data of device tensors, flat, on the host, in one transfer."""
        self.engine.sync()
        return [tensor.reshape(-1) for tensor in runtime.to_host([local_of(tensor) for tensor in tensors])]

    def assign(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Give a parameter new values as data, which needs no program."""
        parameter.data = self.place(parameter, local)

    def place_shaped(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Return a flat host tensor of the shape that a parameter has here, so that it lies like the parameter."""
        return self.place(parameter, value)


class SpmdShards(XlaShards):
    """The parameters of a model that lies on the mesh of an SPMD engine."""

    engine: "SpmdEngine"

    def __init__(
        self,
        engine: "SpmdEngine",
        model: nn.Module,
        plan: ShardingPlan,
        specs: Mapping[torch.Tensor, ParameterSpec],
    ) -> None:
        """Describe the parameters.

        Args:
            engine: The model's engine.
            model: The sharded model.
            plan: Its plan.
            specs: How each parameter is split.
        """
        super().__init__(engine, model, plan)
        self._specs = specs

    def _local_shards(self) -> Iterator[tuple[nn.Parameter, LocalShard]]:
        for planned in self.plan.parameters:
            parameter, host_shards = self.model.get_parameter(planned.name), self.engine.host_shards
            shard = unsharded(planned.name, planned.shape)
            if host_shards is not None:
                spec = self._specs[parameter]
                shard = host_shards.hosts.held(planned.name, planned.shape, spec, self.engine.job.rank)
            yield parameter, shard

    @cached_property
    def coordinates(self) -> ShardCoordinates:
        """Which shards this process holds: all of them, or those of its host."""
        job = self.engine.job
        if not job.launched:
            return ShardCoordinates()
        return ShardCoordinates(job.num_processes, job.rank, is_contiguous=False)

    def replicas_of(self, local_shard: LocalShard) -> Sequence[tuple[int, int]]:
        """Return for each slice which copy of it this process holds, and how many there are."""
        return local_shard.replicas if isinstance(local_shard, LocalTiles) else super().replicas_of(local_shard)

    @property
    def _shard_group(self) -> None:
        """All processes."""

    def _joined(self, local_shard: LocalShard, shards: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from what all processes hold of it."""
        assert self.engine.host_shards is not None
        assert isinstance(local_shard, LocalTiles)
        spec = self._specs[self.model.get_parameter(local_shard.key)]
        return self.engine.host_shards.joined(local_shard, shards, spec)

    def local_numel(self) -> int:
        """Return the number of parameter elements that one device holds at rest."""
        mesh = self.engine.mesh
        return sum(prod(partitioned_shape(shard.shape, mesh, spec)) for shard, spec in self._specs.items())

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what this process's devices have of tensors, flat, on the host: all of them, or this host's part."""
        if not self.engine.is_partitioned:
            return super().fetch(tensors)
        self.engine.sync(wait=True)  # shards are only there once they are computed
        host_shards, found = self.engine.host_shards, local_pieces([tensor.detach() for tensor in tensors])
        if host_shards is None:
            return [joined_pieces(*pair).view(-1) for pair in zip((t.shape for t in tensors), found, strict=True)]
        return [host_shards.own_elements(pieces, tensor.shape) for tensor, pieces in zip(tensors, found, strict=True)]

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is split like a parameter."""
        host_shards = self.engine.host_shards
        full = local if host_shards is None else host_shards.with_own_elements(local, self[parameter])
        return self.place_shaped(parameter, full)

    def place_shaped(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Return a flat, unsharded tensor so that it is split like a parameter."""
        return self.engine.transfer([value.view(parameter.shape)], [self._specs[parameter]])[0]


class ProcessShards(XlaShards):
    """The parameters of a model of which each process has a shard on its device."""

    engine: "MultiprocessEngine"

    def __init__(
        self,
        engine: "MultiprocessEngine",
        model: nn.Module,
        plan: ShardingPlan,
        gatherers: Sequence["ParameterGatherer"],
    ) -> None:
        """Describe the parameters.

        Args:
            engine: The model's engine.
            model: The sharded model.
            plan: Its plan.
            gatherers: Those of its units, which have the shards.
        """
        super().__init__(engine, model, plan)
        self._gatherers = gatherers

    @cached_property
    def coordinates(self) -> ShardCoordinates:
        """This process's place on the axes of shards and of replicas."""
        mesh, rank = self.engine.mesh, self.engine.job.rank
        shard_index, replica = mesh.index(rank, Role.SHARD), mesh.index(rank, Role.REPLICATE)
        return ShardCoordinates(mesh.size(Role.SHARD), shard_index, mesh.size(Role.REPLICATE), replica)

    def _local_shards(self) -> Iterator[tuple[nn.Parameter, LocalShard]]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for gatherer in self._gatherers:
            for parameter in gatherer.parameters:
                members = tuple((weight.name, weight.shape) for weight in parameter.weights)
                index = self.coordinates.shard_index
                yield parameter.shard, LocalShard(names[parameter.shard], members, parameter.rows.shard_numel, index)

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor that lies like a parameter's shard, the padding zeros."""
        assert isinstance(parameter, ShardedTensor)
        rows, padded = parameter._origin.rows, local
        if len(local) < rows.shard_numel:
            padded = local.new_zeros(rows.shard_numel)
            padded[: len(local)] = local
        return as_shard(runtime.to_device([padded.view(rows.shard_shape)])[0], parameter._origin)

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest."""
        return sum(parameter.rows.shard_numel for gatherer in self._gatherers for parameter in gatherer.parameters)
