"""What each of several hosts feeds and holds: all of it once, whichever devices it drives."""

import random
from collections import Counter
from itertools import product
from math import prod

import pytest
import torch

from torchacc.parallel.hosts import Hosts, element_runs
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import partition_spec

MESHES = [
    Mesh((("dp", 1), ("fsdp", 8), ("tp", 1))),
    Mesh((("dp", 2), ("fsdp", 2), ("tp", 2))),
    Mesh((("dp", 8), ("fsdp", 1), ("tp", 1))),
    Mesh((("dp", 1), ("fsdp", 2), ("sp", 2), ("tp", 2))),
]
DRIVERS = {
    "in order": (0, 0, 1, 1, 2, 2, 3, 3),
    "far apart": (0, 1, 2, 3, 0, 1, 2, 3),
    "by chance": (2, 0, 3, 1, 1, 2, 0, 3),
    "of two": (0, 0, 0, 0, 1, 1, 1, 1),
}
SHAPES = [((16, 6), ()), ((131, 8), ()), ((3, 5), ()), ((), ()), ((8,), ()), ((4, 3, 16), ())]
SPLIT = [((16, 8), ("tp", None)), ((6, 16), (None, "tp"))]

every_layout = pytest.mark.parametrize(
    "hosts",
    [Hosts(mesh, drivers) for mesh in MESHES for drivers in DRIVERS.values()],
    ids=[f"{mesh.describe()}, {name}" for mesh in MESHES for name in DRIVERS],
)


@every_layout
def test_each_row_is_fed_by_the_hosts_of_its_devices(hosts):
    for rank in set(hosts.process_of_device):
        own = {hosts.mesh.data_parallel_rank(device) for device in range(8) if hosts.process_of_device[device] == rank}
        assert hosts.data_parallel_ranks(rank) == tuple(sorted(own))
    batch = torch.arange(float(6 * hosts.mesh.data_parallel_size)).view(-1, 3)
    rows = batch.split(2)
    for rank in set(hosts.process_of_device):
        whole = hosts.whole_rows(torch.cat([rows[shard] for shard in hosts.data_parallel_ranks(rank)]), rank)
        assert whole.shape == batch.shape
        for shard in hosts.data_parallel_ranks(rank):
            assert torch.equal(whole.split(2)[shard], rows[shard])


def indices_of(mesh, device, shape, spec):
    """Compute which elements a device holds, dimension by dimension."""
    at, dims = mesh.coordinates(device), []
    for size, entry in zip(shape, spec, strict=True):
        names = (entry,) if isinstance(entry, str) else entry or ()
        number, count = 0, prod(mesh.axis_size(name) for name in names)
        for name in names:
            number = number * mesh.axis_size(name) + at[name]
        dims.append(range(number * size // count, (number + 1) * size // count))
    numbers = torch.arange(prod(shape)).view(shape)
    return {int(numbers[index]) for index in product(*dims)}


@every_layout
@pytest.mark.parametrize(("shape", "planned"), SHAPES + SPLIT)
def test_a_host_holds_what_its_devices_hold_and_each_element_is_written_once(hosts, shape, planned):
    if "tp" in planned and hosts.mesh.axis_size("tp") == 1:
        planned = ()
    spec = partition_spec(shape, hosts.mesh, planned)
    written = Counter()
    for rank in sorted(set(hosts.process_of_device)):
        shard = hosts.held("weight", shape, spec, rank)
        devices = [device for device in range(8) if hosts.process_of_device[device] == rank]
        expected = set().union(*(indices_of(hosts.mesh, device, shape, spec) for device in devices))
        elements = [at for part in shard.slices for at in range(part.start, part.stop)]
        assert elements == sorted(expected)
        offsets = [at for part in shard.slices for at in range(part.offset, part.offset + part.numel)]
        assert offsets == list(range(len(expected)))
        assert len(expected) <= shard.shard_numel
        for part, replica in zip(shard.slices, shard.replicas, strict=True):
            own = part.part(*replica)
            written.update(range(own.start, own.stop))
    assert written == Counter(range(prod(shape)))


def test_what_many_hosts_hold_is_written_by_all_of_them():
    hosts = Hosts(MESHES[2], DRIVERS["in order"])
    shards = [hosts.held("weight", (16, 4), (None, None), rank) for rank in range(4)]
    assert [shard.slices[0].part(*shard.replicas[0]).numel for shard in shards] == [16] * 4


def test_runs_are_joined_where_they_touch():
    assert element_runs((4, 4), [(range(0, 2), range(4)), (range(2, 3), range(4))]) == [(0, 12)]
    assert element_runs((2, 4), [(range(2), range(2, 4)), (range(2), range(1, 2))]) == [(1, 4), (5, 8)]
    assert element_runs((), [()]) == [(0, 1)]


def test_who_holds_which_tile_is_found_once_for_all_parameters_that_are_split_alike():
    mesh = Mesh((("dp", 2), ("fsdp", 64), ("tp", 4)))
    drivers = [device // 4 for device in range(512)]
    random.Random(0).shuffle(drivers)
    hosts = Hosts(mesh, tuple(drivers))
    shards = [hosts.held(f"weight{index}", (1024, 512), ("fsdp", "tp"), 7) for index in range(200)]
    assert {shard.numel for shard in shards} == {1024 * 512}
    assert len(hosts._holders) == 1
