"""One program for the devices of several hosts, with a process on each: what this process puts in, and takes out.

Nothing is sent here but on the host. A tensor that is moved to the devices has its full shape in every process, which
fills in what its own devices need; of that torch_xla takes the slice of each of these devices, and of no other.
"""

import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchacc.engines.process_group import ProcessGroup
from torchacc.engines.xla import runtime
from torchacc.engines.xla.local_pieces import joined_pieces
from torchacc.errors import DataError
from torchacc.parallel.hosts import Box, Hosts, LocalTiles, element_runs
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import LocalShard


class HostShards:
    """This process's share of the devices' tensors."""

    def __init__(self, group: ProcessGroup, mesh: Mesh, order: Sequence[int]) -> None:
        """Learn which process drives which device. Collective: every process.

        Args:
            group: The processes.
            mesh: The mesh of all devices.
            order: XLA's number of the device at each place on the mesh.
        """
        driven: list[list[int]] = group.all_gather_objects(runtime.local_devices())
        driver = {device: rank for rank, devices in enumerate(driven) for device in devices}
        self.hosts = Hosts(mesh, tuple(driver[device] for device in order))
        self.data_parallel_ranks = self.hosts.data_parallel_ranks(group.job.rank)
        """The data-parallel devices that this process feeds."""
        self._group = group
        self._rank = group.job.rank

    def whole_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the rows of all devices, of which this process's own have values.

        Raises:
            DataError: It has not as many rows for each of the devices that this process feeds.
        """
        if not tensor.dim() or tensor.shape[0] % len(self.data_parallel_ranks):
            raise DataError(
                f"a tensor of shape {tuple(tensor.shape)} on one of {self._group.job.num_processes} hosts, which feeds "
                f"{len(self.data_parallel_ranks)} data-parallel devices: nothing says that the other hosts have the "
                "same, so give a row for each sample of this host, as value.expand(rows, …), or a number that is the "
                "same on all hosts, as value.item()"
            )
        return self.hosts.whole_rows(tensor, self._rank)

    def all_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all devices on the host, in the order of the global batch. Collective: every process."""
        full = self.whole_rows(tensor)
        each = tensor.shape[0] // len(self.data_parallel_ranks)
        for rank, rows in enumerate(self._group.all_gather_objects(tensor)):
            for shard, own in zip(self.hosts.data_parallel_ranks(rank), rows.split(each), strict=True):
                full[shard * each : (shard + 1) * each] = own
        return full

    def check_same_call(self, inputs: Any) -> None:
        """Refuse a forward that others do not make, or make with other shapes or numbers. Collective: every process.

        Raises:
            EngineError: On every process; the hosts would run different programs, and wait for each other for ever.
        """
        leaves = [said for said in map(_in_program, tree_leaves(inputs)) if said is not None]
        described = ", ".join([*leaves, "with gradients" if torch.is_grad_enabled() else "without gradients"])
        digest = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()  # as what is sent may be cut
        self._group.check_same_call(
            f"calls the model, {digest}, with {described}",
            "the hosts call the model with tensors of different shapes, or other numbers, and run one program",
            "Call it on every host, with as many rows of one length: pad them in collate_fn, or by "
            "config.dataloader.max_length with num_buckets = 1",
        )

    def own_elements(self, pieces: Mapping[Box, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Return this process's elements of a tensor, flattened, in the full tensor's order.

        Args:
            pieces: What its devices have, as `local_pieces()` gives it.
            shape: The full tensor's.
        """
        full = joined_pieces(shape, pieces).view(-1)
        runs = [full[start:stop] for start, stop in element_runs(shape, pieces)]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def with_own_elements(self, local: torch.Tensor, shard: LocalShard) -> torch.Tensor:
        """Return a flat tensor of all elements, of which this process's own have values: undo `own_elements()`."""
        full = local.new_empty(shard.numel)
        for part in shard.slices:
            full[part.start : part.stop] = local[part.offset : part.offset + part.numel]
        return full

    def joined(self, shard: LocalTiles, of_all: torch.Tensor, spec: Any) -> torch.Tensor:
        """Return all elements of a parameter, flat, from what every process holds, each padded to the most."""
        [(name, shape)] = shard.members
        full = of_all.new_empty(prod(shape))
        for rank, local in enumerate(of_all.split(shard.shard_numel)):
            for part in self.hosts.held(name, shape, spec, rank).slices:
                full[part.start : part.stop] = local[part.offset : part.offset + part.numel]
        return full


def _in_program(leaf: Any) -> str | None:
    """Return what of a forward's input is a part of the program that it records; None where nothing is."""
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, int | float | str) else None
