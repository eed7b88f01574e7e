"""Where documents come from: Python's standard library, files, or a dataset of the hub; all are read by `datasets`."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchacc import env
from torchacc.errors import DataError, shown
from torchacc.train.corpus import stdlib_files
from torchacc.train.hub import is_path
from torchacc.train.tokens import load_tokenizer

if TYPE_CHECKING:
    import datasets

    from torchacc.train.config import TextConfig

FILE_KINDS = ("text", "json", "parquet")
"""Values of `data.dataset` that mean files of one's own."""
NO_DATASETS = ("stdlib", *FILE_KINDS)
"""Values of `data.dataset` that are not a dataset's name."""
_STDLIB_COLUMN = "text"


@dataclass(frozen=True)
class DocumentSource:
    """What `datasets` loads documents from."""

    name: str
    """What messages call it."""
    column: str
    """The column that holds the text."""
    arguments: Mapping[str, Any]
    """What `datasets.load_dataset` is passed."""
    files: tuple[str, ...] = ()
    """The files; none for a dataset."""

    @override
    def __str__(self) -> str:
        return self.name

    def load(self, cache_dir: Path) -> "datasets.Dataset":
        """Read all documents.

        Args:
            cache_dir: Where `datasets` keeps files as Arrow; a dataset is kept where it keeps all datasets.

        Raises:
            DataError: They cannot be read, or have no such column of text.
        """
        options: dict[str, Any] = {}
        if self.files:
            from datasets.fingerprint import Hasher

            # `datasets` itself tells files apart by name and time of change alone.
            options = {"name": Hasher.hash(self.state_of_files()), "cache_dir": str(cache_dir)}
        documents = self._load(streaming=False, **options)
        self.check_column(documents)
        return documents.select_columns([self.column])

    def stream(self) -> "datasets.IterableDataset":
        """Read documents one by one.

        Raises:
            DataError: They cannot be read.
        """
        return self._load(streaming=True)

    def check_column(self, documents: Any) -> None:
        """Refuse documents without the column of text; looks at the first one.

        Raises:
            DataError: There is no such column, it holds no text, or there is no document.
        """
        try:
            row = next(iter(documents), None)
        except (OSError, ValueError) as error:
            raise DataError(f"data: {self} cannot be read: {_cause(error)}") from error
        if row is None:
            raise DataError(f"data: {self} has no document")
        if self.column not in row:
            raise DataError(
                f"data.text_column = {shown(self.column)}: {self} has no such column, but {', '.join(map(repr, row))}"
            )
        self.has_text(row[self.column], 0)

    def has_text(self, value: Any, index: int) -> bool:
        """Return whether a row's value is a text that is not empty.

        Args:
            value: What the row has in the column of text.
            index: The row, counted from 0.

        Raises:
            DataError: It is something else.
        """
        if not isinstance(value, str | None):
            where = f"row {index + 1} of {self}" if index else str(self)
            raise DataError(
                f"data.text_column = {shown(self.column)}: it holds {type(value).__name__}, not text, in {where}: "
                f"{str(value)[:60]}"
            )
        return bool(value)

    def state_of_files(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of the files."""
        return [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in self.files]

    def _load(self, **options: Any) -> Any:
        import datasets

        is_local = self.files or Path(self.arguments["path"]).is_dir()
        try:
            with _no_progress_bars(when=bool(is_local)):
                return datasets.load_dataset(**self.arguments, **options)
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise DataError(f"data: {self} cannot be read: {_cause(error)}") from error


def check_text(config: "TextConfig") -> None:
    """Refuse what cannot be loaded, before anything is built; reads the beginning of files, and nothing of the hub.

    Raises:
        DataError: Options contradict each other; a file is missing, empty, or without such a column of text; a folder
            holds no tokenizer; the folder for what is tokenised cannot be one.
    """
    for source in find_sources(config):
        if source.files and config.dataset != "stdlib":
            source.check_column(source.stream())
    if config.tokenizer is not None and is_path(config.tokenizer):
        load_tokenizer(config.tokenizer)
    if not config.streaming:
        check_cache(cache_folder(config))


def cache_folder(config: "TextConfig") -> Path:
    """Return the folder for what is tokenised."""
    return Path(config.cache_dir or Path(env.get("XDG_CACHE_HOME") or "~/.cache", "torchacc", "text")).expanduser()


def check_cache(folder: Path) -> None:
    """Refuse a folder for what is tokenised that is none, or cannot be made or written to.

    Raises:
        DataError: It is so.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DataError(f"data.cache_dir: {folder} cannot be made, as {existing} is a file; name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(
            f"data.cache_dir: {folder} cannot be written to, as {existing} is read-only; name another folder"
        )


def find_sources(config: "TextConfig") -> list[DocumentSource]:
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
                f"data.{option} = {shown(files[0] if len(files) == 1 else files)}: files go with dataset: "
                f"{', '.join(FILE_KINDS)}, not {shown(config.dataset)}"
            )
    return _stdlib_sources(config) if config.dataset == "stdlib" else _dataset_sources(config)


