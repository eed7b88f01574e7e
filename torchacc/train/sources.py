"""Where documents come from: the embedded corpus, files, or a dataset of the hub; all read by `datasets`."""

import glob
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchacc import env
from torchacc.errors import DataError, shown
from torchacc.train.corpus import stdlib_documents, stdlib_files
from torchacc.train.tokens import load_tokenizer

if TYPE_CHECKING:
    import datasets

    from torchacc.train.config import TextConfig

FILE_KINDS = ("text", "json", "parquet")
"""Values of `data.dataset` that mean files of one's own."""
NO_DATASETS = ("stdlib", *FILE_KINDS)
"""Values of `data.dataset` that are no dataset's name."""


class Source(ABC):
    """Documents that can be read, and told apart from others without reading them."""

    @abstractmethod
    def facts(self) -> Any:
        """Return plain data that changes when the documents do."""

    @abstractmethod
    def read(self, scratch: Path) -> "datasets.Dataset":
        """Read all documents; `scratch` is a folder that is needed as long as they are."""

    @abstractmethod
    def stream(self) -> "datasets.IterableDataset":
        """Read documents one by one."""


@dataclass(frozen=True)
class StdlibSource(Source):
    """Python's standard library."""

    column: str

    @override
    def __str__(self) -> str:
        return "stdlib"

    @override
    def facts(self) -> Any:
        return ["stdlib", sys.version, file_facts(stdlib_files())]

    @override
    def read(self, scratch: Path) -> "datasets.Dataset":
        import datasets

        return datasets.Dataset.from_dict({self.column: stdlib_documents()})

    @override
    def stream(self) -> "datasets.IterableDataset":
        return self.read(Path()).to_iterable_dataset()


@dataclass(frozen=True)
class FileSource(Source):
    """Files of one kind. A text file is one document, a row of any other kind is one."""

    kind: str
    files: tuple[str, ...]

    @override
    def __str__(self) -> str:
        return self.files[0] + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else "")

    @override
    def facts(self) -> Any:
        return [self.kind, file_facts(map(Path, self.files))]

    @override
    def read(self, scratch: Path) -> "datasets.Dataset":
        return self._load(streaming=False, cache_dir=str(scratch))

    @override
    def stream(self) -> "datasets.IterableDataset":
        return self._load(streaming=True)

    def _load(self, **options: Any) -> Any:
        import datasets

        if self.kind == "text":
            options["sample_by"] = "document"
        try:
            with _without_bars():
                return datasets.load_dataset(self.kind, data_files=list(self.files), split="train", **options)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise DataError(f"data: {self} cannot be read: {_cause(error)}") from error


@dataclass(frozen=True)
class HubSource(Source):
    """One split of a dataset of the hub, or of a local folder."""

    dataset: str
    name: str | None
    split: str

    @override
    def __str__(self) -> str:
        return f"split {self.split!r} of {self.dataset}" + (f" ({self.name})" if self.name else "")

    @override
    def facts(self) -> Any:
        # `datasets` names by it what it derives from a dataset; nothing public tells two versions of one apart.
        return [self.dataset, self.name, self.split, self._load(streaming=False)._fingerprint]

    @override
    def read(self, scratch: Path) -> "datasets.Dataset":
        return self._load(streaming=False)

    @override
    def stream(self) -> "datasets.IterableDataset":
        return self._load(streaming=True)

    def _load(self, *, streaming: bool) -> Any:
        import datasets

        try:
            with _without_bars() if Path(self.dataset).is_dir() else nullcontext():
                return datasets.load_dataset(self.dataset, self.name, split=self.split, streaming=streaming)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise DataError(f"data: {self} cannot be read: {_cause(error)}") from error


def check_text(config: "TextConfig") -> None:
    """Refuse what cannot be loaded, before anything is built; reads the beginning of files, and nothing of the hub.

    Raises:
        DataError: Options contradict each other; a file is missing, empty, or without such a column of text; a folder
            holds no tokenizer; the folder for what is tokenised cannot be one.
    """
    for source in find_sources(config):
        if isinstance(source, FileSource):
            check_column(source.stream(), config.text_column, source)
    if config.tokenizer is not None and is_path(config.tokenizer):
        load_tokenizer(config.tokenizer)
    if not config.streaming:
        check_cache(cache_folder(config))


def cache_folder(config: "TextConfig") -> Path:
    """Return the folder for what is tokenised."""
    return Path(config.cache_dir or Path(env.get("XDG_CACHE_HOME") or "~/.cache", "torchacc", "text")).expanduser()


