"""Rank files become whole tensors, or those of another number of ranks, bit for bit, or are refused by name."""

import json
import multiprocessing
import os
import resource
import struct
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trees import assert_same
from torchacc.checkpoint.other_formats import conversion, new_tensors, object_files
from torchacc.checkpoint.other_formats.conversion import execute
from torchacc.checkpoint.other_formats.pth import read_pth, tensor_records
from torchacc.checkpoint.other_formats.rank_conversion import (
    Output,
    consolidate_sharded_model_checkpoints,
    plan_conversion,
)
from torchacc.checkpoint.own_format import locks
from torchacc.errors import CheckpointError

SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
OURS = ["rows", "rows-left-out", "flat"]
TORCH_XLA = ["xla-flat", "xla", "xla-dim0"]
STYLES = OURS + TORCH_XLA
UNITS = {"": ["wte.weight", "frozen"], "h.0": ["w", "b"], "h.1": ["w", "b"]}
SHAPES = {"wte.weight": (37, 5), "frozen": (3,), "h.0.w": (4, 6, 2), "h.0.b": (7,), "h.1.w": (4, 6, 2), "h.1.b": (7,)}
FROZEN = {"frozen"}


@dataclass
class Made:
    """A model with its optimizer, whole, and how to save it as ranks do."""

    style: str
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: int = 1

    def save(self, folder: Path, world: int, *, separate: bool = True, **metadata: Any) -> list[Path]:
        """Write the files of all ranks, and return them."""
        folder.mkdir(exist_ok=True)
        paths = []
        for rank in range(world):
            content = self.rank_file(rank, world, **metadata)
            if separate:
                optimizer = {key: content[key] for key in ("optimizer", "shard_metadata")}
                del content["optimizer"]
                torch.save(optimizer, folder / f"rank-{rank}-of-{world}-optimizer.pth")
            paths.append(folder / (f"rank-{rank}-of-{world}-model.pth" if separate else f"rank-{rank}-of-{world}.pth"))
            torch.save(content, paths[-1])
        return paths

    def rank_file(self, rank: int, world: int, **metadata: Any) -> dict[str, Any]:
        model, shard_info, flatten_info, moments = {}, {}, {}, {}
        for unit, names in UNITS.items():
            prefix = self.wrapped(unit)
            shard_info[prefix] = {}
            for own_name, members in self.blocks(unit, names).items():
                suffix = self.suffix(own_name)
                key = f"{prefix}.{suffix}" if prefix else suffix
                full_names = [f"{unit}.{name}" if unit else name for name in members]
                tensors = [self.params[name] for name in full_names]
                whole = torch.cat([t.reshape(-1) for t in tensors]) if "flat" in self.style else tensors[0]
                shard_info[prefix][suffix] = {"_orig_size": list(whole.shape), "_orig_name": own_name}
                if "flat" in self.style:
                    inner = "_fpw_module." if "xla" in self.style else ""
                    flat = f"{prefix}.{own_name}" if prefix else own_name
                    shapes = [list(t.shape) for t in tensors]
                    flatten_info[flat] = [[inner + n for n in members], shapes, [t.numel() for t in tensors]]
                model[key] = self.shard(whole, rank, world)
                moment = torch.cat([self.moments[name].reshape(-1) for name in full_names]).view(whole.shape)
                if not FROZEN & set(full_names):
                    moments[key] = self.shard(moment, rank, world)
        keys = [f"{prefix}.{suffix}" if prefix else suffix for prefix in shard_info for suffix in shard_info[prefix]]
        if "rows" in self.style:  # a state dict has both names of what is tied
            model = {"lm_head.weight": model["wte.weight"], **model}
        model |= {self.buffer_key(name): buffer for name, buffer in self.buffers.items()}
        metadata = {"shard_info": shard_info, "flatten_info": flatten_info, "buffer_info": {}, **metadata}
        metadata |= {"world_size": world, "rank": rank}
        if self.style in OURS:
            ours = {"replica": 0, "tied": {"lm_head.weight": "wte.weight"}, "parameters": list(SHAPES), "save_id": "1"}
            metadata = ours | metadata
        return {"model": model, "optimizer": self.optimizer(keys, moments), "shard_metadata": metadata, "epoch": 3}

    def blocks(self, unit: str, names: list[str]) -> dict[str, list[str]]:
        wrapper = {"xla-flat": "_fsdp_wrapped_module.", "xla": "_fsdp_wrapped_module._fpw_module."}.get(self.style)
        wrapper = "_fsdp_wrapped_module." if self.style == "xla-dim0" else wrapper or ""
        if "flat" not in self.style:
            return {wrapper + name: [name] for name in names}
        groups = [[n for n in names if n not in FROZEN], [n for n in names if n in FROZEN]]
        return {f"{wrapper}flat_param_{i}": group for i, group in enumerate(groups) if group}

    def wrapped(self, unit: str) -> str:
        return f"_fsdp_wrapped_module.{unit}" if unit and "xla" in self.style else unit

    def suffix(self, name: str) -> str:
        return f"_fsdp_shard.{name}".replace(".", SEPARATOR) if "xla" in self.style else name

    def buffer_key(self, name: str) -> str:
        return f"_fsdp_wrapped_module.{name}" if "xla" in self.style else name

    def shard(self, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        if self.style in ("xla-flat", "xla"):
            whole, multiple = whole.reshape(-1), world * 128
        else:
            multiple = world
        padded = torch.cat([whole, whole.new_zeros(-len(whole) % multiple, *whole.shape[1:])])
        shard = padded.chunk(world)[rank]
        if self.style == "rows-left-out":
            shard = shard[: max(0, len(whole) - rank * len(shard))]
        return shard.clone()

    def optimizer(self, keys: list[str], moments: dict[str, torch.Tensor]) -> dict[str, Any]:
        ids = {key: index for index, key in enumerate(keys)}
        chosen = [keys[index :: self.groups] for index in range(self.groups)]
        step = torch.tensor(11.0)  # one for all: as it may be saved, and must not be loaded
        groups: list[dict[str, Any]] = [
            {"lr": 0.1 * index, "betas": (0.9, 0.99), "params": [ids[key] for key in own]}
            for index, own in enumerate(chosen)
        ]
        if self.style in OURS or self.groups > 1:
            for group, own in zip(groups, chosen, strict=True):
                group["param_names"] = own
        state = {ids[key]: {"step": step, "exp_avg": moment} for key, moment in moments.items()}
        return {"state": state, "param_groups": groups}


def make(style: str, groups: int = 1) -> Made:
    torch.manual_seed(0)
    return Made(
        style,
        params={name: torch.randn(shape) for name, shape in SHAPES.items()},
        buffers={"h.0.mask": torch.ones(3, 3, dtype=torch.bool), "h.1.scale": torch.ones(2, dtype=torch.bfloat16)},
        moments={name: torch.randn(shape) for name, shape in SHAPES.items()},
        groups=groups,
    )


def assert_sealed(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def convert(folder: Path, *parts: str, verify: bool = False, **options: Any) -> None:
    execute(plan_conversion(folder, parts, **options), verify=verify)


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("style", STYLES)
def test_a_model_is_put_together(tmp_path, style, world):
    made = make(style)
    made.save(tmp_path, world)
    state, path = consolidate_sharded_model_checkpoints(str(tmp_path))
    assert path == str(tmp_path / "consolidated.pth")
    expected = made.params | made.buffers
    if style in OURS:
        expected["lm_head.weight"] = made.params["wte.weight"]
        assert state["lm_head.weight"].data_ptr() == state["wte.weight"].data_ptr()
    assert_same(state, expected)
    assert_same(load(Path(path)), {"model": state})
    assert_sealed(Path(path))


@pytest.mark.parametrize(("groups", "world"), [(1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("style", STYLES)
def test_an_optimizer_is_put_together(tmp_path, style, world, groups):
    made = make(style, groups)
    made.save(tmp_path, world)
    convert(tmp_path, "optimizer", verify=True)
    optimizer = load(tmp_path / "optimizer_consolidated.pth")["optimizer"]
    names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(SHAPES)
    assert [id_ for group in optimizer["param_groups"] for id_ in group["params"]] == list(range(len(names)))
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.1 * index for index in range(groups)]
    assert optimizer["state"].keys() == {index for index, name in enumerate(names) if name not in FROZEN}
    for id_, state in optimizer["state"].items():
        assert_same(state, {"step": torch.tensor(11.0), "exp_avg": made.moments[names[id_]]})
    steps = {state["step"].data_ptr() for state in optimizer["state"].values()}
    assert len(steps) == len(optimizer["state"])


def test_a_whole_optimizer_loads_into_a_plain_one(tmp_path):
    made = make("flat")
    made.save(tmp_path, 2)
    convert(tmp_path, "optimizer")
    params = [torch.nn.Parameter(made.params[name].clone()) for name in SHAPES]  # the model's order, not the units'
    optimizer = torch.optim.AdamW(params)
    optimizer.load_state_dict(load(tmp_path / "optimizer_consolidated.pth")["optimizer"])
    for name, param in zip(SHAPES, params, strict=True):
        if name not in FROZEN:
            assert torch.equal(optimizer.state[param]["exp_avg"], made.moments[name])


@pytest.mark.parametrize(
    ("old", "new", "separate"), [(1, 4, True), (2, 3, False), (3, 2, True), (4, 8, False), (7, 5, True)]
)
@pytest.mark.parametrize("style", STYLES)
def test_resharding_gives_what_that_many_ranks_would_have_saved(tmp_path, style, old, new, separate):
    made = make(style, groups=2)
    made.save(tmp_path / "old", old, separate=separate)
    if style == "rows-left-out" and not any(shape[0] % old for shape in SHAPES.values()):
        made.style = "rows"  # these files do not show that padding is left out
    made.save(tmp_path / "expected", new)
    convert(tmp_path / "old", "model", "optimizer", num_ranks=new, target=tmp_path / "new", verify=True)
    for path in (tmp_path / "expected").iterdir():
        found, expected = load(tmp_path / "new" / path.name), load(path)
        assert found["shard_metadata"].pop("resharded") is True
        assert_same(found, expected)
        assert_sealed(tmp_path / "new" / path.name)
    assert len(list((tmp_path / "new").iterdir())) == 2 * new


@pytest.mark.parametrize("bare", [True, False])
def test_an_optimizer_with_metadata_of_its_own(tmp_path, bare):
    made = make("rows")
    for rank in range(2):
        content = made.rank_file(rank, 2)
        own = {**content["optimizer"], "shard_metadata": content["shard_metadata"]}
        torch.save(own if bare else {"optimizer": own}, tmp_path / f"rank-{rank}-of-2-optimizer.pth")
    convert(tmp_path, "optimizer", num_ranks=3, target=tmp_path / "new")
    new = load(tmp_path / "new" / "rank-0-of-3-optimizer.pth")
    assert new.keys() == ({"state", "param_groups", "shard_metadata"} if bare else {"optimizer", "shard_metadata"})
    assert (new if bare else new["optimizer"])["shard_metadata"]["world_size"] == 3
    convert(tmp_path, "optimizer")
    convert(tmp_path / "new", "optimizer")
    assert_same(load(tmp_path / "new/optimizer_consolidated.pth"), load(tmp_path / "optimizer_consolidated.pth"))


def test_buffers_get_their_dtype_back(tmp_path):
    made = make("xla-flat")
    info = {"_fsdp_wrapped_module._fpw_module.h.1.scale": {"_orig_dtype": torch.float32}}  # torch_xla's other prefixes
    made.save(tmp_path, 2, buffer_info=info)
    state, _ = consolidate_sharded_model_checkpoints(str(tmp_path))
    assert state["h.1.scale"].dtype == torch.float32
    assert state["h.0.mask"].dtype == torch.bool


def test_in_memory(tmp_path):
    made = make("rows")
    made.save(tmp_path, 2)
    before = set(tmp_path.iterdir())
    state, path = consolidate_sharded_model_checkpoints(str(tmp_path), save_model=False)
    assert path is None
    assert set(tmp_path.iterdir()) == before
    assert_same(state, made.params | made.buffers | {"lm_head.weight": made.params["wte.weight"]})
    assert state["lm_head.weight"] is state["wte.weight"]


def test_other_files_are_passed_over(tmp_path):
    made = make("rows")
    made.save(tmp_path, 2)
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pth")
    torch.save([torch.zeros(3)], tmp_path / "rank-0-of-2.pth")
    (tmp_path / "broken.pth").write_bytes(b"")
    state, _ = consolidate_sharded_model_checkpoints(str(tmp_path))
    assert_same(state["frozen"], made.params["frozen"])


@pytest.mark.parametrize("prefix", ["{}", "{}/", "{}/rank-"])
def test_a_second_run_does_not_trip_over_the_output_of_the_first(tmp_path, prefix):
    make("xla").save(tmp_path, 2)
    for _ in range(2):
        state, path = consolidate_sharded_model_checkpoints(prefix.format(tmp_path))
        assert Path(path).parent == tmp_path
    convert(tmp_path, "model", "optimizer")
    for _ in range(2):
        convert(tmp_path, "model", "optimizer", num_ranks=3)
    assert_same(consolidate_sharded_model_checkpoints(str(tmp_path))[0], state)


def test_of_replicas_the_lowest_is_taken(tmp_path):
    made = make("rows")
    made.save(tmp_path, 2)
    for path in tmp_path.glob("*-model.pth"):
        content = load(path)
        content["shard_metadata"]["replica"] = 1
        content["model"]["wte.weight"] += 1
        torch.save(content, tmp_path / f"copy-{path.name}")
    state, _ = consolidate_sharded_model_checkpoints(str(tmp_path))
    assert_same(state["wte.weight"], made.params["wte.weight"])


def test_safetensors_that_hugging_face_opens(tmp_path):
    made = make("rows")
    made.save(tmp_path / "old", 3)
    (tmp_path / "old" / "config.json").write_text(json.dumps({"dtype": "float32", "vocab": 37}))
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    output = Output("safetensors", max_shard_size=400, dtype=torch.bfloat16)
    for _ in range(2):
        convert(tmp_path / "old", "model", target=tmp_path / "new", output=output, verify=True)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    files = sorted(name for name in names if name.endswith(".safetensors"))
    assert len(files) > 1
    assert names == {*files, "model.safetensors.index.json", "config.json", "tokenizer.json"}
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"dtype": "bfloat16", "vocab": 37}
    state = {name: tensor for file in files for name, tensor in load_file(tmp_path / "new" / file).items()}
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in made.params.items()} | made.buffers
    assert_same(state, expected)  # the tied head is stored once


def test_files_that_would_be_read_instead_are_refused(tmp_path):
    make("rows").save(tmp_path, 2)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model.safetensors is there already and would be read in place of"):
        convert(tmp_path, "model", output=Output("safetensors", max_shard_size=800))


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True, "architectures": ["GPT2LMHeadModel"]}, True),
        ({"tie_word_embeddings": True, "architectures": ["GPT2Model"]}, False),
        ({"tie_word_embeddings": False, "architectures": ["GPT2LMHeadModel"]}, False),
    ],
)
def test_the_config_says_whether_the_head_of_torch_xlas_files_is_tied(tmp_path, config, tied):
    make("xla-flat").save(tmp_path, 2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    state, _ = consolidate_sharded_model_checkpoints(str(tmp_path))
    assert ("lm_head.weight" in state) is tied


def test_a_plan_can_be_read(tmp_path):
    make("rows").save(tmp_path, 2)
    text = plan_conversion(tmp_path, ["model", "optimizer"]).describe()
    assert f"{tmp_path}/model_consolidated.pth: " in text
    assert "  h.0.b float32 (7,) <- rank-0-of-2-model.pth[0:4], rank-1-of-2-model.pth[0:3]\n" in text
    assert "  h.0.b/step float32 () <- rank-0-of-2-optimizer.pth[0:1]" in text


def test_progress_ends_where_it_is_said_to(tmp_path):
    make("rows").save(tmp_path, 2)
    for verify in (False, True):
        plan, told = plan_conversion(tmp_path, ["model"]), []
        execute(plan, verify=verify, progress=told.append)
        assert sum(told) == plan.work(verify=verify)


def test_large_tensors_are_copied_in_chunks(tmp_path, monkeypatch):
    made = make("xla-flat")
    made.save(tmp_path, 3)
    monkeypatch.setattr(new_tensors, "CHUNK_BYTES", 64)
    state, path = consolidate_sharded_model_checkpoints(str(tmp_path), workers=4)
    assert_same(state, made.params | made.buffers)
    assert_sealed(Path(path))


@pytest.mark.parametrize("save_model", [True, False])
def test_files_that_are_replaced_while_they_are_read_are_not_mixed(tmp_path, monkeypatch, save_model):
    made = make("rows")
    paths = made.save(tmp_path, 2)
    made.params["h.0.w"] += 1
    newer = made.save(tmp_path / "newer", 2)
    chunks = new_tensors.read_chunks

    def replaced(*region):
        with suppress(FileNotFoundError):  # another thread was first
            os.replace(newer[1], paths[1])
        yield from chunks(*region)

    monkeypatch.setattr(new_tensors, "read_chunks", replaced)
    with pytest.raises(CheckpointError, match="rank-1-of-2-model.pth has been changed while it was read"):
        consolidate_sharded_model_checkpoints(str(tmp_path), save_model=save_model)
    assert not (tmp_path / "consolidated.pth").exists()


def test_files_of_a_save_after_the_plan_are_not_converted(tmp_path):
    made = make("rows")
    made.save(tmp_path, 2)
    plan = plan_conversion(tmp_path, ["model", "optimizer"], target=tmp_path / "new")
    made.params["h.0.w"] += 1
    made.save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"rank-0-of-2-(model|optimizer)\.pth has been changed while it was read"):
        execute(plan)
    assert not (tmp_path / "new").exists()


