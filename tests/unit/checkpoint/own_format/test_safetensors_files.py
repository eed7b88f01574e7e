"""Safetensors files are laid out as the safetensors library reads them, and read back only if they make sense."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchacc.checkpoint.own_format.safetensors_files import (
    plan_safetensors,
    preallocate,
    read_regions,
    safetensors_index,
)
from torchacc.errors import CheckpointError

TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "bf16": torch.arange(5, dtype=torch.bfloat16),
    "float": torch.randn(7, 3),
    "scalar": torch.tensor(4),
    "none": torch.empty(0, 3),
}


def write(folder, tensors, max_shard_size=None):
    """Write tensors with our layout, and return the paths."""
    layouts = plan_safetensors({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, "model", max_shard_size)
    for name, layout in layouts.items():
        preallocate(folder / name, layout.header, layout.nbytes)
        with (folder / name).open("r+b") as file:
            for key, region in layout.regions.items():
                assert region.offset % region.dtype.itemsize == 0
                file.seek(region.offset)
                file.write(bytes(tensors[key].reshape(-1).view(torch.uint8).numpy()))
    (folder / "model.safetensors.index.json").write_text(safetensors_index(layouts))
    return [folder / name for name in layouts]


def test_the_library_reads_what_we_lay_out(tmp_path):
    (path,) = write(tmp_path, TENSORS)
    assert path.name == "model.safetensors"
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_library_writes(tmp_path):
    save_file(TENSORS, tmp_path / "file.safetensors")
    regions = read_regions(tmp_path / "file.safetensors")
    data = (tmp_path / "file.safetensors").read_bytes()
    for name, tensor in TENSORS.items():
        region = regions[name]
        assert (region.dtype, region.shape) == (tensor.dtype, tuple(tensor.shape))
        assert data[region.offset : region.offset + region.nbytes] == bytes(
            tensor.reshape(-1).view(torch.uint8).numpy()
        )


def test_split_into_files_of_a_size(tmp_path):
    paths = write(tmp_path, {f"t{i}": torch.full((100,), float(i)) for i in range(5)}, max_shard_size=1000)
    assert [path.name for path in paths] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(path.stat().st_size < 1500 for path in paths)
    regions = read_regions(tmp_path / "model.safetensors.index.json")
    assert regions.keys() == {f"t{i}" for i in range(5)}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}


def test_a_tensor_larger_than_a_file_has_one_of_its_own():
    tensors = {name: (torch.uint8, (size,)) for name, size in [("a", 10), ("b", 1000), ("c", 10)]}
    layouts = plan_safetensors(tensors, "model", 100)
    assert [list(layout.regions) for layout in layouts.values()] == [["a"], ["b"], ["c"]]


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(CheckpointError, match="x is torch.complex128, which a safetensors file cannot hold"):
        plan_safetensors({"x": (torch.complex128, (1,))}, "model")


@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="file.safetensors is truncated"):
        read_regions(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "X", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 16]},
        {"dtype": "F32"},
        None,
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="file.safetensors is damaged"):
        read_regions(path)


@pytest.mark.parametrize(
    ("offsets", "size", "reason"),
    [
        ([(0, 16), (0, 16)], 16, "the tensor b overlaps another"),
        ([(0, 16), (8, 24)], 24, "the tensor b overlaps another"),
        ([(0, 16), (24, 40)], 40, "the tensor b has a gap before it"),
        ([(8, 24), (24, 40)], 40, "the tensor a has a gap before it"),
        ([(16, 32), (0, 16)], 33, "1 bytes follow the last tensor"),
    ],
)
def test_every_byte_is_of_one_tensor(tmp_path, offsets, size, reason):
    entries = [{"dtype": "F32", "shape": [4], "data_offsets": list(own)} for own in offsets]
    header = json.dumps(dict(zip("ab", entries, strict=True))).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(CheckpointError, match=f"file.safetensors is damaged: {reason}"):
        read_regions(path)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    entry = json.dumps({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]})
    header = f'{{"a": {entry}, "a": {entry}}}'.encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="file.safetensors is damaged, .*: its header makes no sense"):
        read_regions(path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "file.safetensors", "a": "other.safetensors"}}')
    with pytest.raises(CheckpointError, match="is damaged, or not an index"):
        read_regions(index)


@pytest.mark.parametrize("elsewhere", ["../a.safetensors", "/a.safetensors", "b/a.safetensors", "..", "", 3])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, elsewhere):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": elsewhere}}))
    with pytest.raises(CheckpointError, match="a is in .*: only files in its own folder"):
        read_regions(path)


def test_an_index_of_what_is_not_there_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match="a.safetensors cannot be read: No such file"):
        read_regions(path)
    save_file({"b": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="says that a is in a.safetensors, where it is not"):
        read_regions(path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="is damaged, or not an index"):
        read_regions(path)
