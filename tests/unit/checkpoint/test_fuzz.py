"""Altered files of every form of checkpoint: refused by an error of ours, or the very same values.

Some hundred alterations, the same in every run; with --long many more, others each time, whose seed is printed. Each
runs under a limit of memory and of time. What cannot show by nature is said by `Form.invisible`.
"""

import copy
import json
import os
import random
import resource
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchacc
from torchacc.checkpoint import loader, saver
from torchacc.checkpoint.dcp import export_dcp, import_dcp
from torchacc.checkpoint.other_formats.conversion import execute
from torchacc.checkpoint.other_formats.rank_conversion import consolidate_sharded_model_checkpoints, plan_conversion
from torchacc.checkpoint.own_format.manifest import MANIFEST, digest, read_manifest, render_manifest
from torchacc.errors import CheckpointError, ConfigError, DataError

OURS = (CheckpointError, ConfigError, DataError)
MAX_GROWTH_MB = 150
MAX_CPU_SECS = 5.0
SEED = 15
PER_FORM = 70

MODEL = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.BatchNorm1d(24), nn.Linear(24, 12))
"""Of which each test has a copy."""


class Run:
    """A small model that is being trained, and all that a checkpoint holds of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = torchacc.Config()
        config.backend = "native"
        data = TensorDataset(torch.randn(12, 12))
        self.model, loader = torchacc.accelerate(copy.deepcopy(MODEL), DataLoader(data, 2, shuffle=True), config)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        self.parts = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        for (x,) in loader:
            self.model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Return weights, buffers and what the optimizer keeps."""
        found = {name: self._whole(value) for name, value in self.model.state_dict().items()}
        state = self.parts["optimizer"].state
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}/{key}": self._whole(value) for key, value in state.get(parameter, {}).items()}
        return found

    def spoil(self) -> None:
        """Change every value, so that a load has something to do."""
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                tensor.zero_()

    @staticmethod
    def _whole(value: torch.Tensor) -> torch.Tensor:
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


@dataclass
class Form:
    """A form of checkpoint."""

    folder: Path
    read: Callable[[Path], dict[str, torch.Tensor]]
    """Read all of a folder."""
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    reseal: Callable[[Path, str], None] = lambda folder, name: None
    """Make the checksums of an altered file right again, as somebody would who forges it."""
    invisible: Callable[[str, bytes, bytes], bool] = lambda name, before, after: False
    """Whether an alteration of a file, as it was and as it is, cannot be told from another checkpoint."""


@pytest.fixture(scope="module")
def run():
    return Run()


