"""What the report of a compiled step says of its memory, and of time."""

import dataclasses

import pytest

from torchacc.aot.step_report import Exchange, StepReport

GIB = 2**30
REPORT = StepReport(
    topology="v5e:2x4",
    num_devices=8,
    chip="TPU v5e",
    memory={"arguments": 2 * GIB, "temporary": 10 * GIB, "outputs": 0},
    peak_bytes=12 * GIB,
    device_bytes=16 * GIB,
    refuses_too_large=True,
    planned_bytes=None,
    largest=[],
    exchanges=[],
    flops=1e12,
    bytes_accessed=1e9,
    compute_seconds=0.1,
    memory_seconds=0.1,
    wire_seconds=0.1,
    cycles=1_000_000,
    cycle_seconds=0.1,
    compile_seconds=5.0,
    versions={"libtpu": "1"},
)


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [
        (12 * GIB, "fits: 12.00 GiB of 16.00 GiB"),
        (17 * GIB, "compiled, but sums up to more than a device has: 17.00 GiB of 16.00 GiB"),
    ],
)
def test_only_what_a_device_holds_is_said_to_fit(peak: int, verdict: str) -> None:
    report = dataclasses.replace(REPORT, peak_bytes=peak)
    assert report.as_text().splitlines()[1].startswith(verdict)
    assert verdict in report.as_html("Step")


def test_what_no_compiler_has_refused_does_not_fit() -> None:
    report = dataclasses.replace(REPORT, peak_bytes=17 * GIB, refuses_too_large=False)
    assert report.as_text().splitlines()[1].startswith("does not fit: 17.00 GiB of 16.00 GiB")


def test_a_compiler_without_cycles_is_left_out_of_the_bounds() -> None:
    exchange = Exchange("all-gather", 8, 3, GIB, 2, exposed_seconds=None)
    report = dataclasses.replace(REPORT, cycles=None, cycle_seconds=None, exchanges=[exchange])
    text = report.as_text()
    assert "3 all-gather  of 8  1.00 GiB  2 beside work\n" in text
    assert "bounds of a step, by published speeds. Estimates, never run" in text
    assert "cycles" not in text
    assert "exposed" not in text
    assert "cycles" not in report.as_html("Step")
