"""Files that stock torch_xla saved: put together as it does that itself, and resharded as it would have saved them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forkrun
from tests.trees import assert_same
from torchacc.checkpoint.other_formats.conversion import execute
from torchacc.checkpoint.other_formats.rank_conversion import consolidate_sharded_model_checkpoints, plan_conversion

pytestmark = [pytest.mark.slow, pytest.mark.xla]

ENVIRON = os.environ | {"PJRT_DEVICE": "CPU"}
SCRIPT = Path(__file__).with_name("stock_rank_files_script.py")
VARIANTS = ["flat", "separate", "dim-0", "bf16"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what 2 ranks saved and what 4 ranks did."""
    folder = tmp_path_factory.mktemp("saved")
    for world in (2, 4):
        done = forkrun.run(SCRIPT, folder / str(world), num_ranks=world, imports=["torch_xla"], env=ENVIRON)
        assert done.returncode == 0, done.stderr
    return folder


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def reshard(old: Path, new: Path, num_ranks: int) -> None:
    names = {"model": "model-*-of-*.pth", "optimizer": "optimizer-*-of-*.pth"}
    patterns = None if any(old.glob("rank-*")) else {part: f"{part}-*.pth" for part in names}
    plan = plan_conversion(old, ["model", "optimizer"], num_ranks=num_ranks, target=new, names=names, patterns=patterns)
    execute(plan, verify=True)


def assert_resharded_to(folder: Path, originals: Path) -> None:
    """Compare converted files with those of torch_xla, which has the model and the optimizer in one."""
    for path in originals.glob("rank-*.pth"):
        expected = load(path)
        for part in ("model", "optimizer"):
            found = load(folder / path.name.replace("rank", part))
            assert found["shard_metadata"].pop("resharded") is True
            assert_same(found, {part: expected[part], "shard_metadata": expected["shard_metadata"]})


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_what_torch_xla_makes_of_it(saved: Path, variant: str) -> None:
    found, _ = consolidate_sharded_model_checkpoints(f"{saved / '2' / variant}/", "rank-*.pth")
    expected = load(saved / "2" / f"{variant}.pth")["model"]
    if variant == "bf16":  # torch_xla leaves buffers in the dtype of computing
        for name in ("blocks.0.scale", "blocks.1.scale"):
            assert expected[name].dtype == torch.bfloat16
            expected[name] = expected[name].float()
    assert_same(dict(found), dict(expected))


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(saved: Path, variant: str, tmp_path: Path) -> None:
    reshard(saved / "2" / variant, tmp_path / "3", 3)
    reshard(tmp_path / "3", tmp_path / "2", 2)
    assert_resharded_to(tmp_path / "2", saved / "2" / variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resharded_is_what_that_many_ranks_save(saved: Path, variant: str, tmp_path: Path) -> None:
    reshard(saved / "2" / variant, tmp_path, 4)
    assert_resharded_to(tmp_path, saved / "4" / variant)
