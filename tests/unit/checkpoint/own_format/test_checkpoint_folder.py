"""A checkpoint's folder: written by several at once, complete or not there, read only as it was written."""

import json
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchacc.checkpoint.own_format import folder_writer
from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder
from torchacc.checkpoint.own_format.folder_writer import FolderWriter
from torchacc.checkpoint.own_format.manifest import locate, read_manifest, render_manifest
from torchacc.checkpoint.own_format.removal import recover_interrupted
from torchacc.checkpoint.own_format.safetensors_files import as_bytes, plan_safetensors, read_regions, safetensors_index
from torchacc.errors import CheckpointError

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5), "empty": torch.ones(0, 3)}


def write(
    final: Path,
    *,
    num_ranks: int = 2,
    fail: int | None = None,
    token: str = "t1",
    max_shard_size: int | None = None,
) -> list[BaseException | None]:
    """Write `TENSORS` by several ranks, a thread each; one may fail. Return what each raised."""
    described = {name: (t.dtype, tuple(t.shape)) for name, t in TENSORS.items()}
    layouts = plan_safetensors(described, "model", max_shard_size)
    regions = {name: region for layout in layouts.values() for name, region in layout.regions.items()}
    writers = [FolderWriter(final, token, rank, num_ranks) for rank in range(num_ranks)]
    others = ("state.json", "model.safetensors.index.json")
    writers[0].prepare({name: (layout.header, layout.nbytes) for name, layout in layouts.items()}, others)
    raised: list[BaseException | None] = [None] * num_ranks
    joined = threading.Barrier(num_ranks)

    def part(rank: int) -> None:
        writer = writers[rank]
        writer.begin()
        joined.wait()
        try:
            if rank == fail:
                raise OSError(28, "No space left on device")
            for name, region in regions.items():
                flat = TENSORS[name].flatten()
                start, stop = flat.numel() * rank // num_ranks, flat.numel() * (rank + 1) // num_ranks
                writer.write(region, start, flat[start:stop])
            if rank == 0:
                writer.write_file("state.json", b'{"x": 1}')
                if len(layouts) > 1:
                    writer.write_file("model.safetensors.index.json", safetensors_index(layouts).encode())
            writer.finish()
        except (OSError, CheckpointError) as error:
            writer.fail(error)
            raised[rank] = error

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def check(path: Path) -> None:
    with CheckpointFolder(path) as folder:
        folder.verify()
        for name, expected in TENSORS.items():
            assert torch.equal(folder.model[name].read(), expected)
    found = load_file(path / "model.safetensors")
    assert all(torch.equal(found[name], expected) for name, expected in TENSORS.items())


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_what_several_ranks_write_is_one_checkpoint(tmp_path, num_ranks):
    assert write(tmp_path / "c", num_ranks=num_ranks) == [None] * num_ranks
    check(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_runs_that_were_not_written_as_such_are_verified_too(tmp_path):
    write(tmp_path / "c", num_ranks=5)
    with CheckpointFolder(tmp_path / "c") as folder:
        for start, stop in ((0, 1), (3, 11), (5, 5), (11, 12)):
            run = torch.zeros(stop - start, dtype=TENSORS["a"].dtype)
            folder.model["a"].fill(run, start)
            assert torch.equal(run, TENSORS["a"].flatten()[start:stop])


def test_a_stored_tensor_fills_memory_of_any_dtype_and_is_verified(tmp_path):
    write(tmp_path / "c", num_ranks=2)
    run, cast = torch.zeros(7, dtype=torch.int64), torch.zeros(2, dtype=torch.float16)
    with CheckpointFolder(tmp_path / "c") as folder:
        stored = folder.model
        stored["b"].fill(run[2:4], 3)
        stored["a"].fill(cast, 10)
        assert run.tolist() == [0, 0, 3, 4, 0, 0, 0]
        assert cast.tolist() == [10, 11]
        assert all(torch.equal(stored[name].read(), tensor) for name, tensor in TENSORS.items())
        path = tmp_path / "c" / "model.safetensors"
        altered = bytearray(path.read_bytes())
        altered[read_regions(path)["a"].offset + 1] ^= 1
        path.write_bytes(altered)
        with pytest.raises(CheckpointError, match="model.safetensors is not as it was written: a, within the bytes"):
            stored["a"].read()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j]).imag,
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(True),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.arange(4).to(torch.bfloat16)[2:],
        torch.empty(0, 3),
        torch.ones(2, requires_grad=True),
    ],
)
def test_the_bytes_of_any_tensor(tensor):
    assert bytes(as_bytes(tensor)) == bytes(
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .untyped_storage()
        .tolist()
    )


