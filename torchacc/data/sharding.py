"""Shares the batches of a user's loader out to the data-parallel devices.

With W devices, device r sees batches r, r+W, r+2W … of the loader's own order; the W batches of one step are a *round*.
A process that feeds several devices gets the concatenation of their batches.
"""

import copy
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchacc.data.tree import concat, map_tensors, num_rows, take
from torchacc.errors import DataError

Agree = Callable[[bytes], bytes]

# The samplers known to draw all that they take from the global generator at their first index.
_DRAW_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# How many batches of an epoch's order the processes compare: enough that two shuffles do not look alike by chance.
_COMPARED_BATCHES = 64
_END = object()


def shard_loader(
    loader: Iterable[Any],
    *,
    num_shards: int,
    shards: range,
    agree: Agree | None = None,
) -> "ShardedLoader":
    """Share a loader's batches out to the data-parallel devices.

    The last round is completed by wrapping around to the start of the epoch, so that shapes never change and every
    sample is seen; with `drop_last=True` an incomplete round is dropped instead.

    * A `DataLoader` over a map-style dataset loads this process's samples only; `collate_fn` sees the samples of all of
      the process's devices at once. Wrapping goes on through the samples of the order. Batches of a batch sampler
      of the user's own are taken as they are: a missing one is completed by the epoch's first, a short one is not.
    * Anything else that gives batches (an `IterableDataset`, a list of dicts) is read by every process, which keeps the
      batches of its devices. Missing batches are the epoch's first; a short one is filled with rows of the first.

    Args:
        loader: The user's loader. It is left alone, but for its samplers' and dataset's `set_epoch`.
        num_shards: W, the number of data-parallel devices of the job.
        shards: The devices that this process feeds.
        agree: A collective that returns rank 0's argument on every rank; None where there is one process. Called only
            in the thread that calls `iter()`, and as often on each rank.

    Returns:
        The loader of this process's batches.

    Raises:
        DataError: For a loader that cannot be sharded.
    """
    assert shards.step == 1, shards
    assert 0 <= shards.start < shards.stop <= num_shards, (shards, num_shards)
    _check(loader)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _IndexLoader(loader, num_shards, shards, agree)
    return _StreamLoader(loader, num_shards, shards)


def _check(loader: Any) -> None:
    name = type(loader).__name__
    if isinstance(loader, (Mapping, str)) or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise DataError(f"A {name} does not give batches. Wrap it: DataLoader(dataset, batch_size=…).")
    if not hasattr(loader, "__iter__"):
        raise DataError(f"A {name} cannot be iterated over. Pass a DataLoader, or a list of batches.")
    for sampler in _samplers(loader):
        if (replicas := getattr(sampler, "num_replicas", 1)) > 1:
            raise DataError(
                f"The loader's {type(sampler).__name__} already keeps one sample in {replicas} ({replicas} replicas), "
                f"so most would never be seen. Pass a plain sampler, or shuffle=True: accelerate() shards the data."
            )


def _samplers(loader: Any) -> list[Any]:
    """List the objects that decide on the loader's order, the innermost last."""
    outer = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    inner = [getattr(sampler, "sampler", None) for sampler in outer]
    return [sampler for sampler in (*outer, *inner) if sampler is not None]


