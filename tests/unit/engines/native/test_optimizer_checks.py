"""Torchao's optimizers train natively, and what cannot be right with them is refused."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests import forkrun

PROGRAM = Path(__file__).with_name("low_precision_program.py")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.slow
def test_torchaos_optimizers(tmp_path):
    env = {**forkrun.environment(), "TORCHDYNAMO_DISABLE": "1"}  # torchao compiles its steps, each shape for itself
    for num_ranks in (1, 2):  # two go on with what one has saved
        out = tmp_path / f"of-{num_ranks}"
        out.mkdir()
        done = forkrun.run(PROGRAM, out, tmp_path, num_ranks=num_ranks, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        for rank in range(num_ranks):
            found = json.loads((out / str(rank) / "found.json").read_text())
            assert len(found) == 7
            failed = {case: why for case, why in found.items() if why is not None}
            assert not failed, "\n".join(f"rank {rank} of {num_ranks}, {case}: {why}" for case, why in failed.items())
