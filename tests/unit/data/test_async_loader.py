import textwrap
import threading
import time
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests import forkrun
from torchacc.data import AsyncLoader
from torchacc.errors import ConfigError


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchacc-async-loader"]


class Recorder:
    """A loader that knows which threads iterate over it and how far they got."""

    batch_size = 3
    colour = "green"

    def __init__(self, count: int) -> None:
        self.dataset = list(range(count))
        self.epochs: list[int] = []
        self.iter_threads: list[threading.Thread] = []
        self.next_threads: set[threading.Thread] = set()
        self.loaded = 0

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        self.iter_threads.append(threading.current_thread())
        return self._batches()

    def _batches(self):
        for value in self.dataset:
            self.next_threads.add(threading.current_thread())
            self.loaded += 1
            yield value


@pytest.mark.parametrize("prefetch", [0, 1, 2, 10])
def test_gives_every_batch_in_order_for_several_epochs(prefetch):
    loader = AsyncLoader(Recorder(5), transform=lambda b: b + 1, put=lambda b: b * 10, prefetch=prefetch)
    for _ in range(3):
        assert list(loader) == [10, 20, 30, 40, 50]
    assert workers() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_iter_runs_here_and_next_in_the_background(prefetch):
    recorder = Recorder(3)
    list(AsyncLoader(recorder, prefetch=prefetch))
    assert recorder.iter_threads == [threading.main_thread()]
    assert (threading.main_thread() in recorder.next_threads) is (prefetch == 0)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_on_batch_comes_before_each_batch_and_after_the_last(prefetch):
    events: list[object] = []
    loader = AsyncLoader([1, 2], on_batch=lambda: events.append(threading.current_thread()), prefetch=prefetch)
    for batch in loader:
        events.append(batch)
    main = threading.main_thread()
    assert events == [main, 1, main, 2, main]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_on_batch_is_not_called_once_more_after_the_end(prefetch):
    calls = []
    batches = iter(AsyncLoader([1], on_batch=lambda: calls.append(1), prefetch=prefetch))
    assert list(batches) == [1]
    assert next(batches, "end") == "end"
    assert len(calls) == 2


def test_keeps_no_more_than_prefetch_batches_ready():
    recorder = Recorder(20)
    batches = iter(AsyncLoader(recorder, prefetch=3))
    for taken in range(1, 6):
        next(batches)
        deadline = time.monotonic() + 5
        while recorder.loaded < taken + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert recorder.loaded == taken + 3


def test_loads_while_the_step_runs():
    loaded = threading.Event()

    def batches():
        yield 1
        loaded.set()
        yield 2

    for _ in AsyncLoader(batches()):
        assert loaded.wait(5)


def test_leaving_early_stops_the_thread():
    loader = AsyncLoader(Recorder(100))
    for batch in loader:
        if batch == 3:
            break
    assert workers() == []
    with pytest.raises(ZeroDivisionError):
        max(1 // batch for batch in loader)
    assert workers() == []
    batches = iter(loader)
    next(batches)
    assert len(workers()) == 1
    del batches
    assert workers() == []


def test_two_iterators_at_once():
    loader = AsyncLoader(Recorder(4))
    assert list(zip(loader, loader, strict=True)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(a, b) for a in loader for b in AsyncLoader([7, 8])] == [(a, b) for a in range(4) for b in (7, 8)]


def broken_transform(batch):
    raise ValueError(f"cannot transform {batch}")


def broken_put(batch):
    raise ValueError(f"cannot put {batch}")


def broken_loader():
    yield 0
    raise ValueError("cannot load")


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("loader", "options", "function"),
    [
        ([1], {"transform": broken_transform}, "broken_transform"),
        ([1], {"put": broken_put}, "broken_put"),
        (None, {}, "broken_loader"),
    ],
)
def test_errors_reach_the_loop_with_their_traceback(prefetch, loader, options, function):
    batches = iter(AsyncLoader(broken_loader() if loader is None else loader, prefetch=prefetch, **options))
    with pytest.raises(ValueError, match="cannot") as caught:
        list(batches)
    assert function in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert list(batches) == []
    assert workers() == []


def test_the_error_is_the_same_object():
    error = OSError("disk")

    def fail(_):
        raise error

    with pytest.raises(OSError, match="disk") as caught:
        list(AsyncLoader([1], put=fail))
    assert caught.value is error


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stray_stop_iteration_does_not_end_the_data_silently(prefetch):
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(AsyncLoader([1, 2], transform=lambda _: next(iter(())), prefetch=prefetch))


class Faulty(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise RuntimeError("sample 5 is damaged")
        return index


def test_error_of_a_dataloader_worker():
    seen: list[list[int]] = []
    batches = AsyncLoader(DataLoader(Faulty(), batch_size=2, num_workers=2))
    with pytest.raises(RuntimeError, match="sample 5 is damaged") as caught:
        seen.extend(batch.tolist() for batch in batches)
    assert seen == [[0, 1], [2, 3]]
    assert "__getitem__" in str(caught.value)
    # The traceback keeps the DataLoader alive, whose workers are slow to end when the garbage collector finds it.
    traceback.clear_frames(caught.value.__traceback__)


def test_passes_the_loader_through():
    recorder = Recorder(4)
    loader = AsyncLoader(recorder)
    loader.set_epoch(7)
    assert recorder.epochs == [7]
    assert len(loader) == 4
    assert loader.dataset is recorder.dataset
    assert loader.batch_size == 3
    assert loader.colour == "green"
    assert not hasattr(loader, "flavour")
    with pytest.raises(TypeError):
        len(AsyncLoader(x for x in [1]))


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, None, "2"])
def test_refuses_a_bad_prefetch(prefetch):
    with pytest.raises(ConfigError, match="prefetch=0"):
        AsyncLoader([1], prefetch=prefetch)


def test_tensors_come_through_untouched():
    batch = {"x": torch.ones(2)}
    assert next(iter(AsyncLoader([batch]))) is batch


@pytest.mark.slow
@pytest.mark.parametrize("stall", ["", "time.sleep(120)"])
def test_the_interpreter_exits_in_the_middle_of_a_loop(stall):
    """Also where the thread is stuck in the loader."""
    script = f"""
        import time
        import torch
        from torch.utils.data import DataLoader
        from torchacc.data import AsyncLoader

        def endless():
            for batch in DataLoader(torch.arange(100), num_workers=1):
                yield batch
                {stall}

        batches = iter(AsyncLoader(endless()))
        next(batches)
        print("left", flush=True)
    """
    start = time.monotonic()
    done = forkrun.run("-c", textwrap.dedent(script), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "left\n"
    assert done.stderr == ""
    assert time.monotonic() - start < 30
