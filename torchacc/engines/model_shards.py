"""What a process holds of a model's parameters: the interface by which checkpoints read and write them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchacc.engines.base import Engine
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.sharding import LocalShard, ShardCoordinates


class ModelShards(ABC, Mapping[nn.Parameter, LocalShard]):
    """The parameters that optimizers of a sharded model see, each with what this process holds of it."""

    def __init__(self, engine: Engine, model: nn.Module, plan: ShardingPlan) -> None:
        self.engine = engine
        self.model = model
        self.plan = plan

    def __getitem__(self, parameter: nn.Parameter) -> LocalShard:
        return self._by_parameter[parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._by_parameter)

    def __len__(self) -> int:
        return len(self._by_parameter)

    @cached_property
    def _by_parameter(self) -> dict[nn.Parameter, LocalShard]:
        return dict(self._local_shards())

    @abstractmethod
    def _local_shards(self) -> Iterator[tuple[nn.Parameter, LocalShard]]: ...

    @abstractmethod
    def local_numel(self) -> int:
        """Return the number of parameter elements that one device holds at rest, padding included."""

    # ---- Values

    @abstractmethod
    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what this process holds of tensors that are sharded like parameters, on the host.

        Returns:
            For each a tensor of one dimension, padding included or left out; it may share memory with the model.
        """

    @abstractmethod
    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is sharded like a parameter.

        Args:
            parameter: One of these.
            local: What this process is to hold of it: a host tensor of one dimension, any dtype, and as many elements
                as its pieces have.
        """

    def place_full(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is sharded like a parameter, from an unsharded one of its shape."""
        flat = full.detach().cpu().reshape(-1)
        parts = [flat[piece.start : piece.stop] for piece in self[parameter].slices]
        return self.place(parameter, torch.cat(parts) if parts else flat[:0])

    def assign(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Give a parameter new values; the arguments are those of `place()`."""
        parameter.copy_(self.place(parameter, local))

    def gather(self, local_shard: LocalShard, local: torch.Tensor, *, rank0_only: bool) -> torch.Tensor | None:
        """Return the full tensors of a parameter from its shards, flat, on the host. Collective: every process.

        Args:
            local_shard: The parameter's.
            local: What `fetch()` gave.
            rank0_only: Whether other processes than rank 0 get None, and need no memory for them.
        """
        if not self.coordinates.is_split:
            return None if rank0_only and self.engine.job.rank else local[: local_shard.numel].clone()
        missing = local_shard.shard_numel - len(local)
        padded = nn.functional.pad(local, (0, missing)) if missing else local
        found = self.engine.group.gather(padded, self._shard_group, rank0_only=rank0_only)
        return found if found is None else self._joined(local_shard, found)

    def _joined(self, local_shard: LocalShard, shards: torch.Tensor) -> torch.Tensor:
        """Return the full tensors from the shards of all processes of `_shard_group`, one after another."""
        return shards[: local_shard.numel]

    @cached_property
    def _shard_group(self) -> Any:
        return self.engine.group.own_subgroup(self.engine.mesh.groups(Role.PIPELINE, Role.SHARD, Role.TENSOR))

    # ---- Which processes hold what

    @cached_property
    def coordinates(self) -> ShardCoordinates:
        """Which shards this process holds; all of them where one process drives all devices."""
        return ShardCoordinates()

    def replicas_of(self, local_shard: LocalShard) -> Sequence[tuple[int, int]]:
        """Return for each slice of a parameter's shard which copy of it this process holds, and how many there are."""
        return [self._replica_of(local_shard)] * len(local_shard.slices)

    def _replica_of(self, local_shard: LocalShard) -> tuple[int, int]:
        """Return which copy of a parameter's shard this process holds, and how many there are."""
        return self.coordinates.replica, self.coordinates.num_replicas

    def expect_all(self, call: str) -> None:
        """Wait until every process has come to a call that puts shards together. Collective: every process.

        Where each process has all of the model, nothing waits, and some may make the call by themselves.
        """
        if self.coordinates.is_split:
            self.engine.group.expect_all(call)
