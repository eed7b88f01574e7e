"""A checkpoint's manifest, and the names under which its folder lies while it is written, replaced or complete."""

import glob
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from torchacc.checkpoint.own_format.regular_files import read_regular
from torchacc.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = "torchacc-checkpoint"
_VERSION = 1
_MAX_BYTES = 1 << 29
"""Of a manifest: ten times what the largest models' need."""
MAX_SEGMENT_BYTES = 1 << 27
"""What a checksum covers at most: a reader takes as much memory. A safetensors file's header may have 100 MB."""
_DIGEST = re.compile(r"[0-9a-f]{16}")


class Segment(NamedTuple):
    """Consecutive bytes of a file that one checksum covers."""

    start: int
    size: int
    digest: str


hasher = xxhash.xxh3_64
"""What takes the checksum of bytes."""


def digest(data: Any) -> str:
    """Return the checksum of bytes."""
    return hasher(data).hexdigest()


def render_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest, which has a checksum of its own."""
    compact = json.dumps({"format": _FORMAT, "version": _VERSION, **content}, separators=(",", ":"))
    return _seal(compact.encode()).decode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a folder's manifest.

    Raises:
        CheckpointError: It is missing, altered, or of a later version.
    """
    file = path / MANIFEST
    try:
        text = read_regular(file, _MAX_BYTES)
        content = json.loads(text)["content"]
        intact = text == _seal(text[_SEAL_BYTES:-2])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{file} is not as it was written: the checkpoint is altered or torn")
    try:
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise CheckpointError(
                f"{file} is of {content['format']} {content['version']}, and this version of torchacc reads "
                f"{_FORMAT} {_VERSION}"
            )
        if type(content["token"]) is not str or type(content["files"]) is not dict:
            raise ValueError
        for name, entry in content["files"].items():
            if Path(name).name != name or name in ("", ".", ".."):
                raise CheckpointError(f"{file} names {name!r}: only files in its own folder are read")
            sizes, digests = zip(*entry["segments"], strict=True) if entry["segments"] else ((), ())
            if {int} != {type(entry["size"]), *map(type, sizes)}:
                raise ValueError(name)
            if min(entry["size"], *sizes, 0) < 0 or max([0, *sizes]) > MAX_SEGMENT_BYTES:
                raise ValueError(name)
            if not all(type(digest) is str and _DIGEST.fullmatch(digest) for digest in digests):
                raise ValueError(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} makes no sense: torchacc has not written it") from None
    return dict(content)


def locate(path: Path) -> Path:
    """Return where the checkpoint of a path lies: there, or beside it where replacing it was cut short.

    Raises:
        CheckpointError: There is none.
    """
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file: name the folder that it is in")
    for other in leftovers(path, "incomplete", "replaced"):
        if (other / MANIFEST).exists():
            return other
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise CheckpointError(f"there is no checkpoint {path}{where}{hint_of_others(path)}")


def hint_of_others(path: Path) -> str:
    """Return a hint for an error that names complete checkpoints in the same folder; empty where there are none."""
    folders = {file.parent for file in path.parent.glob(f"[!.]*/{MANIFEST}")} - {path}
    names = sorted(folder.name for folder in folders if _is_whole(folder))
    return f"; in the same folder there is {', '.join(names[-3:])}" if names else ""


def _is_whole(folder: Path) -> bool:
    """Return whether all files are there, with the bytes that were written. Their contents are not read."""
    try:
        files = read_manifest(folder)["files"]
        return all((folder / name).stat().st_size == entry["size"] for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def _seal(content: bytes) -> bytes:
    return b'{"xxh3":"%s","content":%s}\n' % (digest(content).encode(), content)


_SEAL_BYTES = len(_seal(b"")) - 2
"""What lies before the content; two bytes follow it."""


def aside(path: Path, token: str) -> Path:
    """Return where a checkpoint lies while it is being replaced."""
    return path.parent / f".{path.name}.{token}.replaced"


def leftovers(path: Path, *kinds: str) -> list[Path]:
    """Return the folders of interrupted saves of a path, those of the first kind first."""
    name = glob.escape(path.name)
    found = [other for kind in kinds for other in path.parent.glob(f".{name}.*.{kind}")]
    return [other for other in found if other.name.count(".") == path.name.count(".") + 3]


def is_incomplete(path: Path) -> bool:
    """Return whether a folder has the name of one that is still being written."""
    return path.name.startswith(".") and path.name.endswith(".incomplete")


def token_of(path: Path) -> str | None:
    """Return which save a checkpoint is of; None where there is none that is complete."""
    try:
        return str(read_manifest(path)["token"])
    except CheckpointError:
        return None
