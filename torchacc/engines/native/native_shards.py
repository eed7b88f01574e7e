"""What a process holds of a model's parameters where they are DTensors, ordinary tensors, or those of one stage."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property

import torch
from torch import nn
from torch.autograd.graph import increment_version

from torchacc.engines.model_shards import ModelShards
from torchacc.engines.native import device_copies
from torchacc.parallel import sharding
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import LocalShard, ShardCoordinates


class NativeShards(ModelShards):
    """The parameters of a model that are DTensors."""

    @cached_property
    def coordinates(self) -> ShardCoordinates:
        """This process's place on the mesh; of a weight split by its inputs, too, it holds a part of each row."""
        mesh, rank = self.engine.mesh, self.engine.job.rank
        replica, num_replicas = _place_among(mesh, rank, Role.REPLICATE)
        shard_index, _ = _place_among(mesh, rank, Role.SHARD)
        is_contiguous = self.plan.tensor_parallel.size == 1
        return ShardCoordinates(mesh.size(Role.SHARD, Role.TENSOR), shard_index, num_replicas, replica, is_contiguous)

    def _replica_of(self, local_shard: LocalShard) -> tuple[int, int]:
        """Return this process's place among those with the same shard."""
        return _place_among(self.engine.mesh, self.engine.job.rank, *sharding.replicated_over(local_shard))

    def _local_shards(self) -> Iterator[tuple[nn.Parameter, LocalShard]]:
        rank = self.engine.job.rank
        for planned in self.plan.parameters:
            yield self.model.get_parameter(planned.name), self._shard_of(planned.name, planned.shape, rank)

    def _shard_of(self, name: str, shape: tuple[int, ...], rank: int) -> LocalShard:
        return sharding.local_shard(name, shape, self.engine.mesh, rank, self.plan.tensor_parallel.spec_of(name))

    def _joined(self, local_shard: LocalShard, shards: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from the shards of processes, of which those that share layers may have the same."""
        if self.coordinates.is_contiguous:
            return super()._joined(local_shard, shards)
        groups = self.engine.mesh.groups(Role.PIPELINE, Role.SHARD, Role.TENSOR)
        ranks = next(group for group in groups if self.engine.job.rank in group)
        held = [self._shard_of(*local_shard.members[0], rank) for rank in ranks]
        return sharding.unshard(zip(held, shards.view(len(ranks), -1), strict=True))

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest, those of the largest shard."""
        return sum(local_shard.shard_numel for local_shard in self.values())

    @torch.no_grad()
    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the local tensors of DTensors, flat, on the host."""
        local = [local_tensor(each).detach() for each in tensors]
        return [tensor.reshape(-1) for tensor in device_copies.to_host(local)]

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor that is sharded like a parameter."""
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        spec = parameter._spec
        if local.dtype != parameter.dtype:
            assert spec.tensor_meta is not None
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        # DTensor.from_local() takes ten times as long, and brings shards that are kept on the host to the device.
        return DTensor(local.view(local_tensor(parameter).shape).to(parameter.device), spec, requires_grad=False)

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Copy new values into the shard that is there."""
        shard = local_tensor(parameter)
        shard.copy_(local.view(shard.shape))
        increment_version(parameter)


class ReplicatedShards(NativeShards):
    """The parameters of a model of which each device has all."""

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor in a parameter's shape, on its device."""
        return local.view(parameter.shape).to(parameter.device)


class StageShards(NativeShards):
    """The parameters of a model in stages, of which this process holds those of its own."""

    @cached_property
    def coordinates(self) -> ShardCoordinates:
        """This process's place among those of all stages."""
        mesh, rank = self.engine.mesh, self.engine.job.rank
        held_by, copies = (Role.PIPELINE, Role.SHARD, Role.TENSOR), Role.REPLICATE
        return ShardCoordinates(
            processes_per_replica=mesh.size(*held_by),
            shard_index=mesh.index(rank, *held_by),
            num_replicas=mesh.size(copies),
            replica=mesh.index(rank, copies),
            is_contiguous=False,
        )

    @cached_property
    def _own_place(self) -> int:
        return self.engine.mesh.index(self.engine.job.rank, Role.PIPELINE)

    @cached_property
    def _names_of(self) -> dict[str, tuple[str, ...]]:
        return {planned.name: planned.names for planned in self.plan.parameters}

    def _replica_of(self, local_shard: LocalShard) -> tuple[int, int]:
        """Return this process's place among those with the same shard, which of a tied parameter are in two stages."""
        index, count = super()._replica_of(local_shard)
        places = self.plan.pipeline.places_of(self._names_of[local_shard.names[0]])
        own = places.index(self._own_place) if self._own_place in places else 0
        return index * len(places) + own, count * len(places)

    def _shard_of(self, name: str, shape: tuple[int, ...], rank: int) -> LocalShard:
        mesh, places = self.engine.mesh, self.plan.pipeline.places_of(self._names_of[name])
        shard = super()._shard_of(name, shape, rank)
        return shard if mesh.index(rank, Role.PIPELINE) in places else sharding.empty_shard(shard, mesh)

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest."""
        own = {each.name for each in self.plan.of_stages(self.plan.pipeline.stages_at(self._own_place)).parameters}
        return sum(shard.shard_numel for shard in self.values() if shard.key in own)


@cache
def _place_among(mesh: Mesh, rank: int, *roles: Role) -> tuple[int, int]:
    """Return a process's place among those that differ from it only along axes with these roles, and their number."""
    return mesh.index(rank, *roles), mesh.size(*roles)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a distributed tensor, and another as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