SETS = {"safetensors": {"output": Output("safetensors", 500)}, "rank-files": {"num_ranks": 3}}


@pytest.mark.parametrize("options", SETS.values(), ids=SETS)
def test_a_conversion_that_is_cut_short_leaves_no_mixture_with_an_earlier_one(tmp_path, monkeypatch, options):
    made, target = make("rows"), tmp_path / "new"
    made.save(tmp_path / "one", 2)
    convert(tmp_path / "one", "model", target=target, **options)
    made.params["wte.weight"] += 1
    made.save(tmp_path / "two", 2, save_id="2")
    before, replaced, replace = set(target.iterdir()), [], os.replace

    def fail_at_second(source, final):
        if replaced:
            raise OSError(5, "Input/output error", str(source))
        replaced.append(Path(final))
        replace(source, final)

    monkeypatch.setattr(os, "replace", fail_at_second)
    with pytest.raises(CheckpointError, match="Input/output error"):
        convert(tmp_path / "two", "model", target=target, **options)
    assert len(before) > 1
    assert before & set(target.iterdir()) <= set(replaced), "files of the earlier conversion lie beside the new one's"


def test_another_process_that_converts_into_a_folder_is_not_mixed_with(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE_SECS", 0.2)
    target = tmp_path / "new"
    target.mkdir()
    make("rows").save(tmp_path / "old", 2)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=hold, args=(target, theirs), daemon=True)
    other.start()
    ours.recv()
    with pytest.raises(CheckpointError, match="new is in use by another job"):
        convert(tmp_path / "old", "model", num_ranks=3, target=target)
    assert [path.name for path in target.iterdir()] == [".lock"]
    ours.send("go on")
    other.join()
    convert(tmp_path / "old", "model", num_ranks=3, target=target)


