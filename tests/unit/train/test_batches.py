"""How many targets a batch has, which batches make a step, and that each example is evaluated once."""

import itertools

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.logged import heard
from torchacc.data import AsyncLoader, shard_loader
from torchacc.errors import DataError
from torchacc.train.batches import ElasticPosition, evaluation_loader, take_counts, training_loader, windows

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
    return AsyncLoader(shard_loader(loader, data_parallel_size=num_shards, shards=shards), prefetch=0)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_batch_comes_with_the_number_of_its_targets(as_list):
    rows = [example(index, as_list=as_list) for index in range(4)]
    loader = sharded(training_loader(rows, batch_size=2, examples_per_step=4, shuffle=False, seed=0), 2, range(2))
    ((batch, count),) = take_counts(loader)
    assert count == sum(map(num_targets, range(4)))
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"][:, 0].tolist() == [0, 1, 2, 3]


def test_windows_hold_what_one_step_takes_and_complete_an_epoch_from_its_start():
    rows = [example(index) for index in range(6)]
    loader = sharded(training_loader(rows, batch_size=2, examples_per_step=4, shuffle=False, seed=0), 1, range(1))
    found = windows(loader, 2)
    seen = [next(found) for _ in range(3)]
    indices = [[0, 1, 2, 3], [4, 5, 0, 1], [0, 1, 2, 3]]
    assert [
        [index for batch in window.batches for index in batch["input_ids"][:, 0].tolist()] for window in seen
    ] == indices
    assert [window.num_targets for window in seen] == [sum(map(num_targets, each)) for each in indices]
    assert (len(loader), loader.epochs_done) == (4, 1)


def test_windows_of_a_stream_reach_into_its_next_epoch():
    loader = sharded(training_loader(Stream(6), batch_size=2, examples_per_step=4, shuffle=True, seed=0), 1, range(1))
    found = windows(loader, 2)
    seen = [[batch["input_ids"][0, 0].item() for batch in next(found).batches] for _ in range(3)]
    assert seen == [[0, 2], [4, 0], [2, 4]]


def test_the_order_depends_on_the_seed_and_the_step_alone():
    rows = [example(index) for index in range(42)]

    def order(seed: int, batch_size: int, num_shards: int) -> list[int]:
        torch.manual_seed(num_shards)
        loader = training_loader(rows, batch_size=batch_size, examples_per_step=8, shuffle=True, seed=seed)
        batches = sharded(loader, num_shards, range(num_shards))
        epochs = [batch for _ in range(2) for batch, _ in take_counts(batches)]
        return [index for batch in epochs for index in batch["input_ids"][:, 0].tolist()]

    found = order(3, 8, 1)
    assert found == order(3, 4, 2) == order(3, 2, 4) == order(3, 2, 1) == order(3, 1, 2)
    assert (len(found), found[42:48]) == (2 * 48, found[:6])
    assert sorted(found[:42]) == sorted(found[48:90]) == list(range(42))
    assert found[:42] != found[48:90]
    assert found != order(4, 8, 1)


def test_a_set_smaller_than_a_step_is_seen_several_times(caplog):
    caplog.set_level("INFO", logger="torchacc")
    rows = [example(index) for index in range(3)]
    loader = sharded(training_loader(rows, batch_size=4, examples_per_step=8, shuffle=False, seed=0), 2, range(2))
    ((batch, _),) = take_counts(loader)
    assert batch["input_ids"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "a step takes 8 examples, and there are 3: it takes them repeatedly"
    ]


@pytest.mark.parametrize("size", [50, 70])
def test_a_position_is_found_again_with_other_devices_and_micro_batches(size):
    rows = [example(index) for index in range(size)]

    def make(batch_size: int, num_shards: int, micro_batches: int) -> AsyncLoader:
        examples = batch_size * num_shards * micro_batches
        loader = training_loader(rows, batch_size=batch_size, examples_per_step=examples, shuffle=True, seed=0)
        return sharded(loader, num_shards, range(num_shards))

    def indices(loader, steps: int, micro_batches: int) -> list[int]:
        found = itertools.islice(windows(loader, micro_batches), steps)
        return [index for window in found for batch in window.batches for index in batch["input_ids"][:, 0].tolist()]

    before = make(2, 4, 2)
    seen = indices(before, 3, 2)
    state = ElasticPosition(before).state_dict()
    for batch_size, num_shards, micro_batches in ((2, 4, 2), (2, 2, 1), (4, 1, 3)):
        loader = make(batch_size, num_shards, micro_batches)
        with heard() as messages:
            ElasticPosition(loader).load_state_dict(state)
        assert not messages  # the trainer tells of steps of another size
        rest = indices(loader, 3, micro_batches)
        assert not set(seen) & set(rest[: size - len(seen)])
        assert (len(seen), rest[:2]) == (48, indices(make(1, 1, 1), 50, 1)[48:])
    others = sharded(training_loader(rows[1:], batch_size=2, examples_per_step=2, shuffle=True, seed=0), 1, range(1))
    with pytest.raises(DataError, match=f"dataset length {size}, here {size - 1}"):
        ElasticPosition(others).load_state_dict(state)


@pytest.mark.parametrize("size", [1, 7, 12, 13])
@pytest.mark.parametrize("make", [lambda size: [example(i) for i in range(size)], Stream], ids=["map", "stream"])
def test_each_example_is_evaluated_once(make, size):
    found: list[int] = []
    total = 0
    for shard in range(3):
        loader = sharded(evaluation_loader(make(size), batch_size=2, data_parallel_size=3), 3, range(shard, shard + 1))
        for batch, count in take_counts(loader):
            assert len(batch["labels"]) == 2
            total += count
            found += batch["input_ids"][(batch["labels"] != -100).any(dim=1), 0].tolist()
    assert sorted(found) == list(range(size))
    assert total == sum(map(num_targets, range(size)))


def test_an_empty_validation_set_is_refused():
    with pytest.raises(DataError, match="validation set is empty: .* validation_share: 0"):
        evaluation_loader([], batch_size=2, data_parallel_size=1)
    with pytest.raises(DataError, match="validation set is empty: .* validation_share: 0"):
        list(evaluation_loader(Stream(0), batch_size=2, data_parallel_size=1))
