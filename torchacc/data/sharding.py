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
from dataclasses import replace
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

from torchacc.data.position import Position, pack, replayed, unpack
from torchacc.data.tree import concat, map_tensors, num_rows, take
from torchacc.errors import DataError
from torchacc.logging import get_logger

_log = get_logger(__name__)

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
    return _StreamLoader(loader, num_shards, shards, agree)


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

    def __init__(self, loader: Any, num_shards: int, shards: range, agree: Agree | None) -> None:
        self.loader = loader
        self.num_shards = num_shards
        self.shards = shards
        self.drop_last = any(getattr(source, "drop_last", False) for source in (loader, *_samplers(loader)))
        self._agree = agree or (lambda payload: payload)
        self._epoch: int | None = None
        self._at = Position()
        """Where the latest epoch began in this process, or where the next call of `iter()` is to go on."""
        self._resuming = False

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
        if self._resuming and epoch != self._at.epoch:
            self._leave_resumed_epoch(epoch)
        self._epoch = epoch
        for target in (self.loader, *_samplers(self.loader), getattr(self.loader, "dataset", None)):
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        return _num_rounds(len(self.loader), self.num_shards, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch, or go on with one that was loaded; collective where there are several processes."""
        if self._resuming:
            with replayed(self._generators(), self._at.random):
                batches = self._begin()
            self._resuming = False
            return batches
        states = json.dumps([pack(generator) for generator in self._generators()])
        self._at = Position(
            epochs=self._at.epochs + self._at.begun,
            begun=True,
            epoch=self._epoch,
            seed=self._at.seed,
            random=tuple(json.loads(self._agree(states.encode()))),
        )
        return self._begin()

    @abstractmethod
    def _begin(self) -> Iterator[Any]:
        """Return the batches that are left of the epoch at `_at`, having made all its draws; collective."""

    def position(self, delivered: int, *, over: bool) -> Position:
        """Return where a loop is that has had some of the latest epoch.

        Args:
            delivered: How many of this process's batches it has had since the latest `iter()`.
            over: Whether it has heard that there are no more.
        """
        if over:
            own = tuple(pack(generator) for generator in self._generators()[1:])
            at = Position(epochs=self._at.epochs + 1, epoch=self._epoch, seed=self._at.seed, random=(None, *own))
        else:
            at = replace(self._at, batches=self._at.batches + delivered * self.num_shards)
        return replace(at, loader=self._traits())

    def resume(self, state: Any) -> None:
        """Let the next `iter()` go on from a position.

        Args:
            state: `Position.to_json()`, the same on every process.

        Raises:
            DataError: It is another loader's.
        """
        at = Position.from_json(state, self._traits())
        self._resuming = False
        if at.epoch is not None:
            self.set_epoch(at.epoch)
        self._epoch, self._at, self._resuming = at.epoch, at, at.begun
        if not at.begun:
            for generator, text in zip(self._generators(), at.random, strict=False):
                unpack(generator, text)

    def _leave_resumed_epoch(self, epoch: int) -> None:
        total = self._num_batches()
        if total is None or self._at.batches < total:
            _log.warning(
                "set_epoch(%d) leaves the epoch that was loaded, %s, after %d of its %s batches: the rest is not seen",
                epoch,
                self._at.epoch,
                self._at.batches,
                "unknown number of" if total is None else total,
            )
        self._at = Position(epochs=self._at.epochs + 1, seed=self._at.seed)
        self._resuming = False

    def _generators(self) -> list[torch.Generator]:
        """List what the order may be drawn from: the global generator, then those of the loader's own."""
        sources = [self.loader, *_samplers(self.loader)]
        found = [torch.default_generator, *(getattr(source, "generator", None) for source in sources)]
        return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))

    def _num_batches(self) -> int | None:
        return _length(self.loader)

    def _traits(self) -> dict[str, Any]:
        """Return what a loader must have in common with this one to go on where this one is."""
        return {
            "dataset length": _length(self.dataset),
            "number of batches": self._num_batches(),
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class _StreamLoader(ShardedLoader):
    """Reads every batch and keeps those of this process."""

    def _begin(self) -> Iterator[Any]:
        # Not a generator function: the workers are to start, and the random draws to be made, in the caller's thread.
        stream = self._filled(iter(self.loader))
        rounds = _rounds(stream, self.num_shards, drop_last=self.drop_last, skip=self._at.batches)
        return (_join([found[shard] for shard in self.shards]) for found in rounds)

    def _traits(self) -> dict[str, Any]:
        # Each worker reads a part of the stream, so that their number decides on the order.
        return super()._traits() | {"num_workers": getattr(self.loader, "num_workers", None)}

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
        super().__init__(loader, num_shards, shards, agree)
        self._sampler = _ShardSampler(loader, num_shards, shards, drop_last=self.drop_last, agree=agree)
        self._inner = _with_sampler(loader, self._sampler)

    def _begin(self) -> Iterator[Any]:
        # The draws come in the order of the user's own loader: the workers' base seed, then the sampler's. They are all
        # made in this thread, as a background thread would race the model for the global generator.
        indices = self._sampler.begin(self._at)
        batches = iter(self._inner)
        indices.start()
        self._at = indices.at
        return batches if self._sampler.collates or len(self.shards) == 1 else self._joined(batches)

    def resume(self, state: Any) -> None:
        super().resume(self._sampler.in_own_batches(state))

    def _num_batches(self) -> int | None:
        return self._sampler.num_batches

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        while found := list(itertools.islice(batches, len(self.shards))):
            yield _join(found)


class _ShardSampler:
    """What our DataLoader takes for its sampler: this process's share of the order of the user's own samplers.

    Attributes:
        collates: Whether the DataLoader makes batches of samples. If not (batch_size=None), the dataset itself makes
            them, of whatever its sampler gives.
    """

    def __init__(
        self, loader: "DataLoader[Any]", num_shards: int, shards: range, *, drop_last: bool, agree: Agree | None
    ) -> None:
        self.collates = loader.batch_sampler is not None
        self._order: Any = loader.batch_sampler if self.collates else loader.sampler
        self._batch_size = self._order.batch_size if type(self._order) is BatchSampler else None
        self._steerable = next(filter(_is_steerable, reversed(_samplers(loader))), None)
        self._num_shards = num_shards
        self._shards = shards
        self._drop_last = drop_last
        self._agree: Agree = agree or (lambda payload: payload)
        self._alone = agree is None
        self._indices = _Indices(self, Position())

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the user's own order; None where it has no length."""
        return _length(self._order)

    def begin(self, at: Position) -> "_Indices":
        """Start an epoch, or the rest of one: what `iter()` returns from here on."""
        self._indices = _Indices(self, at)
        return self._indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices

    def __len__(self) -> int:
        rounds = _num_rounds(len(self._order), self._num_shards, self._drop_last)
        return rounds if self.collates else rounds * len(self._shards)

    def in_own_batches(self, state: Any) -> Any:
        """Return a position that counts batches of another size as one that counts this loader's.

        So the global batch can stay as it was on another number of devices.
        """
        traits = state.get("loader", {}) if isinstance(state, Mapping) else {}
        size = traits.get("batch_size")
        if not self._batch_size or not size or size == self._batch_size:
            return state
        samples = state["batches"] * size
        if samples % self._batch_size:
            raise DataError(
                f"the interrupted epoch had {samples} samples, in batches of {size}, which is no multiple of this "
                f"loader's batch_size={self._batch_size}: use one of which it is, such as {size}"
            )
        own = {**traits, "batch_size": self._batch_size, "number of batches": self.num_batches}
        return {**state, "batches": samples // self._batch_size, "loader": own}

    def draw(self, at: Position) -> tuple[Iterator[Any], Position]:
        """Agree on the order of an epoch; collective, draws random numbers.

        Returns:
            This process's indices from the position on; and the position with what has been found out of the order.
        """
        if at.epoch is not None and at.seed is None:
            at = replace(at, seed=self._agree_on_seed())
        with self._agreed_draws(at):
            batches = iter(self._order)
            opening = list(itertools.islice(batches, max(self._num_shards, _COMPARED_BATCHES)))
        # Where batches are only cut from the samples' order, it is that which is found again at another batch size.
        begin: Iterable[Any] = itertools.chain.from_iterable(opening) if self._batch_size else opening
        digest = self._compare(list(itertools.islice(begin, _COMPARED_BATCHES)))
        if at.order not in (None, digest):
            raise DataError(
                f"the order of the interrupted epoch is not found again: {type(self._order).__name__} now gives "
                f"batches that begin with {repr(opening)[:80]}. What decides on it is neither torch's generator nor "
                "set_epoch(): give the sampler a `generator`, or a set_epoch() on which alone its order depends"
            )
        rounds = _rounds(
            itertools.chain(opening, batches),
            self._num_shards,
            drop_last=self._drop_last,
            batch_size=self._batch_size,
            skip=at.batches,
        )
        # An empty epoch is reported here, not in a background thread.
        rounds = itertools.chain(list(itertools.islice(rounds, 1)), rounds)
        return self._share(rounds), replace(at, order=digest)

    def _share(self, rounds: Iterator[list[Any]]) -> Iterator[Any]:
        for found in rounds:
            own = [found[shard] for shard in self._shards]
            if self.collates:
                _check_even([len(batch) for batch in own])
                yield list(itertools.chain.from_iterable(own))
            else:
                yield from own

    @contextmanager
    def _agreed_draws(self, at: Position) -> Iterator[None]:
        """Let the user's sampler draw what rank 0's draws, or, once an epoch is set, what the epoch decides.

        A rank whose global generator was in another state gets that state back.
        """
        if self._steerable is None or (self._alone and at.epoch is None):
            yield
            return
        generator = self._generator
        own = generator.get_state()
        agreed = self._rank0_state(own) if at.epoch is None else _epoch_state(at)
        generator.set_state(agreed)
        try:
            yield
        finally:
            if generator is torch.default_generator and not torch.equal(own, agreed):
                generator.set_state(own)

    @property
    def _generator(self) -> torch.Generator:
        return getattr(self._steerable, "generator", None) or torch.default_generator

    def _rank0_state(self, own: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._agree(own.numpy().tobytes())), dtype=torch.uint8)

    def _agree_on_seed(self) -> int:
        # Asked once: setting a generator's state changes its seed, too.
        return int(self._agree(str(self._generator.initial_seed()).encode()))

    def _compare(self, opening: list[Any]) -> str:
        """Refuse an order that is not rank 0's, and return its digest; collective."""
        order = repr(opening)
        digest = hashlib.blake2b(order.encode(), digest_size=16).hexdigest()
        own = [self.num_batches, order[:80], digest]
        theirs = json.loads(self._agree(json.dumps(own).encode()))
        if own != theirs:
            raise DataError(
                f"The processes disagree on the order of the data: {type(self._order).__name__} gives "
                f"{theirs[0]} batches that begin with {theirs[1]} on rank 0, but {own[0]} that begin with {own[1]} "
                f"here. Seed the sampler alike in every process, not by rank, and give every process the whole dataset."
            )
        return digest


class _Indices(Iterator[Any]):
    """One epoch's indices, drawn at the first call of `start` or of `next`.

    Attributes:
        at: The position that they begin at; once drawn, with what has been found out of the order.
    """

    def __init__(self, sampler: _ShardSampler, at: Position) -> None:
        self.at = at
        self._sampler = sampler
        self._drawn: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        if self._drawn is None:
            self._drawn, self.at = self._sampler.draw(self.at)
        return self._drawn

    def __next__(self) -> Any:
        return next(self.start())


def _epoch_state(at: Position) -> torch.Tensor:
    digest = hashlib.blake2b(f"{at.seed}/{at.epoch}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big")).get_state()


def _rounds(
    batches: Iterator[Any],
    num_shards: int,
    *,
    drop_last: bool,
    batch_size: int | None = None,
    skip: int = 0,
) -> Iterator[list[Any]]:
    """Group an epoch's batches into rounds of one per device, the last one completed or dropped.

    Args:
        batches: All the batches of the epoch.
        num_shards: How many make a round.
        drop_last: Whether to drop an incomplete round.
        batch_size: Where batches are lists of samples of one size, to be completed sample by sample.
        skip: How many batches to leave out. They are read at once, the rest as the rounds are asked for.
    """
    first = list(itertools.islice(batches, num_shards)) if skip else []
    left = itertools.chain(first, batches)
    next(itertools.islice(left, skip, skip), None)
    return _grouped(left, first, num_shards, drop_last, batch_size)


def _grouped(
    batches: Iterator[Any], first: list[Any], num_shards: int, drop_last: bool, batch_size: int | None
) -> Iterator[list[Any]]:
    """Group batches into rounds, and complete the last one with the first batches of the epoch, where known."""
    count = len(first)
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