def hold(folder: Path, pipe: Any) -> None:
    """Be in the middle of giving a conversion's files their names."""
    locks.FolderLock(folder).take()
    pipe.send("holds it")
    pipe.recv()


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.qint8, "float32", None])
def test_a_buffer_of_what_is_no_dtype_is_refused(tmp_path, dtype):
    made = make("xla")
    made.save(tmp_path, 2, buffer_info={"_fsdp_wrapped_module.h.0.mask": {"_orig_dtype": dtype}})
    with pytest.raises(
        CheckpointError, match=r"does not say which dtype the buffer _fsdp_wrapped_module\.h\.0\.mask had"
    ):
        consolidate_sharded_model_checkpoints(str(tmp_path))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


@pytest.mark.parametrize(
    ("style", "chunk"), [("rows", new_tensors.CHUNK_BYTES), ("rows-left-out", 240), ("xla-flat", 240)]
)
def test_every_record_that_is_read_is_checked_without_asking(tmp_path, style, chunk, monkeypatch):
    monkeypatch.setattr(new_tensors, "CHUNK_BYTES", chunk)
    old = tmp_path / "old"
    paths = make(style).save(old, 3)
    sources = [source for new in plan_conversion(old, ["model"]).files[0].tensors for source in new.sources]
    read = {(source.region.path, source.region.offset) for source in sources}
    records = [(path, record) for path in paths for record in tensor_records(path) if (path, record.start) in read]
    assert len(records) >= 7
    for path, record in records:
        last = record.start + record.size - 1  # padding, in some, which nobody copies
        flip(path, last)
        match = f"{path.name} is damaged: the checksum of its record {record.name}, which holds .*, is wrong"
        with pytest.raises(CheckpointError, match=match):
            consolidate_sharded_model_checkpoints(str(old), workers=3)
        with pytest.raises(CheckpointError, match=match):
            consolidate_sharded_model_checkpoints(str(old), save_model=False)
        with pytest.raises(CheckpointError, match=match):
            convert(old, "model", num_ranks=2, target=tmp_path / "new")
        flip(path, last)
    assert len(list(old.iterdir())) == 6
    assert not (tmp_path / "new").exists()
    consolidate_sharded_model_checkpoints(str(old))


