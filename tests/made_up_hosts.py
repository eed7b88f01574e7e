"""Two hosts of a TPU slice that do not exist, for programs with two ranks: one program for the devices of both.

XLA's CPU client connects no processes. So each process has all devices, and computes the whole program by itself; but
only some of them are its own. Of what the processes transfer, each device gets its slice of the tensor of its own
host, as torch_xla would transfer it, and devices that are to have the same slice are checked to get the same. What a
process reads are the shards of its own devices. Memory that nobody has filled in is NaN.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchacc import env
from torchacc.engines.xla import hardware, runtime
from torchacc.engines.xla.spmd import SpmdEngine

ORDER = [2, 0, 3, 1]
"""XLA's number of the device at each place on the mesh."""
OWN = [[0, 3], [1, 2]]
"""XLA's numbers of the devices of each host: in this order they feed every other data-parallel device."""


def stand_in() -> None:
    """Let this process be one of the two."""
    own = OWN[env.read_job().rank]
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory
    hardware.check_one_each_host = lambda job: None
    runtime.check_process_count = lambda num_processes: None
    runtime.local_devices = lambda: own
    SpmdEngine.device_order = ORDER
    SpmdEngine.transfer = _transfer
    _read_own_alone(own)


_alone = SpmdEngine.transfer


def _transfer(engine: SpmdEngine, tensors: Sequence[torch.Tensor], specs: Sequence[Any]) -> list[torch.Tensor]:
    """Transfer what the devices of both hosts would have."""
    gathered = engine.group.all_gather_objects(list(tensors))
    joined = [_join(engine, each, spec) for each, spec in zip(zip(*gathered, strict=True), specs, strict=True)]
    return _alone(engine, joined, specs)


def _join(engine: SpmdEngine, by_rank: Sequence[torch.Tensor], spec: Any) -> torch.Tensor:
    if by_rank[0].is_meta or by_rank[0].shape != by_rank[1].shape:
        return by_rank[engine.job.rank]
    whole = by_rank[0].clone()
    tiles = np.array(engine.partition(spec or (None,) * whole.dim()).tile_assignment)
    if not tiles.size:
        assert torch.equal(*by_rank), "hosts have put in different values of what each device has"
        return whole
    tiles = tiles.reshape(*tiles.shape[: whole.dim()], -1)
    for at in np.ndindex(*tiles.shape[: whole.dim()]):
        sizes = [size // count for size, count in zip(whole.shape, tiles.shape, strict=False)]
        box = tuple(slice(index * size, (index + 1) * size) for index, size in zip(at, sizes, strict=True))
        given = [by_rank[0 if device in OWN[0] else 1][box] for device in tiles[at]]
        assert all(torch.equal(each, given[0]) for each in given), "devices with one slice get different values"
        whole[box] = given[0]
    return whole


def _read_own_alone(own: Sequence[int]) -> None:
    from torch_xla import _XLAC

    shards, places = _XLAC._get_local_shards, _XLAC._get_local_shard_replica_and_indices
    is_own = [device in own for device in range(len(ORDER))]

    def of_own(found: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [[each for each, counts in zip(of_tensor, is_own, strict=True) if counts] for of_tensor in found]

    _XLAC._get_local_shards = lambda tensors: of_own(shards(tensors))
    _XLAC._get_local_shard_replica_and_indices = lambda tensors: of_own(places(tensors))
