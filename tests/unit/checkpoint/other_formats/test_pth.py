"""`.pth` files are read without running code or reading tensors, and made so that nobody can tell them from torch's."""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict

import pytest
import torch

from torchacc.checkpoint.other_formats.new_tensors import NewTensor
from torchacc.checkpoint.other_formats.pth import create_pth, load_pth, read_pth, seal_pth
from torchacc.checkpoint.own_format.safetensors_files import FileRegion
from torchacc.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.uint16, torch.float8_e4m3fn]


def load_bytes(region: FileRegion) -> bytes:
    return region.path.read_bytes()[region.offset : region.offset + region.nbytes]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class RunsCode:
    def __reduce__(self):
        return (os.system, ("true",))


def test_regions_are_where_the_tensors_are(tmp_path):
    path = tmp_path / "file.pth"
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors["view"] = tensors["torch.float32"].view(-1)[1:4]
    tensors["scalar"] = torch.tensor(7.0)
    tensors["parameter"] = torch.nn.Parameter(torch.ones(3))
    torch.save(tensors, path)
    for name, region in read_pth(path).items():
        assert region.dtype == tensors[name].dtype
        assert load_bytes(region) == tensor_bytes(tensors[name])


def test_everything_else_comes_as_it_was(tmp_path):
    path = tmp_path / "file.pth"
    plain = {"step": 3, "sizes": torch.Size([1, 2]), "dtype": torch.bfloat16, "pairs": [(1, None), ("a", b"\xff\x00")]}
    ordered = OrderedDict(lr=0.1)
    ordered._metadata = {"": {"version": 1}}  # as a module's state_dict() has it
    torch.save({"plain": plain, "ordered": ordered, "set": {1, 2}}, path)
    assert read_pth(path) == {"plain": plain, "ordered": ordered, "set": {1, 2}}


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"model": RunsCode()}, path)
    with pytest.raises(CheckpointError, match=r"file.pth holds a (posix|nt).system.*could run code"):
        read_pth(path)


@pytest.mark.parametrize("size", [0, 10, 1000, -200, -1])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.arange(1000)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="file.pth cannot be read"):
        read_pth(path)


def test_what_is_not_a_pth_file_is_refused(tmp_path):
    path = tmp_path / "file.pth"
    with pytest.raises(CheckpointError, match="file.pth cannot be read: No such file"):
        read_pth(path)
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="not a file of torch.save"):
        read_pth(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(CheckpointError, match="zip file, but not one that"):
        read_pth(path)


def test_a_tensor_that_is_not_contiguous_is_refused(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(2, 3).T}, path)
    with pytest.raises(CheckpointError, match=r"shape \(3, 2\) that is not contiguous"):
        read_pth(path)


def test_a_file_made_in_pieces_is_a_whole_one(tmp_path):
    path = tmp_path / "file.pth"
    large, small = NewTensor("large", torch.float32, (1000, 3)), NewTensor("small", torch.int64, ())
    unwritten, empty = NewTensor("unwritten", torch.bool, (5,)), NewTensor("empty", torch.float32, (0,))
    contents = {"a": large, "alias": large, "rest": [small, {"n": 1}, (unwritten, empty)]}
    regions = create_pth(path, contents)
    checksums = {regions[unwritten].offset: zlib.crc32(bytes(5))}
    whole = torch.randn(1000, 3)
    with path.open("r+b") as file:
        for new, tensor in ((large, whole), (small, torch.tensor(9))):
            file.seek(regions[new].offset)
            file.write(tensor_bytes(tensor))
            checksums[regions[new].offset] = zlib.crc32(tensor_bytes(tensor))
    seal_pth(path, checksums)

    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["a"], whole)
    assert loaded["a"].data_ptr() == loaded["alias"].data_ptr()
    assert loaded["rest"][0] == 9
    assert loaded["rest"][1] == {"n": 1}
    assert not loaded["rest"][2][0].any()


def test_a_file_beyond_four_gigabytes(tmp_path):
    path = tmp_path / "file.pth"
    huge, after = NewTensor("huge", torch.uint8, (5_000_000_000,)), NewTensor("after", torch.float32, (3,))
    regions = create_pth(path, {"huge": huge, "after": after})
    assert path.stat().st_blocks * 512 < 1_000_000  # sparse
    assert regions[after].offset > 5_000_000_000
    assert read_pth(path) == {"huge": regions[huge], "after": regions[after]}


def test_a_file_larger_than_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.arange(5)}, path)
    expected, own = read_pth(path), torch.UntypedStorage.from_file

    def from_file(name, shared, size):
        if not shared:  # as Linux has it
            raise RuntimeError(f"unable to mmap {size} bytes from file <{name}>: Cannot allocate memory (12)")
        return own(name, shared, size)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", staticmethod(from_file))
    assert read_pth(path) == expected
    with pytest.raises(CheckpointError, match="Cannot allocate memory"):
        load_pth(path, mmap=True)  # whose tensors may be written to