def test_the_checksum_of_a_record_that_several_tensors_share(tmp_path, monkeypatch):
    monkeypatch.setattr(new_tensors, "CHUNK_BYTES", 16)
    made = make("rows")
    paths = made.save(tmp_path, 1)
    content = load(paths[0])
    shared = torch.arange(60.0)
    content["model"]["h.0.b"], content["model"]["h.1.b"] = (
        shared[10:17],
        shared[14:21],
    )  # they overlap, within a larger one
    torch.save(content, paths[0])
    state, path = consolidate_sharded_model_checkpoints(str(tmp_path), workers=3)
    assert_same([state["h.0.b"], state["h.1.b"]], [shared[10:17], shared[14:21]])
    offset = read_pth(paths[0])["model"]["h.0.b"].offset
    for element in (-10, 0, 5, 10, 40):
        flip(paths[0], offset + 4 * element)
        with pytest.raises(CheckpointError, match=r"which holds h\.0\.b, h\.1\.b, is wrong"):
            consolidate_sharded_model_checkpoints(str(tmp_path))
        flip(paths[0], offset + 4 * element)
    assert_same(consolidate_sharded_model_checkpoints(str(tmp_path))[0], state)


def age(paths: list[Path], secs: int) -> None:
    for path in paths:
        os.utime(path, (1_700_000_000 - secs,) * 2)


