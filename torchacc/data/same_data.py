"""Finds out whether all processes hold the same data, or parts of it that the script has cut by rank.

Every process looks at its own (`traits_of()`, `digest_of()`), all of them exchange what they have found, and each
then compares it (`refuse_cut()`, `warning_of_stream()`). Nothing here is collective.
"""

import contextlib
import dataclasses
import hashlib
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from torchacc.errors import DataError

Trait = tuple[str, str, bool]
"""What was looked at, a digest of it, and whether it can only differ between processes that hold different data."""

_ROWS = 16
"""How many rows of data in memory are compared."""
_PROBES = 3
"""How many samples are loaded to be compared: the first, one in the middle, and the last."""
_INDICES = 4096
"""About how many indices of a subset are compared."""
_DEPTH = 4
"""How many datasets inside of one another are looked into."""

_WORKER_SECS = 60
"""How long a worker may take to load them."""

KEEP_THE_CUT = (
    "or keep your cut: leave the loader out of accelerate() and shard_loader(), and iterate over it yourself, each "
    "process with as many batches as the others"
)


def traits_of(loader: Any) -> list[Trait]:
    """Return what can be told, at little cost, of the data that this process has been given.

    Where the loader has workers, a worker loads the samples that are looked at: what a dataset opens in this process,
    such as a file, all workers would share.

    Args:
        loader: A DataLoader over a map-style dataset, or a list or tuple of batches. Of anything else nothing is known.
    """
    try:
        if isinstance(loader, (list, tuple)):
            return [_rows("the list of batches", loader, True)]
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return []
        if loader.num_workers and (found := _traits_by_worker(loader)) is not None:
            return found
        return _traits_of_dataset(loader.dataset, may_load=loader.num_workers == 0)
    except Exception:  # of data that cannot be read here; where it is read, it shows what is wrong with it
        return []


def refuse_cut(found: Sequence[Sequence[Trait]]) -> str | None:
    """Compare what the processes have been given.

    Args:
        found: The traits of each process, by rank.

    Returns:
        What to warn of, where data differ in a way that may be meant; None where they do not.

    Raises:
        DataError: The processes hold different data.
    """
    suspected: str | None = None
    for what, digest, is_certain in found[0]:
        held = [{name: other for name, other, _ in traits}.get(what, digest) for traits in found]
        rank = next((rank for rank, other in enumerate(held) if other != digest), None)
        if rank is None:
            continue
        if is_certain:
            raise DataError(
                f"rank {rank} has other data than rank 0, in {what}. The rows are dealt out to the {len(found)} "
                "processes here, so that of data that the script has cut by rank most would never be seen. Hand over "
                "the whole data, alike in every process, with random splits and draws seeded alike; " + KEEP_THE_CUT
            )
        suspected = suspected or (
            f"rank {rank} seems to have other data than rank 0, in {what}. The rows are dealt out to the {len(found)} "
            "processes here, so that of data that the script has cut by rank most are never seen. Where only random "
            "changes of the same samples differ, nothing is lost. Else hand over the whole data, alike in every "
            f"process; {KEEP_THE_CUT}"
        )
    return suspected


def warning_of_stream(digests: Sequence[str]) -> str | None:
    """Return what to warn of where the first batches of a stream, by rank, are not alike; None where they are."""
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is None:
        return None
    return (
        f"rank {rank} seems to read another stream than rank 0: its first batch is another. Each of the "
        f"{len(digests)} processes reads all of the stream and keeps its own devices' batches, so that of a stream "
        "that the script has cut by rank most rows are never seen. Where only random changes of the same samples "
        f"differ, nothing is lost. Else give every process the whole stream; {KEEP_THE_CUT}"
    )


class _TraitsDataset(Dataset[list[Trait]]):
    """A dataset whose one sample is what can be told of the user's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[Trait]:
        return _traits_of_dataset(self.dataset, may_load=True)

    def start_worker(self, worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
        """Run the user's `worker_init_fn`, which may ask its worker for the dataset and write to it."""
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # which forbids it to scripts
        if worker_init_fn is not None:
            worker_init_fn(worker_id)


