"""The order of an epoch: rank 0 decides on it, and it follows the epoch's number."""

import importlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.unit.data.numbered_samples import Numbers, Ranks, Stream, expected, flat, read
from torchacc.data import AsyncLoader, shard_loader
from torchacc.errors import DataError

# Agreement


def seeded(rank: int) -> None:
    torch.manual_seed(100 + rank)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: RandomSampler(Numbers(12)),
        lambda: WeightedRandomSampler(torch.arange(1.0, 13.0), 12),
        lambda: SubsetRandomSampler(range(12)),
    ],
)
def test_rank_0_decides_on_the_order_and_other_ranks_keep_their_stream(make_sampler):
    def epoch(rank, agree):
        seeded(rank)
        loader = shard_loader(
            DataLoader(Numbers(12), 2, sampler=make_sampler()),
            data_parallel_size=3,
            shards=range(rank, rank + 1),
            agree=agree,
        )
        return read(loader), torch.rand(1).item()

    results = Ranks(3).run(epoch)
    seeded(0)
    order = flat(read(DataLoader(Numbers(12), 2, sampler=make_sampler())))
    after_rank_0 = torch.rand(1).item()
    assert [batches for batches, _ in results] == expected(order, 2, 3)
    assert results[0][1] == after_rank_0
    for rank in (1, 2):
        seeded(rank)
        torch.empty((), dtype=torch.int64).random_()  # the DataLoader's own draw, the workers' base seed
        assert results[rank][1] == torch.rand(1).item()


def test_ranks_that_are_seeded_alike_stay_alike():
    def epoch(rank, agree):
        torch.manual_seed(0)
        loader = DataLoader(Numbers(12), 2, shuffle=True)
        read(shard_loader(loader, data_parallel_size=2, shards=range(rank, rank + 1), agree=agree))
        return torch.rand(1).item()

    first, second = Ranks(2).run(epoch)
    assert first == second


def test_a_generator_of_the_users_own_follows_rank_0():
    def epochs(rank, agree):
        generator = torch.Generator().manual_seed(rank)
        loader = DataLoader(Numbers(12), 2, shuffle=True, generator=generator)
        sharded = shard_loader(loader, data_parallel_size=2, shards=range(rank, rank + 1), agree=agree)
        return [read(sharded) for _ in range(2)]

    results = Ranks(2).run(epochs)
    plain = DataLoader(Numbers(12), 2, shuffle=True, generator=torch.Generator().manual_seed(0))
    for epoch in range(2):
        assert [result[epoch] for result in results] == expected(flat(read(plain)), 2, 2)


def test_agreement_happens_in_the_thread_that_starts_the_epoch():
    ranks = Ranks(1)

    def epoch(_, agree):
        loader = DataLoader(Numbers(8), 2, shuffle=True, num_workers=1)
        return list(AsyncLoader(shard_loader(loader, data_parallel_size=1, shards=range(1), agree=agree)))

    ranks.run(epoch)
    assert ranks.threads == {threading.main_thread()}
    assert len(ranks.payloads) == 3


def test_agreement_with_ranks_that_run_at_once():
    """As a job runs: rank 1 waits for rank 0."""
    barrier, box = threading.Barrier(2), {}

    def epoch(rank):
        def agree(payload):
            box.setdefault("payload", payload) if rank == 0 else None
            barrier.wait(10)
            agreed = box["payload"]
            barrier.wait(10)
            box.clear()
            barrier.wait(10)
            return agreed

        loader = DataLoader(Numbers(9), 2, shuffle=True, generator=torch.Generator().manual_seed(rank))
        return read(shard_loader(loader, data_parallel_size=2, shards=range(rank, rank + 1), agree=agree))

    with ThreadPoolExecutor(2) as pool:
        shards = list(pool.map(epoch, range(2)))
    order = flat(read(DataLoader(Numbers(9), 2, shuffle=True, generator=torch.Generator().manual_seed(0))))
    assert shards == expected(order, 2, 2)


class Shuffled(Sampler):
    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed)).tolist())


def test_samplers_that_disagree_are_refused():
    def epoch(rank, agree, seeds=(0, 1)):
        loader = DataLoader(Numbers(12), 2, sampler=Shuffled(12, seeds[rank]))
        return read(shard_loader(loader, data_parallel_size=2, shards=range(rank, rank + 1), agree=agree))

    with pytest.raises(DataError, match="disagree on the order.*Seed the sampler alike"):
        Ranks(2).run(epoch)
    shards = Ranks(2).run(lambda rank, agree: epoch(rank, agree, seeds=(4, 4)))
    assert shards == expected(list(Shuffled(12, 4)), 2, 2)


