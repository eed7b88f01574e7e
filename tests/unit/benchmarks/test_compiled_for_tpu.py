"""What the benchmark of compiled programs makes of the compiler's numbers; and both programs, where it is installed."""

import runpy
import subprocess
from pathlib import Path

import pytest

from tests import forkrun
from torchacc.env import installed_version

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
OURS, JAX, OTHER = "torchacc, kernel", "JAX, kernel", "JAX, kernel, bfloat16 throughout"


@pytest.fixture
def report_of():
    def make(numbers, *, judges=True):
        """Return the report of cases, each with its memory, bytes moved, cycles and bytes sent."""
        from compiled_for_tpu import SIZE, make_report

        keys = ("memory", "moved", "cycles", "sent")
        rest = {"exchanges": "1 all-reduce", "secs": 60.0, "versions": {"jax": "0.8.0"}}
        found = {name: dict(zip(keys, each, strict=True)) | rest for name, each in numbers.items()}
        return make_report(found, {}, SIZE, judges=judges)

    return make


def test_each_number_has_a_limit_beside_jax_in_the_same_dtypes(report_of):
    report = report_of({OURS: (105e7, 110e7, 111e4, 106e4), JAX: (1e9, 1e9, 1e6, 1e6)})
    assert [check.verdict for check in report.checks] == ["held", "held", "missed", "missed"]
    assert [round(each.ratio, 2) for each in report.comparisons] == [1.05, 1.1, 1.11, 1.06]


def test_beside_other_dtypes_a_number_is_only_told(report_of):
    report = report_of({OURS: (4, 4, 4, 4), OTHER: (1, 1, 1, 1)})
    assert {check.verdict for check in report.checks} == {"reported"}
    assert report.comparisons == []


def test_beside_fsdp_v2_two_numbers_of_what_is_the_default_have_limits(report_of):
    theirs = {"FSDPv2, plain attention": (10, 10, 10, 10)}
    report = report_of({"torchacc, attention in blocks": (8, 8, 8, 9), **theirs})
    assert [check.verdict for check in report.checks] == ["held", "missed"]
    assert [each.rival for each in report.comparisons] == ["torch_xla's FSDPv2 class"] * 4
    assert {check.verdict for check in report_of({"torchacc, plain attention": (8, 8, 8, 9), **theirs}).checks} == {
        "reported"
    }


def test_a_small_model_is_not_judged(report_of):
    assert report_of({OURS: (4, 4, 4, 4), JAX: (1, 1, 1, 1)}, judges=False).checks == []


def test_a_case_that_failed_is_missed():
    from compiled_for_tpu import SIZE, make_report

    (check,) = make_report({}, {JAX: "ended with 1"}, SIZE, judges=True).checks
    assert str(check) == "JAX, kernel ended with 1: MISSED"


def test_a_run_of_all_leaves_out_what_needs_an_extra(monkeypatch, capsys):
    program = runpy.run_path(str(BENCHMARKS / "__main__.py"))["runnable"].__globals__
    monkeypatch.setitem(program, "missing_extra", {"compiled_for_tpu": "plan-tpu"}.get)
    assert list(program["runnable"](["memory", "compiled_for_tpu"])) == ["memory"]
    assert "compiled_for_tpu is left out: it needs `pip install 'torchacc[plan-tpu]'`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.skipif(
    installed_version("libtpu") is None, reason="no compiler of TPUs is installed: pip install 'torchacc[plan-tpu]'"
)
def test_both_programs_are_compiled(tmp_path):
    from _machine import checkout_environment
    from _results import read

    path = tmp_path / "compiled_for_tpu.json"
    command = [
        forkrun.python("torch_xla"),
        str(BENCHMARKS / "compiled_for_tpu.py"),
        "--quick",
        "--json",
        str(path),
        "--cases",
        OURS,
        JAX,
    ]
    done = subprocess.run(
        command,
        env=checkout_environment() | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = read(path)
    assert [row[0] for row in report.tables[0].rows] == [OURS, JAX]
    assert report.tables[0].rows[0][1:] != report.tables[0].rows[1][1:]
