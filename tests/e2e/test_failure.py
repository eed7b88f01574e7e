"""One rank fails: the job ends, with that rank's traceback as the last one."""

import subprocess
from pathlib import Path

import pytest

from tests import forkrun

SCRIPT = Path(__file__).with_name("crashing_script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", pytest.param("xla", marks=pytest.mark.xla)])
def test_the_failing_rank_has_the_last_word(backend):
    python = forkrun.python("torch_xla")
    done = subprocess.run(
        [python, *TORCHRUN, SCRIPT, backend], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode != 0
    last = done.stderr.rpartition("Traceback (most recent call last)")[2]
    assert "rank one has had enough" in last
    assert "Connection closed" not in done.stderr  # what the other ranks would say of it
    assert "[Gloo]" not in done.stdout