def check_cache(folder: Path) -> None:
    """Refuse a folder for what is tokenised that is none, or cannot be made; one that is there may be read-only.

    Raises:
        DataError: It is no folder, or cannot be made.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DataError(f"data.cache_dir: {folder} cannot be made, as {existing} is a file; name another folder")
    if not folder.exists() and not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(f"data.cache_dir: {folder} cannot be made, as {existing} is read-only; name another folder")


def find_sources(config: "TextConfig") -> list[Source]:
    """Return the source to learn from and, where the configuration names one, another to validate on.

    Raises:
        DataError: Options contradict each other; a file is missing or empty.
    """
    validation = config.validation
    if validation is not None and (validation.split is None) == (validation.files is None):
        raise DataError("data.validation: give one of split and files")
    for option, name in (("dataset", config.dataset), ("tokenizer", config.tokenizer)):
        if name is not None and is_path(name) and not Path(name).expanduser().exists():
            raise DataError(f"data.{option} = {shown(name)}: there is no such folder, seen from {Path.cwd()}")
    if config.streaming and config.tokenizer is None:
        raise DataError(
            "data.streaming = True: no tokenizer can be trained on text that is streamed; name one as data.tokenizer"
        )
    if config.dataset in FILE_KINDS:
        return _file_sources(config)
    given = {"files": config.files, "validation.files": None if validation is None else validation.files}
    for option, files in given.items():
        if files is not None:
            raise DataError(
                f"data.{option} = {shown(_plain(files))}: files go with dataset: {', '.join(FILE_KINDS)}, "
                f"not {shown(config.dataset)}"
            )
    if config.dataset == "stdlib":
        return [_stdlib_source(config)]
    return _hub_sources(config)


def _stdlib_source(config: "TextConfig") -> Source:
    if config.name is not None:
        raise DataError(f"data.name = {shown(config.name)}: stdlib has no configurations; leave it out")
    if config.split != "train" or config.validation is not None:
        raise DataError("data.split: stdlib has the split 'train' alone; data.validation_share holds a part of it out")
    return StdlibSource(config.text_column)


def _hub_sources(config: "TextConfig") -> list[Source]:
    splits = [config.split] if config.validation is None else [config.split, config.validation.split]
    if len(set(splits)) < len(splits):
        raise DataError(
            f"data.validation.split = {shown(config.split)}: it is trained on; name another, or leave it out"
        )
    dataset = str(Path(config.dataset).expanduser()) if is_path(config.dataset) else config.dataset
    return [HubSource(dataset, config.name, split) for split in splits if split is not None]


def _file_sources(config: "TextConfig") -> list[Source]:
    if config.files is None:
        raise DataError(f"data.dataset = {shown(config.dataset)}: it reads files; name them in data.files")
    if config.name is not None:
        raise DataError(f"data.name = {shown(config.name)}: files have no configurations; leave it out")
    if config.split != "train" or (config.validation is not None and config.validation.split is not None):
        raise DataError("data.split: files have no splits; name those to validate on in data.validation.files")
    files = _existing(config.files, "data.files")
    if config.validation is None or config.validation.files is None:
        return [FileSource(config.dataset, files)]
    held_out = _existing(config.validation.files, "data.validation.files")
    if shared := sorted(set(files) & set(held_out)):
        raise DataError(f"data.validation.files: {shared[0]} is trained on; leave it out of data.files")
    return [FileSource(config.dataset, files), FileSource(config.dataset, held_out)]


def _existing(patterns: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the files that paths and globs name, each once, in a fixed order."""
    files: dict[str, None] = {}
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        found = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        if os.path.isdir(path):
            raise DataError(
                f"{option} = {shown(pattern)}: it is a folder; write {os.path.join(pattern, '*')!r} for its files"
            )
        if not found:
            raise DataError(f"{option} = {shown(pattern)}: there is no such file, seen from {Path.cwd()}")
        files.update(dict.fromkeys(os.path.realpath(file) for file in found))
    for file in files:
        if not os.path.getsize(file):
            raise DataError(f"{option}: {file} is empty")
    return tuple(files)


def check_column(documents: Iterable[Any], column: str, source: Source) -> None:
    """Refuse documents without that column of text; looks at the first one.

    Raises:
        DataError: There is no such column, it holds no text, or there is no document.
    """
    try:
        row = next(iter(documents), None)
    except (OSError, ValueError) as error:
        raise DataError(f"data: {source} cannot be read: {_cause(error)}") from error
    if row is None:
        raise DataError(f"data: {source} has no document")
    if column not in row:
        raise DataError(
            f"data.text_column = {shown(column)}: {source} has no such column, but {', '.join(map(repr, row))}"
        )
    has_text(row[column], column, source)


def has_text(value: Any, column: str, source: Source, index: int = 0) -> bool:
    """Return whether a row has text.

    Raises:
        DataError: It has something else.
    """
    if not isinstance(value, str | None):
        kind = type(value).__name__
        where = f"row {index + 1} of {source}" if index else str(source)
        raise DataError(f"data.text_column = {shown(column)}: it holds {kind}, not text, in {where}: {str(value)[:60]}")
    return bool(value)


def is_path(name: str) -> bool:
    """Return whether a name can be a path alone: names on the hub have one slash at most, and no dot before it."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def file_facts(paths: Iterable[Path]) -> list[list[Any]]:
    """Return name, size and time of change of files."""
    stats = [(path, path.stat()) for path in paths]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep `datasets` from showing the progress of a download where nothing is downloaded."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def _plain(files: Sequence[str]) -> Sequence[str]:
    return files[0] if len(files) == 1 else files
