"""Datasets whose samples are their numbers, and the ranks that read them."""

import itertools
import threading
from collections import UserDict

import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

from torchacc.data import shard_loader


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": torch.tensor([index, index]), "y": index}


class Stream(IterableDataset):
    """0 … count-1, shared out to the workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(start, self.count, step)


def read(loader) -> list[list[int]]:
    """Return the samples of each batch."""
    return [(batch["y"] if isinstance(batch, dict | UserDict) else batch).tolist() for batch in loader]


def read_shards(make, data_parallel_size: int) -> list[list[list[int]]]:
    """Return what each device sees, each fed by a process of its own with the same random state."""
    state = torch.get_rng_state()
    shards = []
    for shard in range(data_parallel_size):
        torch.set_rng_state(state)
        shards.append(read(shard_loader(make(), data_parallel_size=data_parallel_size, shards=range(shard, shard + 1))))
    return shards


def expected(order: list[int], batch_size: int, data_parallel_size: int) -> list[list[list[int]]]:
    """Return what each device is to see of an order that wraps around."""
    per_step = batch_size * data_parallel_size
    steps = -(-len(order) // per_step)
    samples = list(itertools.islice(itertools.cycle(order), steps * per_step))
    batches = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
    return [batches[shard::data_parallel_size] for shard in range(data_parallel_size)]


class Ranks:
    """Runs a function as each rank of a job, with the collective that returns rank 0's payload."""

    def __init__(self, num_ranks: int) -> None:
        self.payloads: list[bytes] = []
        self.num_ranks = num_ranks
        self.threads: set[threading.Thread] = set()

    def agree(self, rank: int):
        calls = itertools.count()

        def call(payload: bytes) -> bytes:
            self.threads.add(threading.current_thread())
            position = next(calls)
            if rank == 0:
                self.payloads.append(payload)
            return self.payloads[position]

        self.calls = calls
        return call

    def run(self, function):
        """Call `function(rank, agree)` as each rank, rank 0 first, and check that all call the collective as often."""
        results = []
        for rank in range(self.num_ranks):
            results.append(function(rank, self.agree(rank)))
            assert next(self.calls) == len(self.payloads)
        return results


def flat(batches):
    return list(itertools.chain.from_iterable(batches))
