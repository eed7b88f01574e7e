"""Shares the batches of a user's loader out to the data-parallel devices.

With W devices, device r sees batches r, r+W, r+2W … of the loader's own order; the W batches of one step are a *global
batch*. A process that feeds several devices gets the concatenation of their batches.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchacc.data.global_batches import (
    describe_epoch,
    describe_global_batch,
    fill,
    join,
    make_global_batches,
    num_global_batches,
)
from torchacc.data.position import Position, pack, replayed, unpack
from torchacc.data.same_data import digest_of, refuse_cut, traits_of, warning_of_stream
from torchacc.data.sampler import Agree, ShardSampler, length, samplers, with_sampler
from torchacc.data.samples import refuse_sample
from torchacc.data.tree import map_tensors, num_rows
from torchacc.errors import DataError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_END = object()

_COUNTED_BATCHES = 10_000
"""Of how many batches in a list the rows are counted."""
_DEVICES = "num_data_shards"
"""Where a position notes on how many devices a global batch was; another number may go on from it."""

Gather = Callable[[Any], Sequence[Any]]


def shard_loader(
    loader: Iterable[Any],
    *,
    data_parallel_size: int,
    shards: Sequence[int],
    agree: Agree | None = None,
    gather: Gather | None = None,
) -> "ShardedLoader":
    """Share a loader's batches out to the data-parallel devices.

    The last global batch is completed by wrapping around to the start of the epoch, so that shapes never change and
    every sample is seen; with `drop_last=True` an incomplete global batch is dropped instead.

    * A `DataLoader` over a map-style dataset loads this process's samples only; `collate_fn` sees the samples of all of
      the process's devices at once. Wrapping goes on through the samples of the order. Batches of a batch sampler
      of the user's own are taken as they are: a missing one is completed by the epoch's first, a short one is not.
    * Anything else that gives batches (an `IterableDataset`, a list of dicts) is read by every process, which keeps the
      batches of its devices. Missing batches are the epoch's first; a short one is filled with rows of the first.

    Args:
        loader: The user's loader. It is left alone, but for its samplers' and dataset's `set_epoch`.
        data_parallel_size: W, the number of data-parallel devices of the job.
        shards: The devices that this process feeds, in ascending order.
        agree: A collective that returns rank 0's argument on every rank; None where there is one process. Called only
            in the thread that calls `iter()`, and as often on each rank.
        gather: A collective that returns every rank's argument, by rank; called in the same thread. With it, the first
            epoch of data that the script has cut by rank is refused, or warned of.

    Returns:
        The loader of this process's batches.

    Raises:
        DataError: For a loader that cannot be sharded.
    """
    assert list(shards) == sorted(set(shards)), shards
    assert 0 <= shards[0] <= shards[-1] < data_parallel_size, (shards, data_parallel_size)
    _check(loader)
    if isinstance(loader, (list, tuple)) and loader:
        refuse_sample(loader[0], f"the {type(loader).__name__} of {len(loader)} that was passed as the loader")
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _IndexLoader(loader, data_parallel_size, shards, agree, gather)
    return _StreamLoader(loader, data_parallel_size, shards, agree, gather)


def _check(loader: Any) -> None:
    name = type(loader).__name__
    is_table = hasattr(loader, "column_names") and hasattr(loader, "__getitem__")  # of the library `datasets`
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if isinstance(loader, (Mapping, str)) or is_dataset or is_table:
        raise DataError(f"A {name} does not give batches. Wrap it: DataLoader(dataset, batch_size=…).")
    if not hasattr(loader, "__iter__"):
        raise DataError(f"A {name} cannot be iterated over. Pass a DataLoader, or a list of batches.")
    split = getattr(getattr(loader, "dataset", loader), "_distributed", None)  # by split_dataset_by_node()
    if (parts := getattr(split, "world_size", 1)) > 1:
        raise DataError(
            f"The loader's dataset already keeps one part in {parts} (split_dataset_by_node()), so most "
            "would never be seen. Leave that out: accelerate() shards the data."
        )
    for sampler in samplers(loader):
        if (replicas := getattr(sampler, "num_replicas", 1)) > 1:
            raise DataError(
                f"The loader's {type(sampler).__name__} already keeps one sample in {replicas} ({replicas} replicas), "
                f"so most would never be seen. Pass a plain sampler, or shuffle=True: accelerate() shards the data."
            )


class ShardedLoader(ABC):
    """The batches of the devices that one process feeds; made by `shard_loader`.

    What this object does not know (`sampler`, `collate_fn` …) is looked up on the user's loader.

    Attributes:
        loader: The user's loader.
        data_parallel_size: The number of data-parallel devices of the job.
        shards: Those that this process feeds.
        drop_last: Whether an incomplete global batch is dropped, instead of completed.
    """

    def __init__(
        self, loader: Any, data_parallel_size: int, shards: Sequence[int], agree: Agree | None, gather: Gather | None
    ) -> None:
        self.loader = loader
        self.data_parallel_size = data_parallel_size
        self.shards = shards
        self.drop_last = any(getattr(source, "drop_last", False) for source in (loader, *samplers(loader)))
        self._agree = agree or (lambda payload: payload)
        self._gather = gather
        """What the processes compare their data by; None once they have."""
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
        """Call `set_epoch()` of the user's loader, samplers and dataset, where they have one.

        From then on the order of torch's own samplers depends on the seed and the epoch only, and no longer on what was
        drawn before, so that a resumed run finds it again.
        """
        if self._resuming and epoch != self._at.epoch:
            self._leave_resumed_epoch(epoch)
        self._epoch = epoch
        for target in (self.loader, *samplers(self.loader), getattr(self.loader, "dataset", None)):
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        return num_global_batches(len(self.loader), self.data_parallel_size, self.drop_last)

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

    def _compare(self, look: Callable[[], Any], judge: Callable[[Sequence[Any]], str | None]) -> None:
        """Compare once what the processes have been given; collective.

        Args:
            look: Returns what this process finds of its data.
            judge: Returns what to warn of, from what all have found.

        Raises:
            DataError: The script has cut the data by rank; on every process.
        """
        gather, self._gather = self._gather, None
        if gather is not None and (said := judge(gather(look()))) is not None:
            _log.warning("%s", said)

    @abstractmethod
    def _begin(self) -> Iterator[Any]:
        """Return the batches that are left of the epoch at `_at`, having made all its draws; collective."""

    def position(self, delivered: int, *, over: bool) -> Position:
        """Return the position of a loop that has received some batches of the latest epoch.

        Args:
            delivered: How many of this process's batches it has had since the latest `iter()`.
            over: Whether it has heard that there are no more.
        """
        if over:
            own = tuple(pack(generator) for generator in self._generators()[1:])
            at = Position(epochs=self._at.epochs + 1, epoch=self._epoch, seed=self._at.seed, random=(None, *own))
        else:
            at = replace(self._at, batches=self._at.batches + delivered * self.data_parallel_size)
        devices = self._at.loader.get(_DEVICES) if self._resuming else self.data_parallel_size
        return replace(at, loader=self._traits() | ({} if devices is None else {_DEVICES: devices}))

    def resume(self, state: Any) -> None:
        """Set the position from which the next `iter()` goes on.

        Args:
            state: `Position.to_json()`, the same on every process.

        Raises:
            DataError: It is another loader's.
        """
        at = Position.from_json(self._in_own_batches(state), self._traits())
        self._warn_of_other_sizes(state["loader"])
        self._resuming = False
        if at.epoch is not None:
            self.set_epoch(at.epoch)
        self._epoch, self._at, self._resuming = at.epoch, at, at.begun
        if not at.begun:
            for generator, text in zip(self._generators(), at.random, strict=False):
                unpack(generator, text)

    def _in_own_batches(self, state: Any) -> Any:
        """Return a position that counts batches of another size as one that counts this loader's, where it can."""
        return state

    def _warn_of_other_sizes(self, saved: Mapping[str, Any]) -> None:
        """Warn of a position whose loop had global batches of another size, on which its schedule may depend.

        One that does not say for how many devices is of a trainer, which counts micro-batches, too, and warns itself.
        """
        size = self._count_rows()[0]
        found = saved.get(_DEVICES), saved.get("batch_size")
        devices, rows = (number if type(number) is int and number > 0 else None for number in found)
        if devices is None:
            return
        before = devices, rows or size
        if before[0] * (before[1] or 1) == self.data_parallel_size * (size or 1):
            return
        _log.warning(
            "the data position was saved with %s in a step, and goes on with %s: no row is lost or seen twice, and an "
            "epoch has another number of steps. To train on as before, keep their product, by batch_size or by the "
            "micro-batches of torchacc.accumulate()",
            describe_global_batch(*before),
            describe_global_batch(self.data_parallel_size, size),
        )

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
        """List what the order may be drawn from: the global generator, then those of the loader's parts."""
        sources = [self.loader, *samplers(self.loader), self.dataset]
        found = [torch.default_generator, *(getattr(source, "generator", None) for source in sources)]
        return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))

    def describe(self, *, fills_count: bool = True) -> str:
        """Return in words how batches are dealt out, and what becomes of the last rows: see `describe_epoch()`."""
        size, rows = self._count_rows()
        # A DataLoader that was asked for the length of a stream warns where the stream is longer than it says.
        is_stream = isinstance(self.dataset, IterableDataset)
        batches = None if is_stream else self._num_batches()
        return describe_epoch(
            self.data_parallel_size,
            batches=batches,
            size=size,
            rows=rows,
            drop_last=self.drop_last,
            fills_count=fills_count,
        )

    @abstractmethod
    def _count_rows(self) -> tuple[int | None, int | None]:
        """Return the rows of a batch, and of an epoch before it is completed; None for what is not known."""

    def _num_batches(self) -> int | None:
        return length(self.loader)

    def _traits(self) -> dict[str, Any]:
        """Return what another loader has to have in common with this one to resume from its position."""
        return {
            "dataset length": length(self.dataset),
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
        stream = self._filled(self._compared(iter(self.loader)))
        global_batches = make_global_batches(
            stream, self.data_parallel_size, drop_last=self.drop_last, skip=self._at.batches
        )
        return (join([found[shard] for shard in self.shards]) for found in global_batches)

    def _count_rows(self) -> tuple[int | None, int | None]:
        if not isinstance(self.loader, (list, tuple)):
            return self.batch_size, None
        if len(self.loader) > _COUNTED_BATCHES:
            return None, None
        sizes = [num_rows(batch) or 0 for batch in self.loader]
        first, last = (sizes[0], sizes[-1]) if sizes else (0, 0)
        if not 0 < last <= first or any(size != first for size in sizes[:-1]):
            return None, None
        return first, sum(sizes)

    def _compared(self, stream: Iterator[Any]) -> Iterator[Any]:
        if self._gather is None:
            return stream
        if isinstance(self.loader, (list, tuple)):
            self._compare(lambda: traits_of(self.loader), refuse_cut)
            return stream
        opening = list(itertools.islice(stream, 1))
        self._compare(lambda: digest_of(opening), warning_of_stream)
        return itertools.chain(opening, stream)

    def _traits(self) -> dict[str, Any]:
        # Each worker reads a part of the stream, so that their number decides on the order.
        return super()._traits() | {"num_workers": getattr(self.loader, "num_workers", None)}

    def _filled(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Fill the batches that end the stream up to the size of the first.

        Each worker of a DataLoader ends on a short batch. Where nothing says that batches have one size, only the very
        last is known to be short, as any other may have the size that the user gave it.
        """
        batch = next(stream, _END)
        if not isinstance(self.loader, DataLoader):
            refuse_sample(batch, f"the {type(self.loader).__name__} that was passed as the loader")
        first = map_tensors(torch.clone, batch)  # the training loop may change the batch that it gets
        one_size = self.batch_size is not None and num_rows(first) == self.batch_size
        while batch is not _END:
            following = next(stream, _END)
            yield fill(batch, first) if one_size or following is _END else batch
            batch = following


class _IndexLoader(ShardedLoader):
    """Has the user's DataLoader load by our indices: those of this process, in the order of the user's own samplers."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        data_parallel_size: int,
        shards: Sequence[int],
        agree: Agree | None,
        gather: Gather | None,
    ) -> None:
        super().__init__(loader, data_parallel_size, shards, agree, gather)
        self._sampler = ShardSampler(loader, data_parallel_size, shards, drop_last=self.drop_last, agree=agree)
        self._inner = with_sampler(loader, self._sampler)

    def _begin(self) -> Iterator[Any]:
        self._compare(lambda: traits_of(self.loader), refuse_cut)
        # The draws come in the order of the user's own loader: the workers' base seed, then the sampler's. They are all
        # made in this thread, as a background thread would race the model for the global generator.
        indices = self._sampler.begin(self._at)
        batches = iter(self._inner)
        indices.start()
        self._at = indices.at
        return batches if self._sampler.collates or len(self.shards) == 1 else self._joined(batches)

    def _in_own_batches(self, state: Any) -> Any:
        return self._sampler.in_own_batches(state)

    def _count_rows(self) -> tuple[int | None, int | None]:
        return self._sampler.batch_size, self._sampler.num_rows

    def _num_batches(self) -> int | None:
        return self._sampler.num_batches

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        while found := list(itertools.islice(batches, len(self.shards))):
            yield join(found)