def test_datasets_of_different_lengths_are_refused():
    def epoch(rank, agree):
        loader = DataLoader(Numbers(1000 + rank), 2)
        return read(shard_loader(loader, data_parallel_size=2, shards=range(rank, rank + 1), agree=agree))

    with pytest.raises(DataError, match="gives 500 batches .* but 501"):
        Ranks(2).run(epoch)


def test_double_sharding_is_refused():
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    for loader in (
        DataLoader(Numbers(8), 2, sampler=sampler),
        DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        with pytest.raises(DataError, match="one sample in 2.*Pass a plain sampler"):
            shard_loader(loader, data_parallel_size=2, shards=range(1))
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [*range(8)]})
    with pytest.raises(DataError, match="A Dataset does not give batches"):
        shard_loader(rows, data_parallel_size=2, shards=range(1))
    split = importlib.import_module("datasets.distributed").split_dataset_by_node(
        rows.to_iterable_dataset(num_shards=2), rank=0, world_size=2
    )
    with pytest.raises(DataError, match=r"one part in 2 \(split_dataset_by_node\(\)\)"):
        shard_loader(DataLoader(split, 2), data_parallel_size=2, shards=range(1))
    alone = DistributedSampler(Numbers(8), num_replicas=1, rank=0, shuffle=False)
    assert read(shard_loader(DataLoader(Numbers(8), 4, sampler=alone), data_parallel_size=2, shards=range(2))) == [
        [*range(8)]
    ]


# Epochs


@pytest.mark.parametrize("generator", [None, 9])
def test_an_epochs_order_does_not_depend_on_those_before(generator):
    def make():
        torch.manual_seed(1)
        own = None if generator is None else torch.Generator().manual_seed(generator)
        return shard_loader(
            DataLoader(Numbers(10), 5, shuffle=True, generator=own), data_parallel_size=1, shards=range(1)
        )

    through, orders = make(), []
    for epoch in range(3):
        through.set_epoch(epoch)
        orders.append(read(through))
    resumed = make()
    torch.rand(7)
    resumed.set_epoch(2)
    assert read(resumed) == orders[2]
    assert len({str(order) for order in orders}) == 3
    assert sorted(flat(orders[2])) == list(range(10))


def test_an_epochs_order_follows_the_seed_of_rank_0():
    def epoch(rank, agree):
        seeded(rank)
        loader = DataLoader(Numbers(8), 2, shuffle=True)
        sharded = shard_loader(loader, data_parallel_size=2, shards=range(rank, rank + 1), agree=agree)
        sharded.set_epoch(3)
        return read(sharded)

    shards = Ranks(2).run(epoch)
    assert sorted(flat(flat(shards))) == list(range(8))

    def order(seed):
        torch.manual_seed(seed)
        sharded = shard_loader(DataLoader(Numbers(8), 2, shuffle=True), data_parallel_size=1, shards=range(1))
        sharded.set_epoch(3)
        return flat(read(sharded))

    assert expected(order(100), 2, 2) == shards
    assert order(101) != order(100)


def test_set_epoch_leaves_the_models_stream_alone():
    torch.manual_seed(0)
    sharded = shard_loader(DataLoader(Numbers(8), 2, shuffle=True), data_parallel_size=1, shards=range(1))
    sharded.set_epoch(1)
    read(sharded)
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.rand(1))


def test_set_epoch_reaches_samplers_and_datasets():
    told = []

    class Told(Numbers):
        def set_epoch(self, epoch):
            told.append(("dataset", epoch))

    class ToldSampler(Shuffled):
        def set_epoch(self, epoch):
            told.append(("sampler", epoch))

    loader = DataLoader(Told(4), batch_sampler=BatchSampler(ToldSampler(4, 0), 2, False))
    shard_loader(loader, data_parallel_size=2, shards=range(1)).set_epoch(5)
    assert Counter(told) == {("dataset", 5): 1, ("sampler", 5): 1}
    stream = type("ToldStream", (Stream,), {"set_epoch": Told.set_epoch})(4)
    shard_loader(DataLoader(stream, 2), data_parallel_size=2, shards=range(1)).set_epoch(6)
    assert told[-1] == ("dataset", 6)
