"""Data that the script has cut by rank: refused where that is certain, warned of where it may be meant."""

import itertools
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from torchacc.data import shard_loader
from torchacc.data.same_data import traits_of
from torchacc.errors import DataError

ROWS = [torch.tensor([float(i), -float(i)]) for i in range(24)]


def run_ranks(make, num_ranks: int = 2, read=next):
    """Iterate over what `make(rank)` returns as each rank of a job; return the first batches, or the errors.

    One thread at a time runs, as random numbers belong to a process, and all wait in collectives.
    """
    barrier, box, lock = threading.Barrier(num_ranks), {}, threading.Lock()

    def rank_of(rank: int):
        def gather(payload):
            box[rank] = payload
            lock.release()
            barrier.wait(20)
            found = [box[each] for each in range(num_ranks)]
            barrier.wait(20)
            lock.acquire()
            return found

        with lock:
            try:
                sharded = shard_loader(
                    make(rank),
                    data_parallel_size=num_ranks,
                    shards=range(rank, rank + 1),
                    agree=lambda payload: gather(payload)[0],
                    gather=gather,
                )
                return read(iter(sharded))
            except DataError as error:
                return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_of, range(num_ranks)))


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Rows(Dataset):
    """A dataset of a user's own class."""

    def __init__(self, rows, augment=None) -> None:
        self.rows = rows
        self.augment = augment

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return row if self.augment is None else row + self.augment()


class Numbered(Rows):
    """Keeps nothing that tells which rows it has but a number."""

    def __init__(self, rank) -> None:
        self.rank = rank

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return ROWS[2 * index + self.rank]


