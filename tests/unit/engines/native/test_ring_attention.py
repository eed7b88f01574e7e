"""Attention in a ring of processes has the numbers of attention to all tokens, as near as one device comes to them."""

import json
from pathlib import Path

from tests import forkrun

PROGRAM = Path(__file__).with_name("ring_program.py")
NUM_RANKS = 4


def check(folder: Path) -> None:
    """Check what all ranks have found."""
    for rank in range(NUM_RANKS):
        for case, (ring, alone) in json.loads((folder / f"{rank}.json").read_text()).items():
            assert ring < max(5 * alone, 1e-14), f"rank {rank}, {case}: {ring:.1e}, and {alone:.1e} on one device"


def test_a_ring_has_the_numbers_of_all_tokens(tmp_path):
    done = forkrun.run(PROGRAM, tmp_path, num_ranks=NUM_RANKS)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path)
