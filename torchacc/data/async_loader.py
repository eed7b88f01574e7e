"""Readies batches in a background thread while the device works."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, ClassVar

from torchacc.data.sharded_loader import ShardedLoader
from torchacc.errors import ConfigError, DataError, NoLengthError

# How long to wait for a thread that is in the middle of loading a batch when its loop is left. It is a daemon: one that
# never comes back (a stalled stream) must hold up neither the training script nor the end of the interpreter.
_JOIN_SECS = 5.0
_END: Any = object()


class AsyncLoader:
    """Iterates over a loader, and prepares its next batches in a background thread while the device works.

    The loader's `__iter__()`, which may be collective, runs in the thread of the loop; only its `next()` runs in the
    background. An error there is raised in the loop, with its original traceback. Leaving the loop early stops the
    thread. Other attributes (`sampler`, `collate_fn` …) are those of the loader.

    Args:
        loader: The loader; it is iterated once per epoch.
        put: Moves a batch to the device. Runs in the background.
        transform: Changes a batch before `put`, such as a `Bucketing`. Runs in the background.
        on_batch: Ends a training step. Called in the thread of the loop whenever it asks for a batch, also after the
            last one, and before it waits for data.
        prefetch: Number of batches to keep ready; 0 to prepare each batch in the loop, without a thread.

    Raises:
        ConfigError: `prefetch` is not an integer of 0 or more.
    """

    listeners: ClassVar["weakref.WeakSet[Any]"] = weakref.WeakSet()
    """Objects whose `on_loop(loader)` is called when a loop over any of these loaders begins."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        put: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_batch: Callable[[], object] | None = None,
        prefetch: int = 2,
    ) -> None:
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise ConfigError(
                f"prefetch={prefetch!r} is not a number of batches to keep ready. Write prefetch=2, or prefetch=0 to "
                f"load in line."
            )
        self.loader = loader
        self.prefetch = prefetch
        self._steps = [step for step in (transform, put) if step is not None]
        self._on_batch = on_batch or (lambda: None)
        self._progress = _EpochProgress()

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch, or resume a loaded one. Collective if the loader's `__iter__()` is."""
        for listener in tuple(self.listeners):
            listener.on_loop(self)
        batches = iter(self.loader)
        self._progress = _EpochProgress()
        if self.prefetch:
            return _Prefetched(batches, self._prepare, self._on_batch, self.prefetch, self._progress)
        return self._in_line(batches, self._progress)

    def __len__(self) -> int:
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            source = getattr(self.loader, "dataset", self.loader)
            raise NoLengthError(
                f"len(loader): a {type(source).__name__} gives batches, and does not say how many. Count the steps "
                "yourself, or pass a loader that has a length"
            ) from None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def place_in_loop(self) -> tuple[Any, int]:
        """The last loop that was started and the number of its batches so far, to compare with another place."""
        return self._progress, self._progress.delivered

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as plain data for JSON. It is the same on every process.

        It counts the batches that the loop has received, not those that are prefetched. It is the position of the last
        loop that was started; a loop that was left early counts as running until the next one starts.
        """
        return self._sharded.position(self._progress.delivered, over=self._progress.over).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next loop at a position in the data. Call it on every process, with the same state.

        The loader must have the same data and batch size as the one whose position was saved; the number of devices may
        differ. Global batches are formed from the rest of the epoch; the last one is completed with the first samples
        of the epoch, or dropped, as usual. An epoch without remaining batches ends at once, so that
        `range(loader.epochs_done, num_epochs)` is right after any interruption.

        * The epoch keeps its order: it is drawn again from the saved random state, which does not affect the global
          generator. The model's random state can be restored before or after; with it, later epochs have the orders of
          an uninterrupted run.
        * Samples of a map-style dataset that were used are not loaded again. A stream is read again up to the position,
          so it must yield the same batches; draws from its own `generator` at `iter()` are repeated.
        * Draws of a sampler from other generators, such as Python's or numpy's, are not saved. The loop raises if the
          order differs from the interrupted one. `set_epoch()` with another epoch abandons the loaded position.

        Args:
            state: The result of `state_dict()`.

        Raises:
            DataError: The state belongs to a loader of other data, batch size or `drop_last`; the message says which.
        """
        self._sharded.resume(state)
        self._progress = _EpochProgress()

    @property
    def epochs_done(self) -> int:
        """Number of completed epochs, including those before a loaded position."""
        return self._sharded.position(self._progress.delivered, over=self._progress.over).epochs

    @property
    def _sharded(self) -> ShardedLoader:
        if not isinstance(self.loader, ShardedLoader):
            raise DataError(
                f"this AsyncLoader reads a {type(self.loader).__name__}, whose position it does not know: use the "
                "loader that accelerate() or shard_loader() returns"
            )
        return self.loader

    def _in_line(self, batches: Iterator[Any], progress: "_EpochProgress") -> Iterator[Any]:
        self._on_batch()
        for batch in batches:
            ready = self._prepare(batch)
            progress.delivered += 1
            yield ready
            self._on_batch()
        progress.over = True

    def _prepare(self, batch: Any) -> Any:
        for step in self._steps:
            batch = step(batch)
        return batch


