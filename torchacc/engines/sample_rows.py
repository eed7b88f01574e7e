"""The samples of all data-parallel devices, one after another, on each of them: for losses that compare all samples."""

from typing import Any

import torch
import torch.distributed as dist

from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import DataError, EngineError
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh

_MOST_DIMS = 8


class SampleGatherer:
    """Gathers samples between processes that see different data, by PyTorch's own collectives."""

    def __init__(self, group: ProcessGroup, mesh: Mesh) -> None:
        """Make the group of processes. Collective: every process."""
        groups = mesh.groups(Role.BATCH)
        own = next(ranks for ranks in groups if group.job.rank in ranks)
        self.ranks = sorted(own, key=mesh.data_parallel_rank)
        """The processes in the order of their samples."""
        self._members = group.own_subgroup(groups)
        # PyTorch sorts the processes of a group.
        self._order = [sorted(own).index(rank) for rank in self.ranks]
        self._own = self.ranks.index(group.job.rank)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the samples of all processes, connected to this one's for autograd. Collective: every process."""
        if len(self.ranks) == 1:
            return tensor
        self._check_alike(tensor)
        gathered: torch.Tensor = _AllGather.apply(tensor, self)
        return gathered

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the samples of all processes, of shape (processes * samples, …). Collective: every process."""
        count, shape = len(self.ranks), rows.shape
        own = rows.contiguous().view(-1).view(torch.uint8)  # bytes: gloo does not know all dtypes
        gathered = own.new_empty(count * len(own))
        dist.all_gather_into_tensor(gathered, own, group=self._members)
        return self._in_order(gathered.view(rows.dtype).view(count, *shape)).flatten(0, 1)

    def sum_of_own(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes of a tensor's part that is this process's samples. Collective."""
        by_process = gradient.reshape(len(self.ranks), -1)
        wide = by_process.to(torch.promote_types(gradient.dtype, torch.float32))
        placed = torch.empty_like(wide)
        placed[self._order] = wide
        total = wide.new_empty(wide.shape[1])
        dist.reduce_scatter_tensor(total, placed.view(-1), group=self._members)
        return total.to(gradient.dtype).view(-1, *gradient.shape[1:])

    def _in_order(self, by_member: torch.Tensor) -> torch.Tensor:
        return by_member if self._order == list(range(len(self._order))) else by_member[self._order]

    def _check_alike(self, tensor: torch.Tensor) -> None:
        """Refuse on every process what is not alike everywhere.

        Raises:
            DataError: Shapes, dtypes, or whether a gradient is asked for differ.
        """
        dims = list(tensor.shape[:_MOST_DIMS]) + [-1] * (_MOST_DIMS - tensor.dim())
        tracks = tensor.requires_grad and torch.is_grad_enabled()
        own = torch.tensor([*dims, tensor.dim(), _DTYPES.index(str(tensor.dtype)), tracks])
        found = torch.empty(len(self.ranks) * len(own), dtype=torch.int64)
        dist.all_gather_into_tensor(found, own, group=self._members)
        described_by_rank = self._in_order(found.view(len(self.ranks), -1)).tolist()
        if any(other != described_by_rank[0] for other in described_by_rank):
            described = "; ".join(
                f"rank {rank} {tuple(each[: min(each[-3], _MOST_DIMS)])} {_DTYPES[each[-2]]}"
                f"{' with a gradient' if each[-1] else ''}"
                for rank, each in zip(self.ranks, described_by_rank, strict=True)
            )
            raise DataError(
                f"torchacc.dist.all_gather() of tensors that differ between the processes: {described}. Pad them to "
                "one shape, and mask what is padding; a loader of accelerate() gives every process as many rows"
            )


_DTYPES = sorted(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype))


class _AllGather(torch.autograd.Function):
    """The rows of all processes. The gradient of a process's rows is the sum of what all processes' losses give them.

    Engines average gradients over the processes, so that a loss of all samples, which each of them computes, has the
    gradient that one process would give it; as has the mean of losses that each process computes of its own samples.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gatherer: SampleGatherer) -> torch.Tensor:
        ctx.gatherer = gatherer
        return gatherer.gather(rows.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled() and gradient.requires_grad:
            raise EngineError(
                "create_graph=True through torchacc.dist.all_gather(): the gradient of gathered rows has no graph. "
                "Compute the gradient penalty of a loss of the process's own rows"
            )
        return ctx.gatherer.sum_of_own(gradient), None
