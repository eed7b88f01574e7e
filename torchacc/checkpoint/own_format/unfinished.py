"""Hidden names under which files are made before they take their own, and what killed processes leave under them."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torchacc.checkpoint.own_format.locks import FolderLock, is_abandoned, new_token
from torchacc.checkpoint.own_format.regular_files import sync_folder
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_UNFINISHED = re.compile(r"\..+\.([0-9a-f]{8}-\d+-[0-9a-f]{8})\.incomplete")


@contextmanager
def unfinished_paths(targets: Sequence[Path], *contents: str) -> Iterator[list[Path]]:
    """Yield names to write under, hidden and beside the final ones, which what was written takes in the end.

    All of it reaches the disk before any of it takes its name; where anything fails before, nothing is left. Of several
    files what has their names is removed first: a process that is killed meanwhile leaves no mixture of old and new.

    Args:
        targets: Files that are to be made, or folders.
        contents: Names of the files in the folders.

    Raises:
        CheckpointError: It cannot be written.
    """
    names = [unfinished(target) for target in targets]
    folders = {target.parent for target in targets}
    made = {each for folder in folders for each in (folder, *folder.parents) if not each.exists()}
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            clear_unfinished(folder, *contents)
        yield names
        for name in names:
            sync_folder(name)
        with ExitStack() as held:
            if len(targets) > 1:  # a mixture with old ones, or with another process's, would be a set
                for folder in sorted(folders):
                    lock = FolderLock(folder)
                    lock.take()
                    held.callback(lock.release)
                for target in targets:
                    target.unlink(missing_ok=True)
            for name, target in zip(names, targets, strict=True):
                os.replace(name, target)
        for folder in folders:
            sync_folder(folder)
    except OSError as error:
        final = dict(zip(map(str, names), targets, strict=True)).get(str(error.filename), error.filename or targets[0])
        raise unwritten(final, error) from None
    finally:
        for name in names:
            _remove(name, *contents)
        for folder in sorted(made, reverse=True):  # those in others first; what has anything in it stays
            with suppress(OSError):
                folder.rmdir()


def unwritten(path: Path | str, error: OSError, where: str = "") -> CheckpointError:
    """Return the error of a file that the system does not write."""
    return CheckpointError(f"{path} cannot be written: {error.strerror or error}{where}; nothing is left of it")


def unfinished(path: Path) -> Path:
    """Return a hidden name beside a path, under which this process may make what is to lie there."""
    return path.with_name(f".{path.name}.{new_token()}.incomplete")


def clear_unfinished(folder: Path, *contents: str) -> None:
    """Remove from a folder what killed processes of this machine have left under names of `unfinished()`. Never raises.

    Args:
        folder: Where to look.
        contents: Names of the files to remove from those that are folders; others stay, and so does their folder.
    """
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = _UNFINISHED.fullmatch(path.name)
            if found is None:
                continue
            if not is_abandoned(found[1]):
                _log.info("%s is of a process that runs, or ran on another machine: remove it if that has ended", path)
                continue
            _remove(path, *contents)


def _remove(path: Path, *contents: str) -> None:
    """Remove what lies under a name of `unfinished()`: a file, or a folder of files of these names. Never raises."""
    if not path.is_dir() or path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return
    for name in contents:
        with suppress(OSError):
            (path / name).unlink()
    with suppress(OSError):
        path.rmdir()
