"""Folders of `torch.distributed.checkpoint` as PyTorch would not write them."""

import pickle

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchacc.checkpoint.other_formats.dcp_files import DcpFolder


def write(path, state, planner=None):
    dcp.save(state, checkpoint_id=path, no_dist=True, planner=planner)


def altered(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_parts(path, full, parts):
    """Return a folder with a tensor that lies in parts, each of which is what the full one has there."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in parts]
    found = Metadata({"w": TensorStorageMetadata(TensorProperties(full.dtype), full.shape, chunks)}, storage_data={})
    with (path / "data.distcp").open("wb") as file:
        for offsets, sizes in parts:
            start, where = file.tell(), tuple(slice(b, b + n) for b, n in zip(offsets, sizes, strict=True))
            torch.save(full[where].clone(), file)
            found.storage_data[MetadataIndex("w", offsets)] = _StorageInfo("data.distcp", start, file.tell() - start)
    (path / ".metadata").write_bytes(pickle.dumps(found))
    return DcpFolder(path)
