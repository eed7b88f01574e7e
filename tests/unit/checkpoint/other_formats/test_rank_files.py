"""Rank files become full tensors, or those of another number of ranks, bit for bit."""

import json
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trees import assert_same
from tests.unit.checkpoint.other_formats.made_rank_files import (
    FROZEN,
    OURS,
    SHAPES,
    STYLES,
    assert_sealed,
    convert,
    flip,
    load,
    make,
)
from torchacc.checkpoint.other_formats import new_tensors
from torchacc.checkpoint.other_formats.conversion import execute
from torchacc.checkpoint.other_formats.pth import read_pth, tensor_records
from torchacc.checkpoint.other_formats.rank_conversion import (
    Output,
    consolidate_sharded_model_checkpoints,
    plan_conversion,
)
from torchacc.checkpoint.own_format import locks
from torchacc.errors import CheckpointError


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
