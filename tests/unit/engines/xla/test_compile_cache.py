"""XLA's CPU client writes compiled programs, and cannot read them: what can be seen here is that they are written."""

import pytest

from tests import forkrun

PROGRAM = """
import sys
from pathlib import Path
import torch
from torchacc.engines.xla import runtime
from torchacc.errors import EngineError

folder = Path(sys.argv[1])
runtime.open_compile_cache(folder / "mine")
runtime.start(num_devices=1, spmd=False)
assert float((torch.ones(3, device="xla") * 2.5).sum()) == 7.5
runtime.open_compile_cache(folder / "mine")
try:
    runtime.open_compile_cache(folder / "other")
except EngineError as error:
    print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.xla
def test_programs_are_kept_in_one_folder_for_the_life_of_a_process(tmp_path):
    done = forkrun.run("-c", PROGRAM, tmp_path, imports=["torch_xla"], timeout=300)
    assert done.returncode == 0, done.stderr
    assert [*(tmp_path / "mine").iterdir()]
    assert not (tmp_path / "other").exists()
    assert "refused: compute.compile_cache asks for" in done.stdout