def _stdlib_sources(config: "TextConfig") -> list[DocumentSource]:
    if config.name is not None:
        raise DataError(f"data.name = {shown(config.name)}: stdlib has no configurations; leave it out")
    if config.split != "train" or config.validation is not None:
        raise DataError("data.split: stdlib has the split 'train' alone; data.validation_share holds a part of it out")
    files = tuple(map(str, stdlib_files()))
    return [_of_files("stdlib", "text", _STDLIB_COLUMN, files, encoding_errors="replace")]


def _dataset_sources(config: "TextConfig") -> list[DocumentSource]:
    splits = [config.split] if config.validation is None else [config.split, config.validation.split]
    if len(set(splits)) < len(splits):
        raise DataError(
            f"data.validation.split = {shown(config.split)}: it is trained on; name another, or leave it out"
        )
    path = str(Path(config.dataset).expanduser()) if is_path(config.dataset) else config.dataset
    of = f"{path} ({config.name})" if config.name else path
    return [
        DocumentSource(
            f"split {split!r} of {of}", config.text_column, {"path": path, "name": config.name, "split": split}
        )
        for split in splits
    ]


def _file_sources(config: "TextConfig") -> list[DocumentSource]:
    if config.files is None:
        raise DataError(f"data.dataset = {shown(config.dataset)}: it reads files; name them in data.files")
    if config.name is not None:
        raise DataError(f"data.name = {shown(config.name)}: files have no configurations; leave it out")
    if config.split != "train" or (config.validation is not None and config.validation.split is not None):
        raise DataError("data.split: files have no splits; name those to validate on in data.validation.files")
    found = [_existing(config.files, "data.files")]
    if config.validation is not None and config.validation.files is not None:
        found.append(_existing(config.validation.files, "data.validation.files"))
        if shared := sorted(set(found[0]) & set(found[1])):
            raise DataError(f"data.validation.files: {shared[0]} is trained on; leave it out of data.files")
    return [
        _of_files(
            files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else ""),
            config.dataset,
            config.text_column,
            files,
        )
        for files in found
    ]


def _of_files(name: str, kind: str, column: str, files: tuple[str, ...], **options: Any) -> DocumentSource:
    """Return a source of files. A text file is one document, a row of any other kind is one."""
    if kind == "text":
        options["sample_by"] = "document"
    options |= {"path": kind, "split": "train", "data_files": [glob.escape(file) for file in files]}
    return DocumentSource(name, column, options, files)


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


@contextmanager
def _no_progress_bars(*, when: bool) -> Iterator[None]:
    """Keep `datasets` from showing the progress of a download where nothing is downloaded."""
    import datasets

    if not when or datasets.are_progress_bars_disabled():
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