class ShardedLoader(ABC):
    """The batches of the devices that one process feeds; made by `shard_loader`.

    What this object does not know (`sampler`, `collate_fn` …) is looked up on the user's loader.

    Attributes:
        loader: The user's loader.
        num_shards: The number of data-parallel devices of the job.
        shards: Those that this process feeds.
        drop_last: Whether an incomplete round is dropped, instead of completed.
    """

    def __init__(self, loader: Any, num_shards: int, shards: range) -> None:
        self.loader = loader
        self.num_shards = num_shards
        self.shards = shards
        self.drop_last = any(getattr(source, "drop_last", False) for source in (loader, *_samplers(loader)))

    @property
    def dataset(self) -> Any:
        """The user's dataset, or what was passed in place of a `DataLoader`."""
        return getattr(self.loader, "dataset", self.loader)

    @property
    def batch_size(self) -> int | None:
        """The number of samples per device and step; None where the loader does not say."""
        return getattr(self.loader, "batch_size", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's loader, samplers and dataset which epoch comes next, where they ask to know.

        From then on the order of torch's own samplers depends on the seed and the epoch only, and no longer on what was
        drawn before, so that a resumed run finds it again.
        """
        for target in (self.loader, *_samplers(self.loader), getattr(self.loader, "dataset", None)):
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        return _num_rounds(len(self.loader), self.num_shards, self.drop_last)

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Start an epoch; collective where there are several processes."""

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class _StreamLoader(ShardedLoader):
    """Reads every batch and keeps those of this process."""

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function: the workers are to start, and the random draws to be made, in the caller's thread.
        return self._batches(iter(self.loader))

    def _batches(self, stream: Iterator[Any]) -> Iterator[Any]:
        for found in _rounds(self._filled(stream), self.num_shards, drop_last=self.drop_last):
            yield _join([found[shard] for shard in self.shards])

    def _filled(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Fill the batches that end the stream up to the size of the first.

        Each worker of a DataLoader ends on a short batch. Where nothing says that batches have one size, only the very
        last is known to be short, as any other may have the size that the user gave it.
        """
        batch = next(stream, _END)
        first = map_tensors(torch.clone, batch)  # the training loop may change the batch that it gets
        one_size = self.batch_size is not None and num_rows(first) == self.batch_size
        while batch is not _END:
            following = next(stream, _END)
            yield _fill(batch, first) if one_size or following is _END else batch
            batch = following


class _IndexLoader(ShardedLoader):
    """Has the user's DataLoader load by our indices: those of this process, in the order of the user's own samplers."""

    def __init__(self, loader: "DataLoader[Any]", num_shards: int, shards: range, agree: Agree | None) -> None:
        super().__init__(loader, num_shards, shards)
        self._sampler = _ShardSampler(loader, num_shards, shards, drop_last=self.drop_last, agree=agree)
        self._inner = _with_sampler(loader, self._sampler)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._sampler.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # The draws come in the order of the user's own loader: the workers' base seed, then the sampler's. They are all
        # made in this thread, as a background thread would race the model for the global generator.
        indices = self._sampler.begin()
        batches = iter(self._inner)
        indices.start()
        return batches if self._sampler.collates or len(self.shards) == 1 else self._joined(batches)

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        while found := list(itertools.islice(batches, len(self.shards))):
            yield _join(found)


class _ShardSampler:
    """What our DataLoader takes for its sampler: this process's share of the order of the user's own samplers.

    Attributes:
        collates: Whether the DataLoader makes batches of samples. If not (batch_size=None), the dataset itself makes
            them, of whatever its sampler gives.
        epoch: The epoch that decides on the order; None while the random state does.
    """

    def __init__(
        self, loader: "DataLoader[Any]", num_shards: int, shards: range, *, drop_last: bool, agree: Agree | None
    ) -> None:
        self.collates = loader.batch_sampler is not None
        self.epoch: int | None = None
        self._order: Any = loader.batch_sampler if self.collates else loader.sampler
        self._batch_size = self._order.batch_size if type(self._order) is BatchSampler else None
        self._steerable = next(filter(_is_steerable, reversed(_samplers(loader))), None)
        self._num_shards = num_shards
        self._shards = shards
        self._drop_last = drop_last
        self._agree: Agree = agree or (lambda payload: payload)
        self._alone = agree is None
        self._seed: int | None = None
        self._indices = _Indices(self)

    def begin(self) -> "_Indices":
        """Start an epoch: what `iter()` returns from here on."""
        self._indices = _Indices(self)
        return self._indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices

    def __len__(self) -> int:
        rounds = _num_rounds(len(self._order), self._num_shards, self._drop_last)
        return rounds if self.collates else rounds * len(self._shards)

    def draw(self) -> Iterator[Any]:
        """Agree on the order of the epoch, and return this process's indices; collective, draws random numbers."""
        with self._agreed_draws():
            batches = iter(self._order)
            opening = list(itertools.islice(batches, max(self._num_shards, _COMPARED_BATCHES)))
        self._compare(opening)
        rounds = _rounds(
            itertools.chain(opening, batches), self._num_shards, drop_last=self._drop_last, batch_size=self._batch_size
        )
        # An empty epoch is reported here, not in a background thread.
        return self._share(itertools.chain([next(rounds)], rounds))

    def _share(self, rounds: Iterator[list[Any]]) -> Iterator[Any]:
        for found in rounds:
            own = [found[shard] for shard in self._shards]
            if self.collates:
                _check_even([len(batch) for batch in own])
                yield list(itertools.chain.from_iterable(own))
            else:
                yield from own

    @contextmanager
    def _agreed_draws(self) -> Iterator[None]:
        """Let the user's sampler draw what rank 0's draws, or, once an epoch is set, what the epoch decides.

        A rank whose global generator was in another state gets that state back.
        """
        if self._steerable is None or (self._alone and self.epoch is None):
            yield
            return
        generator: torch.Generator = self._steerable.generator or torch.default_generator
        own = generator.get_state()
        agreed = self._rank0_state(own) if self.epoch is None else self._epoch_state(generator, self.epoch)
        generator.set_state(agreed)
        try:
            yield
        finally:
            if generator is torch.default_generator and not torch.equal(own, agreed):
                generator.set_state(own)

    def _rank0_state(self, own: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._agree(own.numpy().tobytes())), dtype=torch.uint8)

    def _epoch_state(self, generator: torch.Generator, epoch: int) -> torch.Tensor:
        if self._seed is None:  # asked once: setting a generator's state changes its seed, too
            self._seed = int(self._agree(str(generator.initial_seed()).encode()))
        digest = hashlib.blake2b(f"{self._seed}/{epoch}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big")).get_state()

    def _compare(self, opening: list[Any]) -> None:
        """Refuse an order that is not rank 0's; collective."""
        order = repr(opening)
        own = [_length(self._order), order[:80], hashlib.blake2b(order.encode()).hexdigest()]
        theirs = json.loads(self._agree(json.dumps(own).encode()))
        if own != theirs:
            raise DataError(
                f"The processes disagree on the order of the data: {type(self._order).__name__} gives "
                f"{theirs[0]} batches that begin with {theirs[1]} on rank 0, but {own[0]} that begin with {own[1]} "
                f"here. Seed the sampler alike in every process, not by rank, and give every process the whole dataset."
            )


