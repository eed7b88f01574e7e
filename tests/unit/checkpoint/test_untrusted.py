"""Files that nobody vouches for: flipped bits, bombs, pipes, forged states; and folders that others change."""

import json
import os
import random
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchacc
from tests import forkrun
from torchacc.checkpoint import loader, saver
from torchacc.checkpoint.dcp import export_dcp, import_dcp
from torchacc.checkpoint.other_formats.conversion import execute
from torchacc.checkpoint.other_formats.rank_conversion import Output, plan_consolidation
from torchacc.checkpoint.own_format import locks
from torchacc.checkpoint.own_format.manifest import MANIFEST, digest, read_manifest, render_manifest
from torchacc.errors import CheckpointError


@pytest.fixture
def parts():
    torch.manual_seed(0)
    config = torchacc.Config()
    config.backend = "native"
    model = torchacc.accelerate(nn.Linear(40, 30), None, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 40)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def forge(folder: Path, name: str, change) -> None:
    """Change what a JSON file says, and make its checksum right again."""
    content = json.loads((folder / name).read_bytes())
    change(content)
    data = json.dumps(content).encode()
    (folder / name).write_bytes(data)
    manifest = read_manifest(folder)
    manifest["files"][name] = {"size": len(data), "segments": [[len(data), digest(data)]]}
    (folder / MANIFEST).write_text(render_manifest({key: manifest[key] for key in ("token", "files")}))


# Rank files


def test_each_flipped_bit_of_a_dcp_folder_is_caught(tmp_path, parts):
    saver.save(tmp_path / "c", **parts)
    export_dcp(tmp_path / "c", tmp_path / "dcp")
    path = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    weight = parts["model"].weight.detach().numpy().tobytes()
    data[bytes(data).index(weight) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="__0_0.distcp: model.weight, at byte .* the checksum of its record"):
        import_dcp(tmp_path / "dcp", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"_use_new_zipfile_serialization": False}, "before 1.6"), ({}, "has no checksums: save it again")],
)
def test_what_has_no_checksums_is_refused(tmp_path, options, message):
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(bool(options))
    try:
        torch.save({"w": torch.randn(3)}, tmp_path / "old.pth", **options)
    finally:
        torch.serialization.set_crc32_options(computes)
    with pytest.raises(CheckpointError, match=message):
        torchacc.load(tmp_path / "old.pth")