class Stream(IterableDataset):
    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Wrapped(Dataset):
    """A transform around another dataset."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index] * 2


def arrow(rows):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [row.tolist() for row in rows]}).with_format("torch")


def unseeded_split(rank):
    return random_split(ROWS, [12, 12], torch.Generator().manual_seed(rank))[0]


def split_by_node(rank):
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(arrow(ROWS), rank=rank, world_size=2)


CUT = {
    "Subset": (lambda rank: DataLoader(Subset(ROWS, range(rank, 24, 2)), 2), "the indices of the dataset's Subset"),
    "contiguous Subset": (lambda rank: DataLoader(Subset(ROWS, range(12 * rank, 12 * rank + 12)), 2), "indices"),
    "Subset inside": (lambda rank: DataLoader(Wrapped(Subset(ROWS, range(rank, 24, 2))), 2), "inner's Subset"),
    "Subset, workers": (lambda rank: DataLoader(Subset(ROWS, range(rank, 24, 2)), 2, num_workers=1), "indices"),
    "random_split": (lambda rank: DataLoader(unseeded_split(rank), 2), "seeded alike"),
    "list": (lambda rank: DataLoader(ROWS[rank::2], 2, shuffle=True), "in the dataset."),
    "tensors": (lambda rank: DataLoader(TensorDataset(torch.stack(ROWS)[rank::2]), 2), "tensor 0 of the dataset"),
    "parts": (lambda rank: DataLoader(ConcatDataset([ROWS, ROWS[rank::2]]), 2), "part 1 of the dataset"),
    "list of batches": (lambda rank: list(DataLoader(ROWS, 2))[rank::2], "the list of batches"),
    "arrow": (lambda rank: DataLoader(arrow(ROWS[rank::2]), 2), "in the dataset."),
    "split_dataset_by_node": (lambda rank: DataLoader(split_by_node(rank), 2), "in the dataset."),
}


@pytest.mark.parametrize("name", CUT)
def test_cut_data_are_refused_on_every_rank(name):
    make, what = CUT[name]
    for error in run_ranks(make):
        assert isinstance(error, DataError), error
        assert what in str(error)
        assert "rank 1 has other data than rank 0, in " in str(error)
        assert "Hand over the whole data" in str(error)
        assert "or keep your cut: leave the loader out of accelerate()" in str(error)


SUSPECTED = {
    "own class": lambda rank: DataLoader(Rows(ROWS[rank::2]), 2),
    "own class, workers": lambda rank: DataLoader(Rows(ROWS[rank::2]), 2, num_workers=1),
    "rows by number": lambda rank: DataLoader(Numbered(rank), 2),
    "rows by number, workers": lambda rank: DataLoader(Numbered(rank), 2, num_workers=1),
    "rows by number, set by the worker": lambda rank: DataLoader(
        Numbered(None), 2, num_workers=1, worker_init_fn=lambda _: setattr(get_worker_info().dataset, "rank", rank)
    ),
    "stream": lambda rank: DataLoader(Stream(ROWS[rank::2]), 2),
    "generator of batches": lambda rank: itertools.islice(iter(DataLoader(ROWS, 2)), rank, None, 2),
}


@pytest.mark.parametrize("name", SUSPECTED)
def test_what_may_be_cut_is_warned_of(name, caplog):
    results = run_ranks(SUSPECTED[name])
    assert not any(isinstance(result, DataError) for result in results)
    assert len(warned(caplog)) == 2  # one on each rank, of which the console shows rank 0's
    assert "rank 1 seems to " in warned(caplog)[0]
    assert "Where only random changes of the same samples differ, nothing is lost" in warned(caplog)[0]


WHOLE = {
    "list": lambda rank: DataLoader(list(ROWS), 2, shuffle=True),
    "Subset": lambda rank: DataLoader(Subset(ROWS, [3, 5, 7, 9]), 2),
    "own class": lambda rank: DataLoader(Rows(list(ROWS)), 2),
    "own class, workers": lambda rank: DataLoader(Rows(list(ROWS)), 2, num_workers=1),
    "stream": lambda rank: DataLoader(Stream(ROWS), 2),
    "arrow": lambda rank: DataLoader(arrow(ROWS), 2),
    "files in another folder on each machine": lambda rank: DataLoader(
        [f"/local/{rank}/{i}.png" for i in range(8)], 2, collate_fn=list
    ),
    # Random changes: by generators of all kinds, seeded by rank.
    "torch's numbers": lambda rank: DataLoader(Rows(ROWS, lambda: torch.rand(2)), 2),
    "Python's numbers": lambda rank: DataLoader(Rows(ROWS, random.random), 2),
    "a generator of its own": lambda rank: DataLoader(Rows(ROWS, random.Random(rank).random), 2),
    "torch's numbers, workers": lambda rank: DataLoader(Rows(ROWS, lambda: torch.rand(2)), 2, num_workers=1),
    "a generator of its own, workers": lambda rank: DataLoader(
        Rows(ROWS, random.Random(rank).random), 2, num_workers=1
    ),
    "what is not to be compared": lambda rank: DataLoader([object() for _ in range(4)], 2, collate_fn=list),
    "an attribute of the process": lambda rank: DataLoader(Rows(ROWS, None if rank < 5 else 0), 2),
    "nothing to index": lambda rank: DataLoader(Failing(rank), 2, sampler=[0, 1]),
}


class Failing(Dataset):
    """Cannot be read before an epoch has begun, and differs by rank in what does not matter."""

    def __init__(self, rank) -> None:
        self.rank = rank
        self.asked = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("set_epoch() first")
        return torch.zeros(2)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_data_say_nothing(name, caplog):
    results = run_ranks(WHOLE[name])
    assert not any(isinstance(result, DataError) for result in results), results
    assert warned(caplog) == []


def test_looking_draws_no_random_number_and_reads_few_samples():
    numpy = pytest.importorskip("numpy")
    asked = []

    class Noting(Rows):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index) + numpy.random.rand() + random.random()

    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert len(traits_of(DataLoader(Noting(ROWS, lambda: torch.rand(1)), 2))) == 1
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert sorted(set(asked)) == [0, 12, 23]
    asked.clear()
    traits_of(DataLoader(Noting(ROWS), 2, num_workers=2))
    assert asked == []  # what it opens here its workers would share


def test_processes_compare_once_and_one_process_never():
    calls = []

    def gather(payload):
        calls.append(payload)
        return [payload]

    loader = shard_loader(DataLoader(ROWS, 4), data_parallel_size=1, shards=range(1), gather=gather)
    for _ in range(3):
        list(loader)
    assert len(calls) == 1
    dataset = Rows(ROWS)
    dataset.rows = None  # would fail when it is looked at
    iter(shard_loader(DataLoader(dataset, 4, sampler=[0, 1]), data_parallel_size=1, shards=range(1)))


def test_a_stream_gives_the_same_batches_after_its_first_has_been_compared():
    def everything(batches):
        return [batch[:, 0].tolist() for batch in batches]

    first, second = run_ranks(lambda rank: DataLoader(Stream(ROWS), 3), read=everything)
    assert first + second == [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19, 20]] + [
        [3, 4, 5],
        [9, 10, 11],
        [15, 16, 17],
        [21, 22, 23],
    ]
