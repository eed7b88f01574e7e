"""Tell which format the checkpoint in a folder has."""

from pathlib import Path
from typing import Literal

from torchacc.checkpoint.other_formats.dcp_files import METADATA
from torchacc.checkpoint.own_format.manifest import MANIFEST
from torchacc.errors import CheckpointError

CheckpointFormat = Literal["rank-files", "torchacc", "hf", "dcp"]
"""The checkpoints that the commands tell apart:

- `rank-files`: a file of each rank, as `torchacc.save()`, TorchAcc and torch_xla write them.
- `torchacc`: what `torchacc.checkpoint.save()` writes, a Hugging Face folder with a manifest.
- `hf`: any Hugging Face folder with safetensors.
- `dcp`: a folder of `torch.distributed.checkpoint`.
"""

_SIGNS: dict[CheckpointFormat, tuple[str, ...]] = {
    "dcp": (METADATA, "*.distcp"),
    "torchacc": (MANIFEST,),
    "hf": ("model*.safetensors",),
    "rank-files": ("*rank-*-of-*.pth",),
}


_LOADS_AT_ANY_SIZE = (
    "torchacc.checkpoint.load() takes it at any number of ranks, from_pretrained() opens it, and `torchacc convert "
    "{folder} NEW --to dcp` writes it in another format"
)
_IN_PLACE_OF_RANK_FILES: dict[CheckpointFormat, str] = {
    "torchacc": _LOADS_AT_ANY_SIZE,
    "hf": _LOADS_AT_ANY_SIZE,
    "dcp": "`torchacc convert {folder} NEW --to torchacc` puts it together",
}


def check_rank_files(folder: Path) -> None:
    """Refuse a folder whose checkpoint is not of rank files, and say what to do with it.

    Raises:
        CheckpointError: It is not.
    """
    format = format_of(folder)
    if format != "rank-files":
        instead = _IN_PLACE_OF_RANK_FILES[format].format(folder=folder)
        raise CheckpointError(f"{folder} is a {format} checkpoint, and no rank files: {instead}")


def format_of(folder: Path) -> CheckpointFormat:
    """Return the format of the checkpoint that a folder holds.

    Raises:
        CheckpointError: It holds none, or more than one.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name the one that the checkpoint's files are in")
    found = [format for format, patterns in _SIGNS.items() if any(any(folder.glob(pattern)) for pattern in patterns)]
    if "torchacc" in found and "hf" in found:
        found.remove("hf")
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{folder} holds checkpoints of several formats, {' and '.join(found)}: keep one of them there"
        )
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and (path / MANIFEST).exists())
    hint = f"; {folder / inside[-1]} is a checkpoint" if inside else ""
    expected = ", ".join(pattern for patterns in _SIGNS.values() for pattern in patterns)
    raise CheckpointError(f"{folder} holds no checkpoint, as none of {expected} is there{hint}")
