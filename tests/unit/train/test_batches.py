"""How many targets a batch has, which batches make a step, and that each example is evaluated once."""

import pytest
import torch
from torch.utils.data import IterableDataset

from torchacc.data import AsyncLoader, shard_loader
from torchacc.errors import DataError
from torchacc.train.batches import evaluation_loader, take_counts, training_loader, windows

BLOCK = 5


def example(index: int, *, as_list: bool = False) -> dict:
    """Return an example of which `index % BLOCK` tokens have no target, beside the first, which never has one."""
    ids = torch.full((BLOCK,), index)
    labels = ids.clone()
    labels[BLOCK - index % BLOCK :] = -100
    row = {"input_ids": ids, "labels": labels}
    return {name: value.tolist() for name, value in row.items()} if as_list else row


def num_targets(index: int) -> int:
    return max(BLOCK - 1 - index % BLOCK, 0)


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return (example(index) for index in range(self.size))


def sharded(loader, num_shards: int, shards: range) -> AsyncLoader:
    return AsyncLoader(shard_loader(loader, num_shards=num_shards, shards=shards), prefetch=0)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_batch_comes_with_the_number_of_its_targets(as_list):
    rows = [example(index, as_list=as_list) for index in range(4)]
    loader = sharded(training_loader(rows, batch_size=2, shuffle=False, seed=0), 2, range(2))
    ((batch, count),) = take_counts(loader)
    assert count == sum(map(num_targets, range(4)))
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"][:, 0].tolist() == [0, 1, 2, 3]


def test_windows_hold_what_one_step_takes_and_reach_over_the_end_of_an_epoch():
    rows = [example(index) for index in range(6)]
    loader = sharded(training_loader(rows, batch_size=2, shuffle=False, seed=0), 1, range(1))
    found = windows(loader, 2)
    seen = [next(found) for _ in range(3)]
    assert [[batch["input_ids"][:, 0].tolist() for batch in window.batches] for window in seen] == [
        [[0, 1], [2, 3]],
        [[4, 5], [0, 1]],
        [[2, 3], [4, 5]],
    ]
    assert [window.num_targets for window in seen] == [
        sum(map(num_targets, indices)) for indices in ([0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5])
    ]
    assert loader.epochs_done == 1


def test_the_order_depends_on_the_seed_alone():
    rows = [example(index) for index in range(40)]

    def order(seed: int, batch_size: int, num_shards: int) -> list[int]:
        torch.manual_seed(num_shards)
        loader = training_loader(rows, batch_size=batch_size, shuffle=True, seed=seed)
        batches = sharded(loader, num_shards, range(num_shards))
        return [index for batch, _ in take_counts(batches) for index in batch["input_ids"][:, 0].tolist()]

    assert order(3, 8, 1) == order(3, 4, 2) == order(3, 2, 4)
    assert sorted(order(3, 8, 1)) == list(range(40))
    assert order(3, 8, 1) != order(4, 8, 1)


@pytest.mark.parametrize("size", [1, 7, 12, 13])
@pytest.mark.parametrize("make", [lambda size: [example(i) for i in range(size)], Stream], ids=["map", "stream"])
def test_each_example_is_evaluated_once(make, size):
    found: list[int] = []
    total = 0
    for shard in range(3):
        loader = sharded(evaluation_loader(make(size), batch_size=2, num_data_shards=3), 3, range(shard, shard + 1))
        for batch, count in take_counts(loader):
            assert len(batch["labels"]) == 2
            total += count
            found += batch["input_ids"][(batch["labels"] != -100).any(dim=1), 0].tolist()
    assert sorted(found) == list(range(size))
    assert total == sum(map(num_targets, range(size)))


def test_an_empty_validation_set_is_refused():
    with pytest.raises(DataError, match="validation set is empty"):
        evaluation_loader([], batch_size=2, num_data_shards=1)
    with pytest.raises(DataError, match="validation set is empty"):
        list(evaluation_loader(Stream(0), batch_size=2, num_data_shards=1))