@pytest.fixture(scope="module")
def forms(run, tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    weights = run.values()
    model = {name: value for name, value in weights.items() if "/" not in name}

    def load(folder: Path) -> dict[str, torch.Tensor]:
        run.spoil()
        loader.load(folder, model=run.model, **run.parts)
        loader.verify(folder)
        return run.values()

    def load_model(folder: Path) -> dict[str, torch.Tensor]:
        run.spoil()
        loader.load(folder, model=run.model)
        return {name: value for name, value in run.values().items() if "/" not in name}

    def load_rank_files(folder: Path) -> dict[str, torch.Tensor]:
        found = {}
        for path in sorted(folder.glob("rank-*")):
            contents = torchacc.load(path)
            found |= {f"{path.name}/{name}": value for name, value in contents["model"].items()}
            for number, state in contents["optimizer"]["state"].items():
                found |= {f"{path.name}/{number}/{name}": value for name, value in state.items()}
        found |= consolidate_sharded_model_checkpoints(str(folder), save_model=False)[0]
        out = folder / "out"
        execute(plan_conversion(folder, ("model", "optimizer"), num_ranks=3, target=out))
        for path in sorted(out.iterdir()):
            contents = torch.load(path, weights_only=True)
            found |= {f"{path.name}/{key}": value for key, value in contents.get("model", {}).items()}
        shutil.rmtree(out)
        return found

    def load_dcp(folder: Path) -> dict[str, torch.Tensor]:
        out = folder.parent / "imported"
        shutil.rmtree(out, ignore_errors=True)
        import_dcp(folder, out)
        return {
            f"{path.name}/{name}": value for path in sorted(out.glob("*.safetensors"))
            for name, value in load_file(path).items()
        }  # fmt: skip

    extra = {"a": torch.arange(3), "b": (1, {2})}
    saver.save(root / "torchacc", model=run.model, **run.parts, extra=extra, max_shard_size=2000)
    export_dcp(root / "torchacc", root / "dcp")
    (root / "hf").mkdir()
    save_file(model, root / "hf" / "model.safetensors")
    (root / "rank-files").mkdir()
    _save_rank_files(root / "rank-files", weights)

    def in_data(name: str, before: bytes, after: bytes) -> bool:
        """Bytes of tensors themselves, which have no checksum there; and a note that nobody reads."""
        start = 8 + int.from_bytes(before[:8], "little")
        return after[:start] == before[:start] and len(after) == len(before)

    found = {
        "torchacc": Form(root / "torchacc", load),
        "forged": Form(root / "torchacc", load, reseal=_reseal, invisible=lambda *_: True),
        "hf": Form(root / "hf", load_model, invisible=in_data),
        "rank-files": Form(root / "rank-files", load_rank_files),
        "dcp": Form(root / "dcp", load_dcp),
    }
    for form in found.values():
        form.expected = form.read(form.folder)
    return found


def _save_rank_files(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write what two ranks would: rows of each parameter, and everything else whole."""
    names = [name for name, _ in MODEL.named_parameters()]
    info = {}
    for name in names:
        prefix, _, suffix = name.rpartition(".")
        info.setdefault(prefix, {})[suffix] = {"_orig_name": suffix, "_orig_size": list(weights[name].shape)}
    for rank in range(2):
        cut = {name: value.chunk(2)[rank].clone() for name, value in weights.items() if value.dim()}
        metadata = {
            "shard_info": info, "flatten_info": {}, "buffer_info": {}, "world_size": 2, "rank": rank, "replica": 0,
            "tied": {}, "parameters": names, "save_id": "5a5a5a5a",
        }  # fmt: skip
        keys = {"exp_avg", "exp_avg_sq", "step"}
        state = {
            number: {key: cut.get(f"{name}/{key}", weights[f"{name}/{key}"]) for key in keys}
            for number, name in enumerate(names)
        }
        group = {"lr": 0.1, "betas": (0.9, 0.99), "params": list(range(len(names))), "param_names": names}
        model = {name: cut[name] if name in names else value for name, value in weights.items() if "/" not in name}
        optimizer = {"state": state, "param_groups": [group]}
        content = {"model": model, "optimizer": optimizer, "shard_metadata": metadata}
        torch.save(content, folder / f"rank-{rank}-of-2.pth")


def _reseal(folder: Path, name: str) -> None:
    if name == MANIFEST:
        content = json.loads((folder / name).read_bytes())["content"]
        (folder / name).write_text(render_manifest({**content} if isinstance(content, dict) else {"files": content}))
        return
    content = dict(read_manifest(folder))
    data = (folder / name).read_bytes()
    sizes = [len(data[start : start + (8 << 20)]) for start in range(0, len(data), 8 << 20)]
    segments, position = [], 0
    for size in sizes:
        segments.append([size, digest(data[position : position + size])])
        position += size
    content["files"] = {**content["files"], name: {"size": len(data), "segments": segments}}
    (folder / MANIFEST).write_text(render_manifest({key: content[key] for key in ("token", "files")}))


# How files are altered


def flip(data: bytes, chance: random.Random) -> bytes:
    altered = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 8))):
        altered[chance.randrange(len(altered))] ^= 1 << chance.randrange(8)
    return bytes(altered)


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.choice((0, chance.randrange(len(data)), len(data) - 1))]


def duplicate(data: bytes, chance: random.Random) -> bytes:
    start, stop = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    return data[:stop] + data[start:]


def zero(data: bytes, chance: random.Random) -> bytes:
    start, stop = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    return data[:start] + bytes(stop - start) + data[stop:]


def insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.choice((b"9" * 20, b"9" * 5000, b"[" * 3000, b"r\xff\xff\xff\x7f", b"\x00")) + data[at:]


def retype(data: bytes, chance: random.Random) -> bytes:
    """Change the type of a value somewhere in JSON, be it a file or the header of one."""
    start = 0 if data[:1] in (b"{", b"[") else 8
    stop = len(data) if not start else 8 + int.from_bytes(data[:8], "little")
    tree = json.loads(data[start:stop])
    paths = list(_paths(tree))
    path = chance.choice(paths)
    # Not through json, which would refuse the deep one.
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    plain = ["null", "true", "-1", "0", "1e400", "NaN", "9" * 30, "9" * 6000, '"x"', '"\\ud800"', '"../x"', "[]", "{}"]
    tagged = ['{"$":"dict","value":[[[],1]]}', '{"$":"tensor","value":[]}', '{"$":"bytes","value":"?"}']
    value = chance.choice([*plain, *tagged, '["x"]', "[[[]]]", deep])
    marker = "\x7fmarker\x7f"
    if not path:
        packed = value.encode()
    else:
        node = tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = marker
        packed = json.dumps(tree).replace(json.dumps(marker), value).encode()
    return packed if not start else len(packed).to_bytes(8, "little") + packed + data[stop:]


def repickle(data: bytes, chance: random.Random) -> bytes:
    """Alter the pickle in a zip file, with checksums as they should be, or pack it."""
    import io

    packs = chance.random() < 0.3
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("data.pkl") and not packs:
                content = chance.choice((flip, insert, duplicate, truncate))(content, chance)
            compression = zipfile.ZIP_DEFLATED if packs else zipfile.ZIP_STORED
            new.writestr(info.filename, content, compress_type=compression)
    return out.getvalue()


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items)[:40]:
        found += _paths(value, (*path, key))
    return found


def alter(folder: Path, chance: random.Random) -> tuple[str, str, bytes, bytes]:
    """Alter a file; return how, its name, and what it held before and after."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    path = chance.choice(paths)
    before = path.read_bytes()
    acts: list[Any] = [flip, flip, truncate, duplicate, zero, insert]
    if path.suffix in (".json", ".safetensors"):
        acts += [retype] * 8
    if path.suffix == ".pth":
        acts += [repickle] * 4
    acts += ["swap", "pipe", "device"]
    act = chance.choice(acts)
    if act == "swap":
        path.write_bytes(chance.choice(paths).read_bytes())
    elif act == "pipe":
        path.unlink()
        os.mkfifo(path)
        return "pipe", path.name, before, b""
    elif act == "device":
        path.unlink()
        path.symlink_to("/dev/zero")
        return "device", path.name, before, b""
    else:
        path.write_bytes(act(before, chance))
    return getattr(act, "__name__", act), path.name, before, path.read_bytes()


def judge(form: Form, folder: Path, what: str, name: str, before: bytes, after: bytes) -> str:
    """Read an altered folder; return how it was taken."""
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        found = form.read(folder)
    except OURS as error:
        outcome = "refused" if len(str(error)) < 5000 else "refused at length"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    else:
        same = found.keys() == form.expected.keys() and all(
            torch.equal(found[key], form.expected[key]) for key in found
        )
        assert same or form.invisible(name, before, after), f"{what}: loaded other values"
        outcome = "the same" if same else "invisible"
    assert outcome != "refused at length", what
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    assert grown < MAX_GROWTH_MB, f"{what}: took {grown:.0f} MB"
    assert time.process_time() - began < MAX_CPU_SECS, f"{what}: took {time.process_time() - began:.1f} s"
    return outcome


@pytest.mark.parametrize("kind", ["torchacc", "forged", "hf", "rank-files", "dcp"])
def test_altered_files_are_refused_or_change_nothing(kind, forms, run, tmp_path, request):
    is_long = request.config.getoption("--long")
    seed = time.time_ns() if is_long else SEED
    print(f"seed {seed}")
    chance = random.Random(seed)
    form = forms[kind]
    outcomes: dict[str, int] = {}
    for number in range(PER_FORM * (50 if is_long else 1)):
        folder = tmp_path / "altered"
        shutil.copytree(form.folder, folder)
        act, name, before, after = alter(folder, chance)
        what = f"{kind}, seed {seed}, number {number}: {act} {name}"
        if act not in ("pipe", "device"):
            try:
                form.reseal(folder, name)
            except Exception:  # what is so broken is nothing to be forged
                (folder / MANIFEST).write_bytes((form.folder / MANIFEST).read_bytes())
        outcome = judge(form, folder, what, name, before, after)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert outcomes["refused"] > PER_FORM // 4, outcomes
    run.spoil()
    assert form.read(form.folder).keys() == form.expected.keys()


@pytest.mark.parametrize(("kind", "name"), [("dcp", ".metadata"), ("rank-files", "rank-0-of-2.pth")])
def test_a_pickle_takes_no_memory_that_it_only_names(kind, name, forms, tmp_path):
    """A memo's index of 2**28: nine bytes for which C's unpickler takes 4 GB."""
    folder = tmp_path / kind
    shutil.copytree(forms[kind].folder, folder)
    bomb = b"\x80\x02]r\xff\xff\xff\x0f."
    if name == ".metadata":
        (folder / name).write_bytes(bomb)
    else:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", bomb)
    assert judge(forms[kind], folder, name, name, b"", b"") == "refused"
