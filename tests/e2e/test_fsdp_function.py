"""The examples of seed 000 run as they stand, in one process without any set-up and under torchrun."""

import json
from pathlib import Path

import pytest

from tests import forkrun

SCRIPT = Path(__file__).with_name("fsdp_script.py")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_examples_of_the_seed(num_processes):
    done = forkrun.run(SCRIPT, num_ranks=num_processes if num_processes > 1 else 0)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    inputs = found.pop("inputs")
    assert inputs["difference"] < 1e-5
    assert inputs["devices"] == [inputs["device"]]
    assert found["basic"]["difference"] < 1e-6
    assert found["completed"]["difference"] < 1e-6
    assert 0 < found["advanced"]["difference"] < 1e-2
    assert all(case["dtypes"] == ["torch.float32"] for case in found.values())
    assert {name: case["num_units"] for name, case in found.items()} == {"basic": 1, "completed": 2, "advanced": 1}
    assert found["basic"]["share"] == found["completed"]["share"] == 1
    assert found["advanced"]["share"] == pytest.approx(1 / num_processes, rel=1e-2)
    assert found["advanced"]["compute_dtype"] == "bfloat16"
