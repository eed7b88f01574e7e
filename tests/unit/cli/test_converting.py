"""The commands that convert rank files: what they write, say, and exit with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import forkrun
from tests.unit.cli.rank_files import WEIGHT, write_rank_files
from torchacc.cli import consolidate_and_reshard_fsdp_ckpts, consolidate_sharded_model_checkpoints

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    write_rank_files(tmp_path)
    return tmp_path


def consolidate(*args):
    return consolidate_sharded_model_checkpoints.main([str(arg) for arg in args])


def reshard(*args):
    return consolidate_and_reshard_fsdp_ckpts.main([str(arg) for arg in args])


def weight(path):
    return torch.load(path, weights_only=True)["model"]["w"]


def test_with_torch_xlas_flags(folder, capsys):
    args = ("--ckpt_prefix", f"{folder}/rank-", "--ckpt_suffix", "*-model.pth", "--save_path", folder / "out.pth")
    assert consolidate(*args) == 0
    said = capsys.readouterr()
    assert said.out == f"{folder / 'out.pth'}\n"
    assert "80.0/80.0" in said.err  # the progress, in bytes
    assert torch.equal(weight(folder / "out.pth"), WEIGHT)


def test_as_a_folder_of_safetensors(folder, tmp_path):
    (folder / "config.json").write_text("{}")
    assert consolidate("--ckpt_prefix", folder, "--format", "safetensors", "--dtype", "float16", "--verify") == 0
    assert json.loads((folder / "consolidated" / "config.json").read_text()) == {"dtype": "float16"}
    assert torch.equal(load_file(folder / "consolidated" / "model.safetensors")["w"], WEIGHT.half())


@pytest.mark.parametrize("kind", ["all", "model", "optimizer"])
def test_with_torchaccs_flags_to_whole_files(folder, kind):
    assert reshard("--ckpt_dir", folder, "--ckpt_type", kind) == 0
    written = {path.name for path in folder.glob("*_consolidated.pth")}
    assert written == {f"{part}_consolidated.pth" for part in ("model", "optimizer") if kind in (part, "all")}
    if kind != "model":
        optimizer = torch.load(folder / "optimizer_consolidated.pth", weights_only=True)["optimizer"]
        assert torch.equal(optimizer["state"][0]["exp_avg"], WEIGHT * 2)


@pytest.mark.parametrize("kind", ["all", "model", "optimizer"])
def test_with_torchaccs_flags_to_other_ranks(folder, kind, tmp_path):
    args = (
        "--ckpt_dir",
        folder,
        "--ckpt_type",
        kind,
        "--reshard_num",
        3,
        "--save_dir",
        tmp_path / "new",
        "--workers",
        1,
    )
    assert reshard(*args, "--model_save_name_pattern", "m-*-*.pth", "--optimizer_save_name_pattern", "o-*-*.pth") == 0
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == [f"{letter}-{rank}-3.pth" for letter in "mo" if kind[0] in (letter, "a") for rank in range(3)]
    if kind != "optimizer":
        rows = torch.cat([weight(tmp_path / "new" / f"m-{rank}-3.pth") for rank in range(3)])
        assert torch.equal(rows[:5], WEIGHT)


def test_other_names(folder):
    for path in folder.glob("*-model.pth"):
        path.rename(path.with_name(f"x-{path.name}"))
    assert reshard("--ckpt_dir", folder, "--ckpt_type", "model", "--model_ckpt_name_pattern", "x-*.pth") == 0
    assert torch.equal(weight(folder / "model_consolidated.pth"), WEIGHT)


def test_a_dry_run_says_what_it_would_write(folder, capsys):
    before = set(folder.iterdir())
    assert reshard("--ckpt_dir", folder, "--dry-run") == 0
    assert "  w float32 (5, 4) <- rank-0-of-2-model.pth[0:12], rank-1-of-2-model.pth[0:8]\n" in capsys.readouterr().out
    assert set(folder.iterdir()) == before


def test_a_mistake_is_one_line_and_exit_status_2(folder, capsys):
    (folder / "rank-1-of-2-model.pth").unlink()
    assert reshard("--ckpt_dir", folder) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert "rank 1 of 2 is missing" in said.err


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--max-shard-size", "5GB"], "--max-shard-size is for --format safetensors"),
        (["--max-shard-size", "5 apples"], "'5 apples' is not a size"),
        (["--workers", "0"], "'0' is not a number from 1 on"),
    ],
)
def test_an_option_that_makes_no_sense(folder, args, match, capsys):
    try:
        status = consolidate("--ckpt_prefix", folder, *args)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert match in capsys.readouterr().err


def test_as_a_module(folder):
    module = "torchacc.cli.consolidate_sharded_model_checkpoints"
    done = forkrun.run("-m", module, "--ckpt_prefix", folder, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert torch.equal(weight(folder / "consolidated.pth"), WEIGHT)