class TestSeveralSaves:
    """One folder has the files of saves of different numbers of ranks."""

    @pytest.fixture
    def saves(self, tmp_path):
        old, new = make("rows"), make("rows")
        new.params["wte.weight"] += 1
        by_count = {4: old.save(tmp_path, 4, save_id="old"), 2: new.save(tmp_path, 2, save_id="new")}
        age(by_count[4], 100)
        age(by_count[2], 0)
        return old, new, by_count

    def test_the_newest_is_taken(self, tmp_path, saves, caplog):
        old, new, by_count = saves
        for made, newer, older in ((new, 2, 4), (old, 4, 2)):
            age(by_count[newer], 0)
            age(by_count[older], 100)
            caplog.clear()
            state, _ = consolidate_sharded_model_checkpoints(str(tmp_path))
            assert_same(state["wte.weight"], made.params["wte.weight"])
            before, after = caplog.text.split("passed over: ")
            assert f"rank-0-of-{newer}-model.pth" in before
            assert all(str(path) in after for path in by_count[older])

    def test_one_that_is_not_complete_is_passed_over(self, tmp_path, saves, caplog):
        old, _, by_count = saves
        by_count[2][1].unlink()
        state, _ = consolidate_sharded_model_checkpoints(str(tmp_path))
        assert_same(state["wte.weight"], old.params["wte.weight"])
        assert "rank-0-of-2-model.pth (rank 1 of 2 is missing" in caplog.text

    def test_none_is_complete(self, tmp_path, saves):
        by_count = saves[2]
        by_count[2][1].unlink()
        by_count[4][3].unlink()
        with pytest.raises(CheckpointError, match=r"is of 2 ranks and .*rank-0-of-4-model.pth of 4: choose one set"):
            consolidate_sharded_model_checkpoints(str(tmp_path))

    def test_no_file_is_newer(self, tmp_path, saves):
        age([path for paths in saves[2].values() for path in paths], 0)
        with pytest.raises(CheckpointError, match="choose one set"):
            consolidate_sharded_model_checkpoints(str(tmp_path))

    def test_torch_xlas_do_not_say_of_which_they_are(self, tmp_path):
        age(make("xla").save(tmp_path, 4), 100)
        make("xla").save(tmp_path, 2)
        with pytest.raises(CheckpointError, match="choose one set"):
            consolidate_sharded_model_checkpoints(str(tmp_path))
        consolidate_sharded_model_checkpoints(str(tmp_path), "rank-*-of-2-model.pth")

    def test_a_model_and_an_optimizer_of_different_ones(self, tmp_path, saves):
        for path in tmp_path.glob("rank-*-of-2-optimizer.pth"):
            path.unlink()
        with pytest.raises(CheckpointError, match="the model of 2 ranks and the optimizer of 4 ranks: they are not of"):
            convert(tmp_path, "model", "optimizer")
        convert(tmp_path, "optimizer")


@pytest.mark.parametrize("prefix", ["{}", "{}/", "{}/rank-", "{}/[r]ank-"])
def test_names_with_the_characters_of_patterns(tmp_path, prefix):
    folder = tmp_path / "lr[0.1]*?"
    make("rows").save(folder, 2)
    (tmp_path / "lr0").mkdir()  # what the name would match as a pattern
    state, path = consolidate_sharded_model_checkpoints(prefix.format(folder), save_path=str(tmp_path / "out.pth"))
    assert state
    for old in folder.glob("*-model.pth"):
        old.rename(tmp_path / f"run[1]-{old.name}")
    assert_same(consolidate_sharded_model_checkpoints(f"{tmp_path}/run[1]-", save_path=path)[0], state)


