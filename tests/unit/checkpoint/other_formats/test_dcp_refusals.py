"""Folders of `torch.distributed.checkpoint` that are damaged, forged, or hold what is not understood."""

import os
import pickle
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
)

from tests.unit.checkpoint.other_formats.made_dcp_folders import altered, in_parts
from torchacc.checkpoint.dcp import import_dcp
from torchacc.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def folder(tmp_path):
    """A small folder of PyTorch's."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    dcp.save({"model": model.state_dict(), "optim": {"state": {}}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def refused(folder, message):
    target = folder.with_name("refused")
    with pytest.raises(CheckpointError, match=message):
        import_dcp(folder, target)
    assert not target.exists()
    assert [path.name for path in folder.parent.iterdir()] == ["dcp"]


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/torchacc-was-here",)


def test_metadata_that_could_run_code_is_refused(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, r"\.metadata holds a posix\.system, which is not metadata")
    assert not Path("/tmp/torchacc-was-here").exists()


def test_an_entry_that_could_run_code_is_refused(tmp_path):
    state = {"state": {}, "param_groups": [{"lr": Evil(), "params": ["0.weight"]}]}
    weights = nn.Sequential(nn.Linear(2, 2)).state_dict()
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    refused(tmp_path / "dcp", r"__0_0\.distcp: optim\.param_groups.* holds a posix\.system: .*could run code")
    assert not Path("/tmp/torchacc-was-here").exists()


def test_a_missing_metadata_is_named(folder):
    (folder / ".metadata").unlink()
    refused(folder, r"dcp/\.metadata is missing: it is written last")
    with pytest.raises(CheckpointError, match="there is no such folder"):
        import_dcp(folder / "nowhere", folder.with_name("refused"))


def test_a_damaged_metadata_is_named(folder):
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-20])
    refused(folder, r"dcp/\.metadata is damaged: its pickle ends with")
    path.write_bytes(pickle.dumps({"model": 1}))
    refused(folder, r"dcp/\.metadata holds a dict, not")


def test_a_truncated_file_is_named_with_its_tensor(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, r"__0_0\.distcp is truncated: model\.\d\.(weight|bias) ends at byte")
    path.unlink()
    refused(folder, r"__0_0\.distcp, which holds model\.0\.weight, cannot be read: No such file")


def test_an_overwritten_entry_is_named_with_its_tensor(folder):
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[:64] = bytes(64)
    path.write_bytes(data)
    refused(folder, r"__0_0\.distcp: model\.\d\.(weight|bias), at byte 0, is damaged")


def test_a_file_outside_of_the_folder_is_not_read(folder):
    def point_elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../other.distcp"

    altered(folder, point_elsewhere)
    refused(folder, r"is in '\.\./other\.distcp': outside of the folder")


def test_a_compressed_entry_is_refused(folder):
    altered(
        folder, lambda metadata: [setattr(i, "transform_descriptors", ["zstd"]) for i in metadata.storage_data.values()]
    )
    refused(folder, r"__0_0\.distcp: model\.0\.weight went through zstd")


def test_a_part_of_another_save_is_noticed(folder):
    def retype(metadata):
        metadata.state_dict_metadata["model.0.weight"].properties.dtype = torch.int32

    altered(folder, retype)
    refused(
        folder, r"the part of model\.0\.weight at \(0, 0\) is not as \.metadata there has it, torch\.int32 of shape"
    )


def test_a_part_that_is_no_plain_tensor_is_refused(folder):
    with (folder / "sparse.distcp").open("wb") as file:
        torch.save(torch.eye(4, 3).to_sparse(), file)
        size = file.tell()

    def point_there(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.0.weight":
                info.relative_path, info.offset, info.length = "sparse.distcp", 0, size

    altered(folder, point_there)
    refused(folder, r"the part of model\.0\.weight at \(0, 0\) is not as \.metadata there has it")


@pytest.mark.parametrize("key", ["0.weight", 0])
def test_a_container_in_an_optimizers_state_is_refused(tmp_path, key):
    model = nn.Sequential(nn.Linear(3, 4))
    state = {key: {"exp_avg": torch.ones(4, 3), "factors": {"left": torch.ones(4, 4)}}}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [key]}]}
    dcp.save({"model": model.state_dict(), "optim": optim}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    refused(tmp_path / "dcp", r"factors\.left lies in a container in the optimizer's state of 0")


def test_a_shape_that_no_file_can_hold_takes_no_memory(folder):
    def grow(metadata):
        entry = metadata.state_dict_metadata["model.0.weight"]
        entry.size = torch.Size((1 << 40, 3))
        entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), entry.size)]

    altered(folder, grow)
    refused(folder, r"model\.0\.weight, at byte \d+, is damaged: its shape needs more bytes")


def test_parts_that_are_missing_are_noticed(folder):
    altered(folder, lambda metadata: metadata.state_dict_metadata["model.0.weight"].chunks.clear())
    refused(folder, r"the parts of model\.0\.weight, of shape \(4, 3\), have 0 elements")


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ((4, 6), [((0, 0), (2, 6)), ((1, 0), (2, 6))]),
        ((4, 6), [((0, 0), (4, 3)), ((0, 2), (4, 3))]),
        ((4, 6), [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 4)), ((1, 4), (2, 2))]),
        ((2, 2, 2), [((0, 0, 0), (2, 2, 1)), ((0, 0, 1), (1, 2, 1)), ((0, 1, 1), (2, 1, 1))]),
        ((4,), [((0,), (2,)), ((0,), (2,))]),
    ],
)
def test_parts_that_overlap_are_noticed(tmp_path, size, parts):
    assert sum(prod(sizes) for _, sizes in parts) == prod(size)
    folder = in_parts(tmp_path, torch.randn(size), parts)
    with pytest.raises(CheckpointError, match="parts of w, of shape .*, overlap"):
        folder.read("w")


def test_parts_of_any_form_that_fill_a_tensor_are_taken(tmp_path):
    for size, parts in (
        ((5, 6), [((0, 0), (2, 4)), ((0, 4), (3, 2)), ((2, 0), (3, 2)), ((3, 2), (2, 4)), ((2, 2), (1, 2))]),
        ((3, 2), [((0, 0), (2, 2)), ((2, 0), (1, 2)), ((3, 0), (0, 2)), ((3, 0), (0, 2))]),
        ((), [((), ())]),
        ((0, 4), [((0, 0), (0, 4))]),
    ):
        full = torch.randn(size)
        assert torch.equal(in_parts(tmp_path, full, parts).read("w"), full)