def repacked(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", b"3")
    return path


_DOUBLED = b"".join(b"](h%ch%ceq%c" % (number, number, number + 1) for number in range(60))
BOMBS = {
    "a memo's index": (b"\x80\x02]r\xff\xff\xff\x0f.", zipfile.ZIP_STORED),
    "a compressed pickle": (b"\x80\x02]" + b"0]" * 10_000_000 + b".", zipfile.ZIP_DEFLATED),
    "a bytearray": (b"\x80\x05\x96" + (1 << 31).to_bytes(8, "little") + b".", zipfile.ZIP_STORED),
    "a bytearray by name": (b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x5f\x85R.", zipfile.ZIP_STORED),
    "lists of lists": (b"\x80\x02]q\x00" + _DOUBLED + b".", zipfile.ZIP_STORED),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", zipfile.ZIP_STORED),
}
READER = """
import resource, sys, time
from pathlib import Path
import torchacc
from torchacc.checkpoint.other_formats.pth import read_pth
from torchacc.checkpoint.dcp import import_dcp
from torchacc.errors import CheckpointError
for path in map(Path, sys.argv[1:]):
    for read in (read_pth, torchacc.load) if path.suffix == ".pth" else (lambda path: import_dcp(path, path / "new"),):
        began = resource.getrusage(resource.RUSAGE_SELF)
        try:
            print(path.name, read is torchacc.load, "loads", flush=True)
            read(path)
        except CheckpointError as error:
            print(path.name, "refused", error)
        ended = resource.getrusage(resource.RUSAGE_SELF)
        assert ended.ru_maxrss - began.ru_maxrss < 300_000, (path, ended.ru_maxrss - began.ru_maxrss)
        assert ended.ru_utime - began.ru_utime < 5, path
"""


def test_bombs_take_neither_memory_nor_time(tmp_path):
    names = []
    for number, (pickled, compression) in enumerate(BOMBS.values()):
        names.append(repacked(tmp_path / f"{number}.pth", pickled, compression))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(BOMBS["a memo's index"][0])
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "zero.pth").symlink_to("/dev/zero")
    names += [tmp_path / "dcp", tmp_path / "pipe.pth", tmp_path / "zero.pth"]
    done = forkrun.run("-c", READER, *names, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "pipe.pth is a pipe: a file is expected" in done.stdout
    assert "zero.pth is a device: a file is expected" in done.stdout
    for name in ("1", "2", "3", "4", "5"):
        assert f"{name}.pth refused" in done.stdout, done.stdout


@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors", "state.json"])
def test_a_pipe_in_a_checkpoint_is_refused(tmp_path, parts, name):
    saver.save(tmp_path / "c", **parts)
    (tmp_path / "c" / name).unlink()
    os.mkfifo(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=f"{name} is (a pipe|not a file)"):
        loader.load(tmp_path / "c", model=parts["model"])


# Forged states


def set_at(*path_and_value):
    *path, last, value = path_and_value

    def change(content):
        for key in path:
            content = content[key]
        content[last] = value

    return change


FORGED = {
    "a random state that is none": ("state.json", set_at("random", [1, 2])),
    "Python's generator": ("state.json", set_at("random", 0, "python", [3, [], None])),
    "numpy's position": (
        "state.json",
        lambda c: c["random"][0]["numpy"]["value"].__setitem__(2, 10**6),
    ),
    "no random states": ("state.json", lambda c: c.pop("random")),
    "no extra": ("state.json", lambda c: c.pop("extra")),
    "XLA's seed": ("state.json", set_at("random", 0, "xla", "x")),
    "a scheduler that is a list": ("state.json", set_at("scheduler", [1])),
    "a scheduler's step": ("state.json", set_at("scheduler", "last_epoch", "x")),
    "a tag that nobody knows": ("state.json", set_at("extra", {"$": "code", "value": []})),
    "bytes that are none": ("state.json", set_at("extra", {"$": "bytes", "value": "?"})),
    "a tensor that is not there": ("state.json", set_at("extra", {"$": "tensor", "value": []})),
    "a learning rate": ("optimizer.json", set_at("groups", 0, "lr", "x")),
    "groups": ("optimizer.json", set_at("groups", 3)),
    "no groups": ("optimizer.json", lambda c: c.pop("groups")),
    "parameters": ("optimizer.json", set_at("groups", 0, "parameters", 1)),
    "values": ("optimizer.json", set_at("values", [])),
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_is_forged_is_refused_before_anything_is_changed(kind, tmp_path, parts):
    saver.save(tmp_path / "c", **parts)
    forge(tmp_path / "c", *FORGED[kind])
    with torch.no_grad():
        parts["model"].weight.add_(1)
    before = parts["model"].weight.clone()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CheckpointError, match=r"c|makes? no sense"):
        loader.load(tmp_path / "c", **parts)
    assert torch.equal(parts["model"].weight, before)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
    parts["model"](torch.randn(1, 40))  # it is not half loaded


@pytest.mark.parametrize(
    "content",
    [
        [], "x", {}, {"format": "torchacc-checkpoint"}, {"format": "torchacc-checkpoint", "version": 1},
        {"format": "torchacc-checkpoint", "version": 1, "token": 3, "files": {}},
        {"format": "torchacc-checkpoint", "version": 1, "token": "t", "files": []},
        {"format": "torchacc-checkpoint", "version": 1, "token": "t", "files": {"model.safetensors": [1]}},
    ],
)  # fmt: skip
def test_a_forged_manifest_is_refused(content, tmp_path, parts):
    saver.save(tmp_path / "c", **parts)
    packed = json.dumps(content, separators=(",", ":")).encode()
    (tmp_path / "c" / MANIFEST).write_bytes(b'{"xxh3":"%s","content":%s}\n' % (digest(packed).encode(), packed))
    with pytest.raises(CheckpointError, match="manifest.json (makes no sense|is of )"):
        loader.load(tmp_path / "c", model=parts["model"])


@pytest.mark.parametrize(
    "entry",
    [
        {"size": 0, "segments": []},
        {"size": 1 << 40, "segments": [[1 << 40, "0" * 16]]},
        {"size": 3, "segments": [[3, ""]]},
        {"size": 3, "segments": [[3]]},
    ],
)
def test_a_manifest_with_forged_segments_is_refused(entry, tmp_path, parts):
    saver.save(tmp_path / "c", model=parts["model"])
    manifest = read_manifest(tmp_path / "c")
    files = {**manifest["files"], "model.safetensors": entry}
    (tmp_path / "c" / MANIFEST).write_text(render_manifest({"token": "t", "files": files}))
    with (tmp_path / "c" / "model.safetensors").open("r+b") as file:
        file.truncate(min(entry["size"], 1 << 41))
    for act in (loader.verify, lambda path: loader.load(path, model=parts["model"])):
        with pytest.raises(CheckpointError):
            act(tmp_path / "c")


# What others do meanwhile


def test_a_checkpoint_that_is_removed_while_it_is_verified_is_not_called_damaged(tmp_path, parts, monkeypatch):
    saver.save(tmp_path / "c", **parts)
    verify = loader.CheckpointFolder.verify

    def removed(folder):
        (tmp_path / "c").rename(tmp_path / ".c.pruned")
        verify(folder)

    monkeypatch.setattr(loader.CheckpointFolder, "verify", removed)
    with pytest.raises(CheckpointError, match="/c was removed while it was read"):
        loader.verify(tmp_path / "c")


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_read_anew(tmp_path, parts, monkeypatch):
    saver.save(tmp_path / "c", **parts)
    verify, tries = loader.CheckpointFolder.verify, []

    def replaced(folder):
        tries.append(folder)
        if len(tries) == 1:
            parts["scheduler"].last_epoch = 5
            saver.save(tmp_path / "c", **parts)
        verify(folder)

    monkeypatch.setattr(loader.CheckpointFolder, "verify", replaced)
    loader.verify(tmp_path / "c")
    assert len(tries) == 2


def test_the_litter_of_a_killed_conversion_is_removed_and_nothing_else(tmp_path):
    rank_file = {
        "model": {"w": torch.randn(6, 2)},
        "shard_metadata": {
            "shard_info": {"": {"w": {"_orig_name": "w", "_orig_size": [6, 2]}}},
            "world_size": 1, "rank": 0,
        },
    }  # fmt: skip
    torchacc.save(rank_file, tmp_path, master_only=False)
    ended = subprocess.Popen(["true"])
    ended.wait()
    machine = locks.new_token().partition("-")[0]
    (tmp_path / f".model.pth.{machine}-{ended.pid}-0badc0de.incomplete").touch()
    kept = {
        f".model.pth.{machine}-{os.getpid()}-0badc0de.incomplete",
        f".model.pth.00000000-{ended.pid}-0badc0de.incomplete",
        ".mine.incomplete",
    }
    for name in kept:
        (tmp_path / name).touch()
    execute(plan_consolidation(str(tmp_path), "*.pth", str(tmp_path / "model.pth"), Output()))
    assert {path.name for path in tmp_path.iterdir()} == kept | {"rank-0-of-1-model.pth", "model.pth"}


def test_rank_files_that_do_not_say_who_wrote_them_are_not_removed(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "rank-0-of-2-model.pth")
    with pytest.raises(CheckpointError, match="rank-0-of-2-model.pth, of 2 ranks, which does not say"):
        torchacc.save({"model": {"w": torch.ones(2)}}, tmp_path, master_only=False)
    torchacc_wrote = {"model": {"w": torch.ones(2)}, "shard_metadata": {"save_id": "5a", "world_size": 2, "rank": 0}}
    torch.save(torchacc_wrote, tmp_path / "rank-0-of-2-model.pth")
    torchacc.save({"model": {"w": torch.ones(2)}}, tmp_path, master_only=False)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-of-1-model.pth"]