class _EpochProgress:
    """How much of its epoch a loop has received."""

    delivered = 0
    over = False


class _Failure:
    """An error of the background thread, on its way to the loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Feed:
    """What the thread and the loop share. It must not know the iterator, whose disposal ends the thread."""

    def __init__(self, prefetch: int) -> None:
        self.ready: SimpleQueue[Any] = SimpleQueue()
        self.slots = threading.Semaphore(prefetch)
        self.stopped = False

    def fill(self, batches: Iterator[Any], prepare: Callable[[Any], Any]) -> None:
        """Keep the slots filled until the batches end, one fails, or the loop is left. Runs in the thread."""
        try:
            while True:
                # A slot is taken before its batch is loaded: no more than `prefetch` batches ever wait on the device.
                self.slots.acquire()
                if self.stopped:
                    return
                batch = next(batches, _END)
                if batch is _END:
                    break
                self.ready.put(prepare(batch))
                del batch
        except BaseException as error:  # of any kind: the loop that waits for this thread raises it
            self.ready.put(_Failure(error))
        else:
            self.ready.put(_END)

    def stop(self, thread: threading.Thread) -> None:
        """End the thread. Called once, from the loop's side."""
        self.stopped = True
        self.slots.release()
        if thread is not threading.current_thread():  # the garbage collector may run this anywhere
            thread.join(_JOIN_SECS)


class _Prefetched(Iterator[Any]):
    """One epoch with a thread of its own."""

    def __init__(
        self,
        batches: Iterator[Any],
        prepare: Callable[[Any], Any],
        on_batch: Callable[[], object],
        prefetch: int,
        progress: _EpochProgress,
    ) -> None:
        self._on_batch = on_batch
        self._progress = progress
        self._feed = _Feed(prefetch)
        thread = threading.Thread(
            target=self._feed.fill, args=(batches, prepare), name="torchacc-async-loader", daemon=True
        )
        self._close = weakref.finalize(self, self._feed.stop, thread)
        thread.start()

    def __next__(self) -> Any:
        if not self._close.alive:
            raise StopIteration
        self._on_batch()
        item = self._feed.ready.get()
        if item is not _END and not isinstance(item, _Failure):
            self._feed.slots.release()
            self._progress.delivered += 1
            return item
        self._close()
        if item is _END:
            self._progress.over = True
            raise StopIteration
        if isinstance(item.error, StopIteration):  # would end the loop as if the data had ended
            raise RuntimeError("the transform of a batch raised StopIteration") from item.error
        try:
            raise item.error
        finally:
            del item  # its traceback holds this frame: without the cycle, the loader's workers end at once
