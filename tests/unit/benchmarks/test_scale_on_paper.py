"""What the benchmark of large models makes of what the compilers say; and a tiny one, compiled."""

import json
import subprocess
from pathlib import Path

import pytest

from tests import forkrun
from torchacc.env import installed_version

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GIB = 2**30
COMPILED = {
    "topology": "v5p:4x4x4",
    "peak_bytes": 10 * GIB,
    "device_bytes": 95 * GIB,
    "compute_seconds": 0.5,
    "memory_seconds": 0.2,
    "wire_seconds": 0.1,
    "cycle_seconds": 1.25,
    "exchanges": [{"num_bytes": 2 * GIB}, {"num_bytes": GIB}],
    "compile_seconds": 40.0,
    "versions": {"libtpu": "1"},
    "command": 50.0,
    "host": 3 * GIB,
}


@pytest.mark.parametrize(
    ("found", "cells"),
    [
        (COMPILED, ["10.0 of 95", "500", "200", "100", "1,250", "3.0", "40", "50", "3.0"]),
        (COMPILED | {"cycle_seconds": None}, ["10.0 of 95", "500", "200", "100", "", "3.0", "40", "50", "3.0"]),
        (
            COMPILED | {"peak_bytes": 100 * GIB},
            ["100.0 of 95, does not fit", "500", "200", "100", "1,250", "3.0", "40", "50", "3.0"],
        ),
        (
            {"used": ["43.00G", "31.25G"], "command": 50.0, "host": 3 * GIB},
            ["does not fit: 43.00G of 31.25G", *[""] * 6, "50", "3.0"],
        ),
        ({"gave_up": 480.0}, ["given up after 480 s", *[""] * 8]),
        ({"failed": "error: no", "command": 5.0, "host": GIB}, ["failed", *[""] * 6, "5", "1.0"]),
    ],
)
def test_each_case_is_a_row(found, cells):
    from scale_on_paper import make_report

    report = make_report({"case": found})
    (table,) = report.tables
    assert table.rows == [["case", *cells]]
    assert len(table.header) == len(table.rows[0])
    assert [check.verdict for check in report.checks] == (["missed"] if "failed" in found else [])


def test_what_the_compiler_of_tpus_refuses_is_told_in_its_numbers():
    from scale_on_paper import refusal

    errors = (
        "error: the step does not fit a device, as its compiler says:\n"
        "  RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 43.00G of "
        "31.25G hbm. Exceeded hbm capacity by 11.75G.\n"
    )
    assert refusal(errors) == ("43.00G", "31.25G")
    assert refusal("error: config.dist.tp.size = 3") is None


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.skipif(
    any(installed_version(wheel) is None for wheel in ("libtpu", "jax-cuda12-pjrt")),
    reason="a compiler is missing: pip install 'torchacc[plan-tpu,plan-cuda]'",
)
def test_a_tiny_model_is_compiled(tmp_path):
    from _machine import checkout_environment

    path = tmp_path / "scale_on_paper.json"
    command = [forkrun.python("torch_xla"), str(BENCHMARKS / "scale_on_paper.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, env=checkout_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(path.read_text())["tables"][0]["rows"]
    assert row[0].startswith("Llama 8B, v5p:2x2x1")
    assert row[1].endswith(" of 95")
    assert all(row)
