"""Collectives on the host, over gloo: XLA's CPU client has no collectives of its own.

They run between the programs. Weights come in as data before the forward, and stay until the gradients, which are
reduced once when the backward has run: forward and backward would be cut at each unit otherwise.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from torchacc.engines.process_group import ProcessGroup
from torchacc.engines.sample_rows import SampleGatherer
from torchacc.engines.xla import runtime
from torchacc.engines.xla.collectives import Collectives, GatheredParameter, ParameterGatherer, flatten
from torchacc.engines.xla.sharded_tensor import as_shard_like, local_of
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import RowLayout

_log = get_logger(__name__)


class HostCollectives(Collectives):
    """Collectives on host tensors along the mesh's axes."""

    def __init__(self, mesh: Mesh, group: ProcessGroup) -> None:
        """Make the process groups. Collective: every process."""
        super().__init__(mesh, group.job.rank, group.check_same_call)
        self._group = group
        self._shards = group.own_subgroup(mesh.groups(Role.SHARD))
        self._replicas = group.own_subgroup(mesh.groups(Role.REPLICATE))
        self._gatherers: list[_HostGatherer] = []
        self._in_backward = False
        self._is_queued = False
        self._keeps_all = False

    def make_gatherer(self, parameters: list[GatheredParameter], *, reshard_after_forward: bool) -> ParameterGatherer:
        """Return the gatherer of a unit with these parameters; its weights are the program's input, and stay for it."""
        if reshard_after_forward and self.num_shards > 1 and not self._keeps_all:
            self._keeps_all = True
            _log.info(
                "XLA's CPU client has no collectives of its own, so that full weights stay from forward to backward, "
                "as with SHARD_GRAD_OP; config.dist.fsdp.use_spmd = True frees them in between"
            )
        self._gatherers.append(_HostGatherer(parameters, self))
        return self._gatherers[-1]

    def average(self, scalars: torch.Tensor) -> torch.Tensor:
        """Return the mean over all devices. What has been recorded runs here: the mean is known on the host only."""
        runtime.sync()
        return runtime.to_device([self._group.all_reduce_mean(runtime.to_host([scalars])[0])])[0]

    def combine_norms(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm over all shards from this process's norms."""
        local = runtime.to_host([norms])[0].double()
        total = local.max() if norm_type == inf else local.pow(norm_type).sum()
        if self.num_shards > 1 and norm_type == inf:
            total = self.all_gather(total.view(1)).max()  # gloo's own maximum loses a NaN
        elif self.num_shards > 1:
            dist.all_reduce(total, group=self._shards)
        return runtime.to_device([(total if norm_type == inf else total.pow(1 / norm_type)).float()])[0]

    def unshard(self, shard: torch.Tensor, rows: RowLayout) -> torch.Tensor:
        """Return the unsharded tensor on the device. Collective: every process."""
        host = runtime.to_host([shard])[0].reshape(-1)
        # As bytes: gloo does not know all dtypes.
        gathered = self.all_gather(host.view(torch.uint8)).view(host.dtype)
        return runtime.to_device([rows.unshard(gathered)])[0]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shards, of shape (n,) each, as a tensor of shape (num_shards, n)."""
        if self.num_shards == 1:
            return shard.unsqueeze(0)
        full = shard.new_empty(self.num_shards * shard.numel())
        dist.all_gather_into_tensor(full, shard, group=self._shards)
        return full.view(self.num_shards, -1)

    def reduce_scatter_mean(self, full: torch.Tensor) -> torch.Tensor:
        """Average a tensor of shape (num_shards, n) over all devices, and return this device's row of the result."""
        shard = full[0]
        if self.num_shards > 1:
            shard = full.new_empty(full.shape[1])
            dist.reduce_scatter_tensor(shard, full.view(-1), group=self._shards)
        if self._replicas is not None:
            dist.all_reduce(shard, group=self._replicas)
        return shard.div_(self.num_devices)

    def queue_reduction(self) -> None:
        """Queue a callback of autograd that reduces the gradients at the end of the running backward."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def begin_backward(self) -> None:
        """Record that a backward of the model has begun: it may raise before it has a gradient of any parameter."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False

    def end_failed_backward(self, *, accumulates: bool) -> bool:
        """Drop the gradients that have not been reduced: autograd has dropped the callbacks of the backward's end."""
        is_lost = accumulates and (self._in_backward or self._is_queued)
        self._in_backward = self._is_queued = False
        if is_lost:
            self.drop_gradients()
        return is_lost

    def drop_gradients(self) -> None:
        """Drop the full gradients that have not been reduced."""
        for gatherer in self._gatherers:
            gatherer.gradients.clear()

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._is_queued = False
        runtime.sync()
        if not self.holds_gradients:
            for gatherer in self._gatherers:
                gatherer.reduce()


class XlaSampleGatherer(SampleGatherer):
    """Collectives of rows on the host: what has been recorded runs before each of them."""

    def __init__(self, group: ProcessGroup, mesh: Mesh, run: Callable[[], None]) -> None:
        """Take a call that runs what has been recorded. Collective: every process."""
        super().__init__(group, mesh)
        self._run = run

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes."""
        return self._by_host(super().gather, rows)

    def sum_of_own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of this process's rows."""
        return self._by_host(super().sum_of_own, gradient)

    def _by_host(self, act: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return act(tensor)
        self._run()
        return runtime.to_device([act(runtime.to_host([tensor])[0])])[0]


class _HostGatherer(ParameterGatherer):
    keeps_weights = True

    def __init__(self, parameters: list[GatheredParameter], collectives: HostCollectives) -> None:
        super().__init__(parameters)
        self._collectives = collectives
        self.gradients: dict[GatheredParameter, torch.Tensor] = {}
        """The full gradients of this process that have not been reduced yet."""
        self._trained: set[GatheredParameter] = set()
        """What was gathered for gradients since the last reduction, also where it is frozen by now."""

    def gather(self) -> list[torch.Tensor]:
        full = runtime.to_device(self._gather(self.parameters, [parameter.dtype for parameter in self.parameters]))
        parts = []
        for parameter, tensor in zip(self.parameters, full, strict=True):
            tensor = parameter.weights[0].with_unique_hash(tensor)
            if parameter.shard.requires_grad and torch.is_grad_enabled():
                self._trained.add(parameter)
                tensor = _HostGather.apply(parameter.shard, tensor, parameter, self)
            parts += parameter.parts(tensor)
        return parts

    def read(self, parameter: GatheredParameter) -> torch.Tensor:
        """Return a full parameter in the dtype of its shards, connected to them for autograd."""
        (full,) = runtime.to_device(self._gather([parameter], [parameter.shard.dtype]))
        self._trained.add(parameter)
        read: torch.Tensor = _HostGather.apply(parameter.shard, full, parameter, self)
        return read

    def add_gradient(self, parameter: GatheredParameter, gradient: torch.Tensor) -> None:
        """Keep a full gradient for the reduction, unless the parameter has been frozen since the forward."""
        self._collectives.queue_reduction()
        if not parameter.shard.requires_grad:
            return
        held = self.gradients.get(parameter)
        dtype = self._collectives.sum_dtype(parameter.shard.dtype)
        self.gradients[parameter] = gradient if held is None else held.to(dtype) + gradient

    def reduce(self) -> None:
        """Average the full gradients over all devices, and add this process's shard of them to the parameters'.

        A parameter that no process has a gradient of keeps none: each tells by one more element whether it has.
        """
        gradients, self.gradients = self.gradients, {}
        trained, self._trained = self._trained, set()
        parameters = [
            parameter for parameter in self.parameters if parameter in trained or parameter.shard.requires_grad
        ]
        if not parameters:
            return
        have = [parameter for parameter in parameters if parameter in gradients]
        host = dict(zip(have, runtime.to_host([gradients[parameter] for parameter in have]), strict=True))
        shards = self._collectives.num_shards
        dtype = max(
            (self._collectives.sum_dtype(parameter.shard.dtype) for parameter in parameters),
            key=lambda dtype: dtype.itemsize,
        )
        columns = [
            parameter.rows.pad(host[parameter].to(dtype)).reshape(shards, -1)
            if parameter in host
            else torch.zeros(shards, parameter.rows.shard_numel, dtype=dtype)
            for parameter in parameters
        ]
        present = torch.tensor([float(parameter in host) for parameter in parameters], dtype=dtype).expand(shards, -1)
        mean = self._collectives.reduce_scatter_mean(torch.cat([*columns, present], dim=1))
        *parts, share = mean.split([*(parameter.rows.shard_numel for parameter in parameters), len(parameters)])
        kept = [index for index, part in enumerate(share.tolist()) if part > 0]
        host_shards = [
            parts[index].view(parameters[index].rows.shard_shape).to(parameters[index].shard.dtype) for index in kept
        ]
        moved = runtime.to_device(host_shards)
        for index, gradient in zip(kept, moved, strict=True):
            shard = parameters[index].shard
            gradient = as_shard_like(shard, gradient)
            shard.grad = gradient if shard.grad is None else shard.grad + gradient

    def _gather(self, parameters: Sequence[GatheredParameter], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return full parameters in these dtypes; those of one dtype travel together."""
        shards = runtime.to_host([local_of(parameter.shard) for parameter in parameters])
        full: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(dtypes):
            chosen = [index for index, other in enumerate(dtypes) if other == dtype]
            gathered = self._collectives.all_gather(flatten([shards[index].to(dtype) for index in chosen]))
            parts = gathered.split([parameters[index].rows.shard_numel for index in chosen], dim=1)
            full |= {index: parameters[index].rows.unshard(part) for index, part in zip(chosen, parts, strict=True)}
        return [full[index] for index in range(len(parameters))]


class _HostGather(torch.autograd.Function):
    """Pass on the full parameter of a shard; keep its gradient for the reduction after backward."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, full: torch.Tensor, parameter: GatheredParameter, owner: _HostGatherer
    ) -> Any:
        ctx.parameter, ctx.owner = parameter, owner
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.owner.add_gradient(ctx.parameter, grad)
        return None, None, None, None