def _traits_by_worker(loader: "DataLoader[Any]") -> list[Trait] | None:
    """Return what a worker of its own tells of a loader's data; None where it cannot, or would take long to start."""
    context = loader.multiprocessing_context or multiprocessing
    if (context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) != "fork":
        return None
    look = _TraitsDataset(loader.dataset)
    worker = DataLoader(
        look,
        batch_size=None,
        num_workers=1,
        collate_fn=list,
        worker_init_fn=partial(look.start_worker, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # whose draw is none of the script's
        timeout=_WORKER_SECS,
    )
    try:
        (traits,) = worker
        return traits  # type: ignore[no-any-return]
    except Exception:  # what is wrong shows in the loader's own workers
        return None


def _traits_of_dataset(dataset: Any, *, may_load: bool) -> list[Trait]:
    return list(_traits(dataset, "the dataset", may_load=may_load, depth=_DEPTH))


def _traits(dataset: Any, name: str, *, may_load: bool, depth: int) -> Iterator[Trait]:
    if depth == 0:
        return
    inside = partial(_traits, may_load=may_load, depth=depth - 1)
    if isinstance(dataset, Subset):
        yield f"the indices of {name}'s Subset", _digest_of_indices(dataset.indices), True
        yield from inside(dataset.dataset, f"{name}'s Subset")
    elif isinstance(dataset, ConcatDataset):
        for number, part in enumerate(dataset.datasets):
            yield from inside(part, f"part {number} of {name}")
    elif isinstance(dataset, StackDataset):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        for number, part in enumerate(parts):
            yield from inside(part, f"part {number} of {name}")
    elif isinstance(dataset, TensorDataset):
        for number, tensor in enumerate(dataset.tensors):
            yield _rows(f"tensor {number} of {name}", tensor, True)
    elif _is_arrow(dataset):
        yield _rows(name, dataset.with_format("arrow"), True)
    elif _holds_rows(dataset):
        yield _rows(name, dataset, True)
    else:
        yield from _traits_of_unknown(dataset, name, may_load=may_load, depth=depth - 1)


def _traits_of_unknown(dataset: Any, name: str, *, may_load: bool, depth: int) -> Iterator[Trait]:
    """Yield what is known of a dataset of the user's own class: datasets in it, and its samples or what it holds."""
    attributes = dict(getattr(dataset, "__dict__", {}))
    probe = _probed(dataset) if may_load and not any(map(_is_generator, attributes.values())) else None
    if probe is not None:
        yield name, probe, False
    size = _size(dataset)
    for key, value in attributes.items():
        if isinstance(value, Dataset) or _is_arrow(value):
            yield from _traits(value, f"{name}'s {key}", may_load=False, depth=depth)
        elif probe is None and size and _size(value) == size and (_holds_rows(value) or hasattr(value, "iloc")):
            yield _rows(f"{name}'s {key}", getattr(value, "iloc", value), False)


def _probed(dataset: Any) -> str | None:
    """Return a digest of some samples; None where there are none, or the same random numbers give others each time."""
    size = _size(dataset)
    if not size or not hasattr(dataset, "__getitem__"):
        return None
    places = sorted({size * place // (_PROBES - 1) for place in range(_PROBES - 1)} | {size - 1})
    digests = []
    for _ in range(2):
        try:
            with _same_random_numbers():
                digests.append(digest_of([dataset[place] for place in places]))
        except Exception:  # of a class that is not ours; what is wrong with it shows when it is read
            return None
    return digests[0] if digests[0] == digests[1] else None


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Context manager with the same random numbers in each process, which puts the generators back."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    kept = torch.get_rng_state(), random.getstate(), numpy_random and numpy_random.get_state()
    try:
        torch.default_generator.set_state(torch.Generator().manual_seed(0).get_state())
        random.seed(0)
        if numpy_random is not None:
            numpy_random.seed(0)
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        if numpy_random is not None:
            numpy_random.set_state(kept[2])


def _rows(name: str, rows: Any, is_certain: bool) -> Trait:
    """Return the number of rows that can be indexed, and a digest of some of them."""
    size = _size(rows) or 0
    places = sorted({size * place // _ROWS for place in range(_ROWS)} | {size - 1}) if size else []
    return name, f"{size} {digest_of([rows[place] for place in places])}", is_certain


def _digest_of_indices(indices: Any) -> str:
    size = _size(indices) or 0
    every = max(1, size // _INDICES)
    places = [*range(min(size, _INDICES)), *range(0, size, every)]
    return f"{size} {digest_of([indices[place] for place in places])}"


def _size(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # has no length, or is of a class that is not ours
        return None


def _holds_rows(value: Any) -> bool:
    """Tell whether a value is data in memory, of which nothing is random."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and not value.is_meta
    return isinstance(value, (list, tuple, range)) or (_is_array(value) and value.ndim > 0)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_arrow(value: Any) -> bool:
    """Tell whether a value is a map-style dataset of the library `datasets`, whose rows can be read unchanged."""
    kind = getattr(sys.modules.get("datasets"), "Dataset", None)
    return kind is not None and isinstance(value, kind)


def _is_generator(value: Any) -> bool:
    """Tell whether an attribute draws random numbers of its own, of which none must be drawn here."""
    found = getattr(sys.modules.get("numpy"), "random", None)
    kinds = (getattr(found, name, ()) for name in ("Generator", "RandomState"))
    return isinstance(value, (torch.Generator, random.Random, *(kind for kind in kinds if isinstance(kind, type))))


def digest_of(tree: Any) -> str:
    """Return a digest of the tensors, arrays and values in a tree of any nesting, which processes can compare."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(tree, digest)
    return digest.hexdigest()


def _feed(tree: Any, digest: Any) -> None:
    """Add a value to a digest; of what is unknown the name of its class alone, as its `repr()` may be an address."""
    digest.update(f"/{type(tree).__name__}:".encode())
    if isinstance(tree, torch.Tensor):
        with contextlib.suppress(Exception):  # sparse, quantized, nested, without data
            digest.update(f"{tree.dtype}{tuple(tree.shape)}".encode())
            digest.update(tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            _feed(key, digest)
            _feed(value, digest)
    elif isinstance(tree, str):
        # Files may lie in another folder on each machine.
        digest.update(tree.rpartition("/")[2].encode(errors="replace"))
    elif isinstance(tree, (bytes, bytearray)):
        digest.update(tree)
    elif tree is None or isinstance(tree, (int, float, complex)):
        digest.update(repr(tree).encode())
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _feed(value, digest)
    elif hasattr(tree, "to_pydict"):  # a row of a table of Arrow's
        _feed(tree.to_pydict(), digest)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        _feed({field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}, digest)
    elif hasattr(tree, "tolist") and (not _is_array(tree) or tree.dtype.hasobject):
        _feed(tree.tolist(), digest)
    elif hasattr(tree, "tobytes"):  # an array, a picture
        digest.update(f"{getattr(tree, 'shape', getattr(tree, 'size', ''))}".encode())
        digest.update(tree.tobytes())