class TestRefused:
    """What is wrong with a set of files is said, with the file and the tensor, and nothing is written."""

    @pytest.fixture
    def paths(self, tmp_path):
        return make("rows").save(tmp_path, 4)

    @pytest.fixture(autouse=True)
    def nothing_written(self, tmp_path):
        yield
        assert not (tmp_path / "consolidated.pth").exists()
        assert not list(tmp_path.glob(".*"))

    def refuse(self, folder, match):
        with pytest.raises(CheckpointError, match=match):
            consolidate_sharded_model_checkpoints(str(folder), verify=True)

    def change(self, path, change):
        content = load(path)
        change(content)
        torch.save(content, path)

    def test_a_missing_rank(self, tmp_path, paths):
        paths[2].unlink()
        self.refuse(tmp_path, "rank 2 of 4 is missing")

    def test_no_file(self, tmp_path):
        self.refuse(tmp_path, r"\*.pth: no rank file with a 'model'")

    def test_a_rank_twice(self, tmp_path, paths):
        (tmp_path / "rank-again.pth").write_bytes(paths[1].read_bytes())
        self.refuse(tmp_path, "rank-1-of-4-model.pth and .*rank-again.pth are both rank 1")

    def test_two_saves(self, tmp_path, paths):
        self.change(paths[3], lambda content: content["shard_metadata"].update(save_id="2"))
        self.refuse(tmp_path, "rank-0-of-4-model.pth and .*rank-3-of-4-model.pth are of different saves")

    @pytest.mark.parametrize("style", ["xla-flat", "xla-dim0"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda optimizer: next(iter(optimizer["state"].values())).update(step=torch.tensor(12.0)),
            lambda optimizer: optimizer["param_groups"][0].update(lr=0.5),
        ],
        ids=["step", "lr"],
    )
    def test_two_saves_of_torch_xla_whose_optimizers_differ(self, tmp_path, style, change):
        paths = make(style).save(tmp_path, 2, separate=False)
        self.change(paths[1], lambda content: change(content["optimizer"]))
        self.refuse(tmp_path, "the optimizers in .*rank-0-of-2.pth and .*rank-1-of-2.pth have made other numbers")

    def test_a_target_that_is_no_file(self, tmp_path, paths):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        with pytest.raises(CheckpointError, match="fifo is a device or the like, which a file would replace"):
            consolidate_sharded_model_checkpoints(str(tmp_path), save_path=str(fifo))
        with pytest.raises(CheckpointError, match="fifo is a device or the like, which a file would replace"):
            object_files.save({"a": 1}, fifo)
        assert fifo.is_fifo()

    def test_text_in_place_of_a_file(self, tmp_path):
        (tmp_path / "notes.pth").write_text("hello world")
        with pytest.raises(CheckpointError, match="notes.pth cannot be read .* not a file of torch.save"):
            object_files.load(tmp_path / "notes.pth")

    def test_two_world_sizes(self, tmp_path, paths):
        make("rows").save(tmp_path, 2)
        self.refuse(tmp_path, r"rank-0-of-2-model.pth is of 2 ranks and .*rank-0-of-4-model.pth of 4")

    @pytest.mark.parametrize("size", [0, 100, -1])
    def test_a_truncated_file(self, tmp_path, paths, size):
        paths[1].write_bytes(paths[1].read_bytes()[:size])
        self.refuse(tmp_path, "rank-1-of-4-model.pth cannot be read.*truncated")

    def test_metadata_that_contradicts_itself(self, tmp_path):
        for path in make("flat").save(tmp_path, 2):
            self.change(path, lambda content: content["shard_metadata"]["flatten_info"]["h.0.flat_param_0"][1].pop())
            self.change(path, lambda content: content["shard_metadata"]["flatten_info"]["h.0.flat_param_0"][0].pop())
        self.refuse(
            tmp_path, "rank-0-of-2-model.pth: its shard_metadata makes no sense .*h.0.flat_param_0 has 55 elements"
        )

    def test_no_metadata(self, tmp_path, paths):
        self.change(paths[1], lambda content: content.pop("shard_metadata"))
        self.refuse(tmp_path, "rank-1-of-4-model.pth has no 'shard_metadata'")

    def test_metadata_that_makes_no_sense(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["shard_metadata"].update(shard_info={"": {"w": {}}}))
        self.refuse(tmp_path, "rank-0-of-4-model.pth: its shard_metadata makes no sense")

    def test_other_metadata(self, tmp_path, paths):
        self.change(
            paths[1], lambda content: content["shard_metadata"]["shard_info"]["h.0"]["w"].update(_orig_size=[9])
        )
        self.refuse(tmp_path, "rank-0-of-4-model.pth and .*rank-1-of-4-model.pth are sharded differently")

    def test_a_missing_key(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].pop("h.0.w"))
        self.refuse(tmp_path, "rank-1-of-4-model.pth has no h.0.w, which .*rank-0-of-4-model.pth has")

    def test_a_missing_key_in_all(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["model"].pop("h.0.w"))
        self.refuse(tmp_path, "rank-0-of-4-model.pth has no h.0.w")

    def test_a_wrong_shape(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].update({"h.0.w": torch.zeros(3, 6, 2)}))
        self.refuse(
            tmp_path, r"rank-1-of-4-model.pth: h.0.w is float32 \(3, 6, 2\), where rank 0 of 4 has .*\(1, 6, 2\)"
        )

    def test_a_wrong_shape_in_all(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["model"].update({"h.0.w": torch.zeros(3, 6, 2)}))
        self.refuse(tmp_path, r"rank-0-of-4-model.pth: h.0.w is float32 \(3, 6, 2\), which is not one of 4 shards of")

    def test_the_same_elements_in_another_shape(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].update({"h.0.w": torch.zeros(1, 2, 6)}))
        self.refuse(
            tmp_path, r"rank-1-of-4-model.pth: h.0.w is float32 \(1, 2, 6\), where rank 0 of 4 has .*\(1, 6, 2\)"
        )
        for path in paths:
            self.change(path, lambda content: content["model"].update({"h.0.w": torch.zeros(6, 1, 2)}))
        self.refuse(tmp_path, r"rank-0-of-4-model.pth: h.0.w is float32 \(6, 1, 2\), which is not one of 4 shards of")

    @pytest.mark.parametrize(
        ("metadata", "match"),
        [
            ({"rank": "1"}, r"rank-1-of-4-model.pth: its shard_metadata has rank = '1': a whole number"),
            ({"rank": -1}, r"rank-1-of-4-model.pth: its shard_metadata has rank = -1"),
            ({"rank": 4}, r"rank-1-of-4-model.pth: its shard_metadata has rank = 4: less than its world_size, 4"),
            ({"world_size": None}, r"rank-1-of-4-model.pth: its shard_metadata has world_size = None"),
            ({"replica": "0"}, r"rank-1-of-4-model.pth: its shard_metadata has replica = '0'"),
            ({"splits_layers": True}, r"rank-1-of-4-model.pth was saved where config.dist.tp.size split layers"),
            ({"save_id": []}, r"rank-1-of-4-model.pth: its shard_metadata has save_id = \[\]"),
            ({"shard_info": [1]}, r"rank-1-of-4-model.pth: its shard_metadata has shard_info = \[1\]: a dict"),
            ({"flatten_info": 3}, r"rank-1-of-4-model.pth: its shard_metadata has flatten_info = 3: a dict"),
            ({"buffer_info": "x"}, r"rank-1-of-4-model.pth: its shard_metadata has buffer_info = 'x': a dict"),
            ({"tied": {"a": 1}}, r"rank-1-of-4-model.pth: its shard_metadata has tied = .*: names"),
            ({"parameters": {1: 2}}, r"rank-1-of-4-model.pth: its shard_metadata has parameters = .*: a list of names"),
        ],
    )
    def test_metadata_of_other_types(self, tmp_path, paths, metadata, match):
        self.change(paths[1], lambda content: content["shard_metadata"].update(metadata))
        self.refuse(tmp_path, match)

    @pytest.mark.parametrize(
        ("metadata", "match"),
        [
            ({"world_size": 10**9}, r"rank 4, 5, .*, 11 and 999,999,988 more of 1000000000 is missing"),
            ({"tied": {"a": "b"}}, "rank-0-of-4-model.pth: its shard_metadata says that a is tied to b, which is not"),
            (
                {"tied": {"h.0.b": "h.1.b"}},
                "rank-0-of-4-model.pth: its shard_metadata says that h.0.b is tied to h.1.b, and has both",
            ),
            (
                {"buffer_info": {"h.1.scale": {}}},
                "rank-0-of-4-model.pth: its shard_metadata does not say which dtype the buffer h.1.scale had",
            ),
        ],
    )
    def test_metadata_that_lies_in_all(self, tmp_path, paths, metadata, match):
        for path in paths:
            self.change(path, lambda content: content["shard_metadata"].update(metadata))
        self.refuse(tmp_path, match)

    @pytest.mark.parametrize("size", [[-4, -6, 2], "462", [4.0], [2**63]])
    def test_a_size_that_is_none(self, tmp_path, paths, size):
        for path in paths:
            self.change(path, lambda c: c["shard_metadata"]["shard_info"]["h.0"]["w"].update(_orig_size=size))
        self.refuse(tmp_path, "rank-0-of-4-model.pth: its shard_metadata makes no sense .*h.0.w has the size")

    def test_a_parameter_twice(self, tmp_path):
        for path in make("flat").save(tmp_path, 2):
            self.change(path, lambda c: c["shard_metadata"]["flatten_info"]["h.0.flat_param_0"][0].__setitem__(1, "w"))
        self.refuse(tmp_path, "rank-0-of-2-model.pth: its shard_metadata has h.0.w twice")

    def test_a_parameter_and_a_buffer_of_one_name(self, tmp_path):
        for path in make("xla").save(tmp_path, 2):
            self.change(path, lambda content: content["model"].update({"h.0.w": torch.zeros(1)}))
        self.refuse(tmp_path, "rank-0-of-2-model.pth has h.0.w twice")

    def test_a_name_that_is_none(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["model"].update({3: torch.zeros(1)}))
        self.refuse(tmp_path, "rank-0-of-4-model.pth: its model has the key 3")

    def test_a_parameter_twice_in_the_optimizer(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda c: c["optimizer"]["param_groups"][0]["param_names"].__setitem__(0, "h.0.w"))
        with pytest.raises(CheckpointError, match="a parameter is in it twice"):
            convert(tmp_path, "optimizer")

    def test_a_folder_as_target(self, tmp_path, paths):
        (tmp_path / "there").mkdir()
        with pytest.raises(CheckpointError, match="there is a folder: name the file to write, such as .*there/model"):
            consolidate_sharded_model_checkpoints(str(tmp_path), save_path=str(tmp_path / "there"))
        assert not list((tmp_path / "there").iterdir())

    def test_one_name_for_two_files(self, tmp_path, paths):
        with pytest.raises(CheckpointError, match="x.pth would be written twice"):
            convert(tmp_path, "model", "optimizer", names={"model": "x.pth", "optimizer": "x.pth"})

    def test_no_pattern(self, tmp_path, paths):
        with pytest.raises(CheckpointError, match="is no pattern of files"):
            consolidate_sharded_model_checkpoints(str(tmp_path), "")

    @pytest.mark.parametrize("limit", [0, 500, 4000])  # the last one is found while writing
    def test_a_limit_to_the_size_of_files(self, tmp_path, paths, limit):
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        try:
            self.refuse(
                tmp_path,
                "consolidated.pth (takes more than 1,.*raise that limit|cannot be written: File too large.*nothing)",
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    def test_a_wrong_dtype(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].update({"h.0.w": torch.zeros(1, 6, 2).half()}))
        self.refuse(tmp_path, "rank-1-of-4-model.pth: h.0.w is float16")

    def test_code(self, tmp_path, paths):
        class RunsCode:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "ran"),))

        self.change(paths[1], lambda content: content.update(extra=RunsCode()))
        self.refuse(tmp_path, "rank-1-of-4-model.pth holds a posix.mkdir.*could run code")
        assert not (tmp_path / "ran").exists()

    def test_a_flipped_bit(self, tmp_path, paths):
        slot = read_pth(paths[1])["model"]["h.0.w"]
        data = bytearray(paths[1].read_bytes())
        data[slot.offset + 5] ^= 1
        paths[1].write_bytes(data)
        self.refuse(
            tmp_path, "rank-1-of-4-model.pth is damaged: the checksum of its record .*, which holds h.0.w, is wrong"
        )

    def test_a_file_without_checksums(self, tmp_path, paths):
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            self.change(paths[1], lambda content: None)
        finally:
            torch.serialization.set_crc32_options(before)
        self.refuse(tmp_path, "rank-1-of-4-model.pth has no checksums: save it again without")

    def test_a_flipped_bit_in_the_pickle(self, tmp_path, paths):
        data = paths[1].read_bytes()
        flip(paths[1], data.index(b"parameters"))
        self.refuse(tmp_path, "rank-1-of-4-model.pth cannot be read.*Bad CRC-32.*damaged")

    def test_a_flipped_bit_in_a_record_that_is_no_tensor(self, tmp_path, paths):
        with zipfile.ZipFile(paths[1]) as archive:
            (info,) = (info for info in archive.infolist() if info.filename.endswith("/serialization_id"))
        lengths = struct.unpack_from("<HH", paths[1].read_bytes(), info.header_offset + 26)
        flip(paths[1], info.header_offset + 30 + sum(lengths))
        self.refuse(tmp_path, "rank-1-of-4-model.pth is damaged: the checksum of its record .*/serialization_id is")

    def test_a_full_disk(self, tmp_path, paths, monkeypatch):
        def pwrite(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", pwrite)
        self.refuse(tmp_path, "cannot be written: No space left on device")

    def test_a_disk_that_keeps_something_else(self, tmp_path, paths, monkeypatch):
        write = conversion.write_exactly
        monkeypatch.setattr(conversion, "write_exactly", lambda file, data, at: write(file, bytes(len(data)), at))
        self.refuse(tmp_path, "was written into .* and reads back otherwise")

    def test_too_little_room(self, tmp_path, paths, monkeypatch):
        usage = type("usage", (), {"free": 1000})
        monkeypatch.setattr(conversion.shutil, "disk_usage", lambda folder: usage)
        self.refuse(tmp_path, "has 1,000 bytes left, and .* are needed")

    def test_a_target_that_is_no_folder(self, tmp_path, paths):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be written: (File exists|Not a directory)"):
            convert(tmp_path, "model", target=tmp_path / "file")

    def test_an_input_as_target(self, tmp_path, paths):
        before = paths[0].read_bytes()
        with pytest.raises(CheckpointError, match="is one of the files that are read"):
            consolidate_sharded_model_checkpoints(str(tmp_path), save_path=str(paths[0]))
        assert paths[0].read_bytes() == before

    def test_groups_without_names(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda content: content["optimizer"]["param_groups"].append({"params": []}))
        with pytest.raises(CheckpointError, match="which is which is not noted"):
            convert(tmp_path, "optimizer")

    def test_a_name_that_the_model_does_not_know(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda c: c["optimizer"]["param_groups"][0]["param_names"].__setitem__(0, "x"))
        with pytest.raises(CheckpointError, match="its optimizer has x, which shard_metadata does not know"):
            convert(tmp_path, "optimizer")

    def test_a_state_that_is_not_sharded_like_its_parameter(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda c: c["optimizer"]["state"][0].update(row=torch.zeros(77)))
        with pytest.raises(CheckpointError, match=r"the optimizer's row of wte.weight has the shape \(77,\)"):
            convert(tmp_path, "optimizer")

    def test_a_state_that_one_rank_lacks(self, tmp_path, paths):
        path = tmp_path / "rank-2-of-4-optimizer.pth"
        self.change(path, lambda content: content["optimizer"]["state"][0].pop("step"))
        with pytest.raises(
            CheckpointError, match="rank-2-of-4-optimizer.pth: the optimizer's state of wte.weight differs"
        ):
            convert(tmp_path, "optimizer")

    def test_an_optimizer_that_is_none(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda content: content.update(optimizer={"state": []}))
        with pytest.raises(CheckpointError, match="is not what an optimizer's state_dict"):
            convert(tmp_path, "optimizer")

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"num_ranks": 0}, "0 ranks cannot be written"),
            ({"num_ranks": 2, "output": Output("safetensors")}, "options of consolidating"),
            ({"num_ranks": 2, "names": {"model": "x.pth"}}, "'x.pth' has to have two stars"),
            ({"patterns": {"model": "x*.pth"}}, r"has no files x\*.pth"),
        ],
    )
    def test_options_that_make_no_sense(self, tmp_path, paths, options, match):
        with pytest.raises(CheckpointError, match=match):
            convert(tmp_path, "model", **options)

    def test_units_that_are_cut_differently(self, tmp_path):
        made = make("xla-dim0")
        made.save(tmp_path, 2)
        key = f"_fsdp_wrapped_module.h.0._fsdp_shard{SEPARATOR}_fsdp_wrapped_module{SEPARATOR}w"
        for path in tmp_path.glob("*-model.pth"):
            self.change(path, lambda content: content["model"].update({key: torch.zeros(prod((1, 128)))}))
        with pytest.raises(CheckpointError, match="is not cut like the others"):
            convert(tmp_path, "model", num_ranks=3)


def test_without_the_folder(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        convert(tmp_path / "nowhere", "model")