@pytest.mark.parametrize("read", [read_pth, load_pth])
@pytest.mark.parametrize("claimed", [99, 101, 10**12, -1])
def test_a_storage_of_another_size_than_its_record_is_refused(tmp_path, read, claimed):
    """PyTorch would read memory beyond the record; the checksums are as they should be."""
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(100), "b": torch.ones(100)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    pickled = records["file/data.pkl"]
    numel = pickled.index(b"Kd", pickled.index(b"X\x01\x00\x00\x000"))  # BININT1 of 100, behind the key "0"
    forged = pickle.dumps(claimed, protocol=2)[2:-1]
    records["file/data.pkl"] = pickled[:numel] + forged + pickled[numel + 2 :]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(
        CheckpointError, match=rf"the record data/0 is a FloatStorage of {claimed} elements, .* 400 bytes"
    ):
        read(path)


def test_a_flipped_bit_is_found(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.zeros(100), "b": torch.zeros(100)}, path)
    offset = read_pth(path)["b"].offset
    data = bytearray(path.read_bytes())
    data[offset + 17] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="the checksum of its record file/data/1 is wrong"):
        load_pth(path)


@pytest.mark.parametrize("read", [read_pth, load_pth])
def test_a_record_that_pytorch_would_take_for_a_folder_is_refused(tmp_path, read):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(100)}, path)
    data = bytearray(path.read_bytes())
    entry = data.index(b"file/data/0", data.index(b"PK\x01\x02"))
    data[entry - 46 + 38] ^= 0x10  # torch.load() then leaves the tensor's memory as it is
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"its record file/data/0 is said to be a folder"):
        read(path)


def test_a_tensor_in_memory_of_its_own_is_refused(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(100), "sparse": torch.eye(3).to_sparse()}, path)
    with pytest.raises(CheckpointError, match="holds a tensor that is not a plain one of the CPU"):
        read_pth(path)
    torch.save({"a": torch.ones(100), "conj": torch.ones(3, dtype=torch.complex64).conj()}, path)
    with pytest.raises(CheckpointError, match="holds a tensor that is not a plain one of the CPU"):
        read_pth(path)


@pytest.mark.parametrize("read", [read_pth, load_pth])
@pytest.mark.parametrize("wide", [False, True], ids=["32-bits", "64-bits"])
def test_a_second_directory_is_refused(tmp_path, read, wide):
    """Python reads the directory at the end, PyTorch the one whose offset is noted: the checksums are of other data."""
    files = []
    for value in (666.0, 0.0):
        buffer = io.BytesIO()
        torch.save({"a": torch.full((4,), value)}, buffer)
        files.append(buffer.getvalue())
    (other, *_, start_of_other), (shown, count, size, start) = map(without_end, files)
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, count, count, size, start_of_other, 0)
    if wide:
        place = len(other) + len(shown)
        record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, count, count, size, start_of_other)
        end = record + struct.pack("<4sLQL", b"PK\x06\x07", 0, place, 1) + end
    path = tmp_path / "file.pth"
    path.write_bytes(other + shown + end)
    if not wide:  # Python takes the other one's offset for a prefix
        assert torch.load(path, weights_only=True)["a"][0] == 666
    with pytest.raises(CheckpointError, match="its directory is not where it says|holds no readable"):
        read(path)
    path.write_bytes(files[1])
    read(path)


def without_end(data: bytes) -> tuple[bytes, int, int, int]:
    """Return a zip file without the records behind its directory, and the directory's entries, size and offset."""
    count, size, start = struct.unpack("<H2L", data[-12:-2])
    return data[: start + size], count, size, start


@pytest.mark.parametrize("read", [read_pth, load_pth])
@pytest.mark.parametrize("names", [("DATA.PKL", "data.pkl"), ("data.pkl", "DATA.PKL")])
def test_records_whose_names_differ_by_capitals_are_refused(tmp_path, read, names):
    """PyTorch takes one for the other, of which the checksum is not compared."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(4)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        pickled = archive.read("archive/data.pkl")
    path = tmp_path / "file.pth"
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, content in [*((name, pickled) for name in names), ("data/0", bytes(16)), ("byteorder", b"little")]:
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    with pytest.raises(CheckpointError, match="it has two records of one name"):
        read(path)


@pytest.mark.parametrize("hide", [lambda t: {t}, lambda t: {(1, t): 2}, lambda t: [({t},)]])
def test_tensors_that_a_conversion_would_not_find_are_refused(tmp_path, hide):
    tensor = torch.ones(3)
    torch.save({"model": tensor, "other": hide(tensor)}, tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match="has a tensor in a set, or in a key of a dict: save it in a list"):
        read_pth(tmp_path / "file.pth")
