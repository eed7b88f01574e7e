"""What the first version wrote still loads, bit for bit: `data/written_by_0_1`, as main d34221d left it."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import forkrun
from torchacc.cli.main import main

SCRIPT = Path(__file__).with_name("earlier_files.py")
FILES = Path(__file__).parents[1] / "data" / "written_by_0_1"


@pytest.fixture
def files(tmp_path):
    return shutil.copytree(FILES, tmp_path / "files")  # a manager locks its folder, and loading is not to change these


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    ["native", *(pytest.param(f"xla-{kind}", marks=pytest.mark.xla) for kind in ("multiprocess-flat", "spmd"))],
)
def test_every_engine_loads_the_files_of_all_engines(files, engine):
    imports = ["torch_xla"] if engine.startswith("xla") else []
    num_ranks = 0 if engine == "xla-spmd" else 2
    done = forkrun.run(SCRIPT, "read", engine, files, num_ranks=num_ranks, imports=imports, merged=True)
    assert done.returncode == 0, done.stdout


def run(*arguments: object) -> None:
    assert not main([str(argument) for argument in arguments])


@pytest.mark.parametrize("engine", ["native", "xla-multiprocess", "xla-multiprocess-flat"])
def test_rank_files_become_those_of_another_number(files, engine, tmp_path):
    expected = load_file(files / engine / "expected.safetensors")
    run("reshard", files / engine / "ranks", "--part", "model", "--ranks", 3, "--output", tmp_path / "three")
    run("consolidate", tmp_path / "three", "--output", tmp_path / "full", "--format", "safetensors")
    for name, tensor in load_file(tmp_path / "full" / "model.safetensors").items():
        assert tensor.equal(expected[f"model/{name}"])


def test_a_dcp_folder_becomes_a_checkpoint(files, tmp_path):
    expected = load_file(files / "native" / "expected.safetensors")
    run("convert", files / "native" / "dcp", tmp_path / "ckpt", "--to", "torchacc")
    for name, tensor in load_file(tmp_path / "ckpt" / "model.safetensors").items():
        assert tensor.equal(expected[f"model/{name}"])
    for name, tensor in load_file(tmp_path / "ckpt" / "optimizer.safetensors").items():
        assert tensor.equal(expected[name])