@pytest.mark.parametrize("fail", [0, 1])
def test_a_rank_that_fails_fails_the_save_and_leaves_what_was_there(tmp_path, fail):
    write(tmp_path / "c")
    before = (tmp_path / "c" / "manifest.json").read_bytes()
    raised = write(tmp_path / "c", fail=fail, token="t2")
    assert all(raised)
    assert "No space left" in str(raised[1 - fail])
    assert (tmp_path / "c" / "manifest.json").read_bytes() == before
    check(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_replacement_that_was_cut_short_is_found(tmp_path):
    write(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / ".c.t9.replaced")
    assert locate(tmp_path / "c").name == ".c.t9.replaced"
    recover_interrupted(tmp_path / "c")
    check(tmp_path / "c")


def test_leftovers_of_another_checkpoint_are_left_alone(tmp_path):
    write(tmp_path / "c")
    other = tmp_path / ".c.old.t1.incomplete"  # of "c.old"
    other.mkdir()
    recover_interrupted(tmp_path / "c")
    assert other.is_dir()


def test_every_byte_counts(tmp_path):
    """Any altered byte of any file is noticed by reading everything, or already by opening."""
    write(tmp_path / "c", num_ranks=3)
    draw = random.Random(0)
    for path in sorted((tmp_path / "c").iterdir()):
        intact = path.read_bytes()
        for offset in draw.sample(range(len(intact)), min(40, len(intact))):
            altered = bytearray(intact)
            altered[offset] ^= 1 << draw.randrange(8)
            path.write_bytes(altered)
            with pytest.raises(CheckpointError), CheckpointFolder(tmp_path / "c") as folder:
                folder.verify()
        path.write_bytes(intact)
    check(tmp_path / "c")


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_a_file_that_is_not_whole_is_named(tmp_path, name, how):
    write(tmp_path / "c")
    path = tmp_path / "c" / name
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if how == "truncated" else path.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=name), CheckpointFolder(tmp_path / "c") as folder:
        folder.verify()


def test_files_of_two_saves_do_not_mix(tmp_path):
    write(tmp_path / "c")
    write(tmp_path / "d", num_ranks=1)
    manifest = read_manifest(tmp_path / "d")
    (tmp_path / "c" / "manifest.json").write_text(render_manifest({"token": "x", "files": manifest["files"]}))
    save_file({name: t + 1 for name, t in TENSORS.items()}, tmp_path / "c" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="model.safetensors"), CheckpointFolder(tmp_path / "c") as folder:
        folder.verify()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/file", ".."])
def test_only_files_of_the_folder_are_read(tmp_path, name):
    write(tmp_path / "c")
    content = read_manifest(tmp_path / "c")
    files = {**content["files"], name: {"size": 0, "segments": []}}
    (tmp_path / "c" / "manifest.json").write_text(render_manifest({"token": "t", "files": files}))
    with pytest.raises(CheckpointError, match="only files in its own folder"):
        CheckpointFolder(tmp_path / "c")


def test_an_empty_file_is_read(tmp_path):
    write(tmp_path / "c")
    (tmp_path / "c" / "merges.txt").touch()
    files = {**read_manifest(tmp_path / "c")["files"], "merges.txt": {"size": 0, "segments": []}}
    (tmp_path / "c" / "manifest.json").write_text(render_manifest({"token": "t", "files": files}))
    with CheckpointFolder(tmp_path / "c") as folder:
        assert folder.read_file("merges.txt") == b""
        folder.verify_headers()
        folder.verify()


def test_an_index_does_not_lead_elsewhere(tmp_path):
    save_file(TENSORS, tmp_path / "secret.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="only files in its own folder are read"):
        CheckpointFolder(folder)


def test_a_refused_folder_leaves_no_file_open(tmp_path):
    write(tmp_path / "c", max_shard_size=50)
    second = sorted((tmp_path / "c").glob("model-*.safetensors"))[1]
    second.write_bytes(second.read_bytes().replace(b"dtype", b"dtypo"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=f"header of {second.name}"):
        CheckpointFolder(tmp_path / "c")
    assert os.listdir("/proc/self/fd") == before


def test_a_later_format_is_refused(tmp_path):
    write(tmp_path / "c")
    text = render_manifest({**read_manifest(tmp_path / "c"), "version": 2})
    (tmp_path / "c" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="torchacc-checkpoint 2, and this version of torchacc reads"):
        CheckpointFolder(tmp_path / "c")


def test_too_little_room_is_found_before_anything_is_written(tmp_path):
    writer = FolderWriter(tmp_path / "c", "t", 0, 1)
    with pytest.raises(CheckpointError, match="nothing was written"):
        writer.prepare({"model.safetensors": (b"", 1 << 60)}, ())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_whole_is_removed(tmp_path, monkeypatch):
    def refuse(path, header, nbytes):
        raise OSError(27, "File too large")

    monkeypatch.setattr(folder_writer, "preallocate", refuse)
    with pytest.raises(CheckpointError, match="c: a checkpoint cannot be written here: File too large"):
        FolderWriter(tmp_path / "c", "t", 0, 1).prepare({"model.safetensors": (b"", 8)}, ())
    assert not list(tmp_path.iterdir())


def test_a_foreign_folder_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="holds files that are not a torchacc checkpoint"):
        FolderWriter(tmp_path / "mine", "t", 0, 1).prepare({}, ())
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        FolderWriter(tmp_path / "file", "t", 0, 1).prepare({}, ())


def test_a_folder_in_a_checkpoint_is_not_removed(tmp_path):
    write(tmp_path / "c")
    write(tmp_path / "c" / "step-00000100")
    with pytest.raises(CheckpointError, match="c holds the folder step-00000100, which is not of the checkpoint"):
        write(tmp_path / "c", token="t2")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    check(tmp_path / "c")
    check(tmp_path / "c" / "step-00000100")


def test_a_checkpoint_that_is_not_there_names_those_beside_it(tmp_path):
    for name in ("step-10", "step-20", "step-25"):
        write(tmp_path / name)
    (tmp_path / "step-25" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="checkpoint .*step-30; in the same folder there is step-10, step-20$"):
        locate(tmp_path / "step-30")
    with pytest.raises(CheckpointError, match="step-30$"):
        locate(tmp_path / "elsewhere" / "step-30")
