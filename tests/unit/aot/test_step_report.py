"""What the report of a compiled step says of its memory."""

import dataclasses

import pytest

from torchacc.aot.step_report import StepReport

GIB = 2**30
REPORT = StepReport(
    topology="v5e:2x4",
    num_devices=8,
    chip="TPU v5e",
    memory={"arguments": 2 * GIB, "temporary": 10 * GIB, "outputs": 0},
    peak_bytes=12 * GIB,
    device_bytes=16 * GIB,
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
