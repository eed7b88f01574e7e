"""Where documents come from: the embedded corpus, files, or a dataset of the hub; all read by `datasets`."""

import glob
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchacc.errors import DataError
from torchacc.train.corpus import stdlib_documents, stdlib_files

if TYPE_CHECKING:
    import datasets

    from torchacc.train.config import TextConfig

FILE_KINDS = ("text", "json", "parquet")


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
            return datasets.load_dataset(self.kind, data_files=list(self.files), split="train", **options)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise DataError(f"data.files: {self} cannot be read as {self.kind}: {_cause(error)}") from error


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
            return datasets.load_dataset(self.dataset, self.name, split=self.split, streaming=streaming)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise DataError(f"data.dataset: {self} cannot be read: {_cause(error)}") from error


def find_sources(config: "TextConfig") -> tuple[Source, Source | None]:
    """Return the source to learn from, and the one to validate on where the configuration names one.

    Raises:
        DataError: Options contradict each other, a file is missing or empty.
    """
    if config.streaming and config.tokenizer is None:
        raise DataError("data.tokenizer: text that is streamed is not there to train one on; name a folder or a hub id")
    if config.name is not None and config.dataset in ("stdlib", *FILE_KINDS):
        raise DataError(f"data.name: {config.name!r} is for a dataset of the hub; leave it out for {config.dataset!r}")
    if config.dataset in FILE_KINDS:
        return _file_sources(config)
    if config.files is not None or (config.validation is not None and config.validation.files is not None):
        raise DataError(
            f"data.files: dataset {config.dataset!r} has files of its own; write dataset: "
            f"{', '.join(FILE_KINDS[:-1])} or {FILE_KINDS[-1]} to read yours"
        )
    split = None if config.validation is None else config.validation.split
    if config.dataset == "stdlib":
        if split is not None or config.split != "train":
            raise DataError(
                "data.split: stdlib has the split 'train' alone; data.validation_share holds a part of it out"
            )
        return StdlibSource(config.text_column), None
    if split == config.split:
        raise DataError(f"data.validation: split {split!r} is the one to train on; name another, or leave it out")
    validation = None if split is None else HubSource(config.dataset, config.name, split)
    return HubSource(config.dataset, config.name, config.split), validation


def _file_sources(config: "TextConfig") -> tuple[Source, Source | None]:
    if config.files is None:
        raise DataError(f"data.files: dataset {config.dataset!r} needs them: a path, a glob, or a list of them")
    if config.split != "train" or (config.validation is not None and config.validation.split is not None):
        raise DataError("data.split: files have no splits; name those to validate on as data.validation.files")
    files = _existing(config.files, "data.files")
    if config.validation is None or config.validation.files is None:
        return FileSource(config.dataset, files), None
    held_out = _existing(config.validation.files, "data.validation.files")
    if shared := sorted(set(files) & set(held_out)):
        raise DataError(f"data.validation.files: {shared[0]} would be trained on too; leave it out of data.files")
    return FileSource(config.dataset, files), FileSource(config.dataset, held_out)


def _existing(patterns: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the files that paths and globs name, each once, in a fixed order."""
    files: dict[str, None] = {}
    for pattern in patterns:
        found = (
            [pattern] if Path(pattern).is_file() else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        )
        if not found:
            folder = Path(pattern).is_dir()
            hint = f"it is a folder: write {pattern}/* for its files" if folder else f"seen from {Path.cwd()}"
            raise DataError(f"{option}: there is no file {pattern!r} ({hint})")
        files.update(dict.fromkeys(str(Path(path).resolve()) for path in found))
    for path in files:
        if not os.path.getsize(path):
            raise DataError(f"{option}: {path} is empty")
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
        raise DataError(f"data.text_column: {source} has no column {column!r}, but {', '.join(map(repr, row))}")
    if not isinstance(row[column], str | None):
        kind = type(row[column]).__name__
        raise DataError(f"data.text_column: {column!r} of {source} holds {kind}, not text: {str(row[column])[:60]}")


def file_facts(paths: Iterable[Path]) -> list[list[Any]]:
    """Return name, size and time of change of files."""
    stats = [(path, path.stat()) for path in paths]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]
