"""The memory plan of the native engine, beside what PyTorch's CPU allocator gives away in a step."""

import json
from pathlib import Path

import pytest

from tests import forkrun

pytest.importorskip("transformers")

WORKER = Path(__file__).with_name("native_worker.py")
CASES = {
    1: (
        "gpt2 bf16",
        "llama",
        "llama recomputed stepping",
        "llama accumulated",
        "llama recomputed",
        "llama products-kept",
        "adapters bf16",
        "deepseek recomputed",
    ),
    2: (
        "adapters recomputed",
        "gpt2 recomputed",
        "llama recomputed stepping",
        "gpt2 products-kept",
        "llama sp=2 ring=2",
        "llama tp=2",
        "mixtral ep=2",
        "llama bf16 recomputed accumulated",
        "llama pp=2 interleaved",
        "adapters pp=2 1f1b recomputed",
    ),
    4: (
        "llama pp=2",
        "llama sp=4 ring=2 recomputed",
        "llama tp=2 recomputed",
        "mixtral ep=2 tp=2",
        "mixtral ep=2 pp=2",
        "llama sp=2 pp=2",
    ),
}
"""By the number of processes."""
LEFT_OUT = {
    "llama recomputed",
    "gpt2 recomputed",
    "gpt2 products-kept",
    "llama sp=2 ring=2",
    "llama tp=2 recomputed",
    "llama pp=2",
    "llama sp=2 pp=2",
    "mixtral ep=2",
}
"""Others have each half of these, some on another number of processes; they run with `--full-contract`."""
TOLERANCE = 0.1
AHEAD = 0.15
"""Of small models, what a process holds beside that where others are ahead: what they have sent, until it is used."""


ATTEMPTS = 4
"""How often a case is looked at until no process was ahead by so much; a plan that is wrong is so each time."""


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", CASES)
def test_the_plan_is_within_a_tenth_of_what_is_held(num_processes, tmp_path, request):
    below = TOLERANCE + (AHEAD if num_processes > 1 else 0.0)
    is_full = request.config.getoption("--full-contract")
    left = [case for case in CASES[num_processes] if is_full or case not in LEFT_OUT]
    for attempt in range(ATTEMPTS if num_processes > 1 else 1):
        off_by = measure(num_processes, left, tmp_path / str(attempt))
        left = [case for case, part in off_by.items() if not -below < part < TOLERANCE]
        if not left:
            break
    else:
        pytest.fail(str(off_by))
    if num_processes == 1:  # Without what was summed before it would be off by more. Of several, AHEAD hides that.
        assert abs(off_by["llama accumulated"]) < TOLERANCE / 2, off_by


def measure(num_processes, cases, folder):
    """Return by how much the plan of each case is off, as a part of what is held."""
    folder.mkdir()
    num_ranks = num_processes if num_processes > 1 else 0
    done = forkrun.run(WORKER, folder, *cases, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((folder / str(rank) / "found.json").read_text()) for rank in range(num_processes)]
    # A plan is of the device that needs the most, as stages differ.
    off_by = {case: planned / max(each[case][1] for each in found) - 1 for case, (planned, _) in found[0].items()}
    assert off_by.keys() == set(cases)
    return off_by
