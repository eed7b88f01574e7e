"""One process's share of the order of the user's own samplers, the same order on every process."""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from torchacc.data.global_batches import check_even, make_global_batches, num_global_batches
from torchacc.data.position import Position
from torchacc.errors import DataError

Agree = Callable[[bytes], bytes]

# The samplers known to draw all that they take from the global generator at their first index.
_DRAW_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# How many batches of an epoch's order the processes compare: enough that two shuffles do not look alike by chance.
_COMPARED_BATCHES = 64


class ShardSampler:
    """What our DataLoader takes for its sampler: this process's share of the order of the user's own samplers.

    Attributes:
        collates: Whether the DataLoader makes batches of samples. If not (batch_size=None), the dataset itself makes
            them, of whatever its sampler gives.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        data_parallel_size: int,
        shards: Sequence[int],
        *,
        drop_last: bool,
        agree: Agree | None,
    ) -> None:
        self.collates = loader.batch_sampler is not None
        self._order: Any = loader.batch_sampler if self.collates else loader.sampler
        self._batch_size = self._order.batch_size if type(self._order) is BatchSampler else None
        self._steerable = next(filter(_is_steerable, reversed(samplers(loader))), None)
        self._data_parallel_size = data_parallel_size
        self._shards = shards
        self._drop_last = drop_last
        self._agree: Agree = agree or (lambda payload: payload)
        self._alone = agree is None
        self._indices = Indices(self, Position())

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the user's own order; None where it has no length."""
        return length(self._order)

    @property
    def batch_size(self) -> int | None:
        """The number of samples of a batch; None for batches that are not merely cut from an order of samples."""
        return self._batch_size

    @property
    def num_rows(self) -> int | None:
        """The number of samples in the user's own order; None where it has no length, or gives batches by itself."""
        return length(self._order.sampler) if self._batch_size is not None else None

    def begin(self, at: Position) -> "Indices":
        """Start an epoch, or the rest of one: what `iter()` returns from here on."""
        self._indices = Indices(self, at)
        return self._indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices

    def __len__(self) -> int:
        global_batches = num_global_batches(len(self._order), self._data_parallel_size, self._drop_last)
        return global_batches if self.collates else global_batches * len(self._shards)

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
                f"the interrupted epoch had {samples} samples, in batches of {size}, which is not a multiple of this "
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
            opening = list(itertools.islice(batches, max(self._data_parallel_size, _COMPARED_BATCHES)))
        # Where batches are only cut from the samples' order, it is that which is found again at another batch size.
        begin: Iterable[Any] = itertools.chain.from_iterable(opening) if self._batch_size else opening
        digest = self._compare(list(itertools.islice(begin, _COMPARED_BATCHES)))
        if at.order not in (None, digest):
            raise DataError(
                f"the order of the interrupted epoch is not found again: {type(self._order).__name__} now gives "
                f"batches that begin with {repr(opening)[:80]}. What decides on it is neither torch's generator nor "
                "set_epoch(): give the sampler a `generator`, or a set_epoch() on which alone its order depends"
            )
        global_batches = make_global_batches(
            itertools.chain(opening, batches),
            self._data_parallel_size,
            drop_last=self._drop_last,
            batch_size=self._batch_size,
            skip=at.batches,
        )
        # An empty epoch is reported here, not in a background thread.
        global_batches = itertools.chain(list(itertools.islice(global_batches, 1)), global_batches)
        return self._share(global_batches), replace(at, order=digest)

    def _share(self, global_batches: Iterator[list[Any]]) -> Iterator[Any]:
        for found in global_batches:
            own = [found[shard] for shard in self._shards]
            if self.collates:
                check_even([len(batch) for batch in own])
                yield list(itertools.chain.from_iterable(own))
            else:
                yield from own

    @contextmanager
    def _agreed_draws(self, at: Position) -> Iterator[None]:
        """Seed the user's sampler to draw what rank 0's draws, or, once an epoch is set, what the epoch decides.

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


class Indices(Iterator[Any]):
    """One epoch's indices, drawn at the first call of `start` or of `next`.

    Attributes:
        at: The position that they begin at; once drawn, with what has been found out of the order.
    """

    def __init__(self, sampler: ShardSampler, at: Position) -> None:
        self.at = at
        self._sampler = sampler
        self._drawn: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Return the indices, drawn now if they are not yet."""
        if self._drawn is None:
            self._drawn, self.at = self._sampler.draw(self.at)
        return self._drawn

    def __next__(self) -> Any:
        return next(self.start())


def samplers(loader: Any) -> list[Any]:
    """List the objects that decide on the loader's order, the innermost last."""
    outer = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    inner = [getattr(sampler, "sampler", None) for sampler in outer]
    return [sampler for sampler in (*outer, *inner) if sampler is not None]


def with_sampler(loader: "DataLoader[Any]", sampler: ShardSampler) -> "DataLoader[Any]":
    """Copy a DataLoader with another sampler: of the same class, with the same workers, collate_fn and all the rest."""
    new = copy.copy(loader)
    # Past the guard of DataLoader.__setattr__, which is there for the loaders that somebody iterates over already.
    new.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    new.__dict__["_iterator"] = None  # the persistent workers of the user's loader, if it has run before
    return new


def length(order: Any) -> int | None:
    """Return the length of what may have none, or be of a class that is not ours and raises an error of any kind."""
    try:
        return len(order)
    except Exception:
        return None


def _epoch_state(at: Position) -> torch.Tensor:
    digest = hashlib.blake2b(f"{at.seed}/{at.epoch}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big")).get_state()


def _is_steerable(sampler: Any) -> bool:
    """Tell whether a sampler's order follows from the state of its generator."""
    generator = getattr(sampler, "generator", None)
    return isinstance(generator, torch.Generator) or (generator is None and isinstance(sampler, _DRAW_AT_ONCE))
