"""`torchacc consolidate`, `reshard` and `convert`, on the formats that they tell apart."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.cli.rank_files import WEIGHT, write_rank_files
from torchacc.checkpoint.detect_format import format_of
from torchacc.cli.main import main
from torchacc.errors import CheckpointError


@pytest.fixture
def ranks(tmp_path):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    write_rank_files(folder)
    return folder


@pytest.fixture
def hf(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": WEIGHT}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def run(*arguments):
    return main([str(argument) for argument in arguments])


def refused(capsys, *arguments):
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    return said


def test_consolidate_writes_the_whole_model(ranks, tmp_path, capsys):
    assert run("consolidate", ranks) == 0
    assert capsys.readouterr().out == f"{ranks / 'consolidated.pth'}\n"
    assert torch.equal(torch.load(ranks / "consolidated.pth", weights_only=True)["model"]["w"], WEIGHT)
    assert run("consolidate", ranks, "--output", tmp_path / "out.pth", "--dtype", "float16", "--verify") == 0
    assert torch.equal(torch.load(tmp_path / "out.pth", weights_only=True)["model"]["w"], WEIGHT.half())


def test_a_pickle_is_not_named_as_safetensors(ranks, tmp_path, capsys):
    for arguments in (("consolidate", ranks, "--output"), ("convert", ranks, "--to", "pth")):
        said = refused(capsys, *arguments, tmp_path / "model.safetensors")
        assert "model.safetensors would be a pickle, as the format is pth: name it .pth" in said
    assert not (tmp_path / "model.safetensors").exists()


def test_consolidate_knows_what_is_whole_and_what_is_not_its_own(hf, tmp_path, capsys):
    said = refused(capsys, "consolidate", hf, "--output", tmp_path / "out.pth")
    assert "from_pretrained() opens it" in said
    assert f"`torchacc convert {hf} NEW --to dcp`" in said
    assert run("convert", hf, tmp_path / "dcp", "--to", "dcp") == 0
    capsys.readouterr()  # the bar
    assert f"torchacc convert {tmp_path / 'dcp'} NEW --to torchacc" in refused(capsys, "consolidate", tmp_path / "dcp")


@pytest.mark.parametrize("part", ["all", "model", "optimizer"])
def test_reshard_writes_each_part_for_other_ranks(ranks, tmp_path, part):
    assert run("reshard", ranks, "--ranks", 3, "--output", tmp_path / "new", "--part", part) == 0
    parts = ("model", "optimizer") if part == "all" else (part,)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        f"rank-{rank}-of-3-{each}.pth" for each in parts for rank in range(3)
    }


def test_reshard_refuses_what_needs_none(ranks, hf, capsys):
    assert "takes it at any number of ranks" in refused(capsys, "reshard", hf, "--ranks", 2)
    assert f"torchacc consolidate {ranks}" in refused(capsys, "reshard", ranks, "--ranks", 1)


def test_rank_files_become_every_form_they_can(ranks, hf, tmp_path):
    assert run("convert", ranks, tmp_path / "a.pth", "--to", "pth") == 0
    assert torch.equal(torch.load(tmp_path / "a.pth", weights_only=True)["model"]["w"], WEIGHT)
    assert run("convert", ranks, tmp_path / "b", "--to", "hf", "--config-from", hf) == 0
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["w"], WEIGHT)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"model_type": "gpt2"}
    assert run("convert", ranks, tmp_path / "c", "--to", "rank-files", "--ranks", 4) == 0
    assert run("consolidate", tmp_path / "c", "--output", tmp_path / "d.pth") == 0
    assert torch.equal(torch.load(tmp_path / "d.pth", weights_only=True)["model"]["w"], WEIGHT)


def test_dcp_there_and_back(hf, tmp_path, capsys):
    assert run("convert", hf, tmp_path / "dcp", "--to", "dcp") == 0
    assert f"100%|██████████| {WEIGHT.nbytes:.1f}/{WEIGHT.nbytes:.1f}" in capsys.readouterr().err
    assert format_of(tmp_path / "dcp") == "dcp"
    assert run("convert", tmp_path / "dcp", tmp_path / "back", "--to", "torchacc", "--config-from", hf) == 0
    assert f"100%|██████████| {WEIGHT.nbytes:.1f}/{WEIGHT.nbytes:.1f}" in capsys.readouterr().err
    assert format_of(tmp_path / "back") == "torchacc"
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["w"], WEIGHT)
    assert (tmp_path / "back" / "config.json").exists()


def test_convert_refuses_and_says_what_it_can(ranks, hf, tmp_path, capsys):
    new = tmp_path / "new"
    assert "which can be made hf, pth, rank-files, and not dcp" in refused(capsys, "convert", ranks, new, "--to", "dcp")
    assert "which can be made dcp, and not pth" in refused(capsys, "convert", hf, new, "--to", "pth")
    assert "is there already" in refused(capsys, "convert", hf, ranks, "--to", "dcp")
    assert "write --ranks 8" in refused(capsys, "convert", ranks, new, "--to", "rank-files")
    assert "--ranks is for" in refused(capsys, "convert", ranks, new, "--to", "pth", "--ranks", 2)
    assert "--ranks 1" in refused(capsys, "convert", ranks, new, "--to", "rank-files", "--ranks", 1)
    assert "--verify is for rank files" in refused(capsys, "convert", hf, new, "--to", "dcp", "--verify")
    assert not new.exists()


def test_a_folder_without_a_checkpoint_is_told(ranks, hf, tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        format_of(tmp_path / "nothing")
    (tmp_path / "runs" / "step-2").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"none of \.metadata"):
        format_of(tmp_path / "runs")
    (tmp_path / "runs" / "step-2" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"runs/step-2 is a checkpoint"):
        format_of(tmp_path / "runs")
    (hf / "rank-0-of-1.pth").touch()
    with pytest.raises(CheckpointError, match="several formats, hf and rank-files"):
        format_of(hf)