class _Indices(Iterator[Any]):
    """One epoch's indices, drawn at the first call of `start` or of `next`."""

    def __init__(self, sampler: _ShardSampler) -> None:
        self._sampler = sampler
        self._drawn: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        if self._drawn is None:
            self._drawn = self._sampler.draw()
        return self._drawn

    def __next__(self) -> Any:
        return next(self.start())


def _rounds(
    batches: Iterator[Any],
    num_shards: int,
    *,
    drop_last: bool,
    batch_size: int | None = None,
) -> Iterator[list[Any]]:
    """Group an epoch's batches into rounds of one per device, the last one completed or dropped.

    Args:
        batches: All the batches of the epoch.
        num_shards: How many make a round.
        drop_last: Whether to drop an incomplete round.
        batch_size: Where batches are lists of samples of one size, to be completed sample by sample.
    """
    count = 0
    first: list[Any] = []
    while found := list(itertools.islice(batches, num_shards)):
        count += len(found)
        if len(found) < num_shards and drop_last:
            break
        first = first or found
        if batch_size is None:
            yield list(itertools.islice(itertools.chain(found, itertools.cycle(first)), num_shards))
        else:
            samples = itertools.chain(*found, itertools.cycle(itertools.chain(*first)))
            yield [list(itertools.islice(samples, batch_size)) for _ in range(num_shards)]
    if not count:
        raise DataError(
            "The loader gave no batch. Check that its dataset is not empty, that drop_last=True leaves something of "
            "it, and that it is not an iterator, which lasts for one epoch: pass a list or a DataLoader."
        )
    if not first:
        raise DataError(
            f"The loader gave {count} batches for {num_shards} data-parallel devices, and drop_last=True drops an "
            f"incomplete round: {count} // {num_shards} = 0 steps. Write drop_last=False to complete it, or a "
            f"batch_size of at most 1/{-(-num_shards // count)} of this one."
        )


def _num_rounds(batches: int, num_shards: int, drop_last: bool) -> int:
    return batches // num_shards if drop_last else -(-batches // num_shards)


def _with_sampler(loader: "DataLoader[Any]", sampler: _ShardSampler) -> "DataLoader[Any]":
    """Copy a DataLoader with another sampler: of the same class, with the same workers, collate_fn and all the rest."""
    new = copy.copy(loader)
    # Past the guard of DataLoader.__setattr__, which is there for the loaders that somebody iterates over already.
    new.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    new.__dict__["_iterator"] = None  # the persistent workers of the user's loader, if it has run before
    return new


def _is_steerable(sampler: Any) -> bool:
    """Tell whether a sampler's order follows from the state of its generator."""
    generator = getattr(sampler, "generator", None)
    return isinstance(generator, torch.Generator) or (generator is None and isinstance(sampler, _DRAW_AT_ONCE))


def _length(order: Any) -> int | None:
    try:
        return len(order)
    except TypeError:
        return None


def _fill(batch: Any, first: Any) -> Any:
    """Fill a batch up to the number of rows of the first batch, with the first batch's rows."""
    rows, size = num_rows(batch), num_rows(first)
    if not rows or not size or rows >= size:
        return batch
    try:
        return take(concat([batch, first]), size)
    except DataError:  # padded to another length than the first: its own rows fit
        return take(concat([batch] * -(-size // rows)), size)


def _join(batches: Sequence[Any]) -> Any:
    """Concatenate the batches of several devices."""
    if len(batches) == 1:
        return batches[0]
    _check_even([num_rows(batch) for batch in batches])
    return concat(batches)


def _check_even(rows: list[int | None]) -> None:
    if len(rows) > 1 and (len(set(rows)) > 1 or None in rows):
        raise DataError(
            f"One process feeds {len(rows)} devices, which share its batch out evenly, but their batches have {rows} "
            f"rows (None: its parts disagree, or have none). Give every batch the same size, or run one process per "
            f"device."
        )
