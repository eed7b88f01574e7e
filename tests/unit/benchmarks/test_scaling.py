"""What the benchmark of scaling makes of its measurements; what it measures is nowhere asserted."""

import pytest


@pytest.fixture
def report_of(results_of):
    def make(secs, peaks):
        from scaling import CASES, Bytes, make_report

        cases = [case for case in CASES if case.name in secs]
        found = {name: Bytes(peak // 2, peak) for name, peak in peaks.items()}
        return make_report(cases, results_of(secs), found, [], rounds=2, steps=1)

    return make


def test_a_ratio_is_that_to_one_device_and_says_what_was_measured(report_of):
    report = report_of(
        {"native-1": [1.0, 2.0], "native-4": [2.0, 5.0]}, {"native-1": 40_000_000, "native-4": 10_000_000}
    )
    times, sizes = report.tables
    assert [row[4:] for row in times.rows] == [["", "", ""], ["2.250", "2.125 .. 2.375", "native-1"]]
    assert [row[:3] for row in sizes.rows] == [["native-1", "20.0", "40.0"], ["native-4", "5.0", "10.0"]]
    assert report.reading == [
        "`native`: 4 devices take 2.25 of the time of one for the same global batch, on the same cores, and each needs "
        "25% of its bytes."
    ]
    curve, memory = report.series
    assert (curve.x, curve.y) == ([1.0, 4.0], [1.0, 2.25])
    assert (memory.x, memory.y) == ([1.0, 4.0], [40.0, 10.0])


def test_the_rival_is_raw_fsdp2_on_as_many_devices(report_of):
    secs = {"native-1": [1.0], "native-2": [3.0], "fsdp2-2": [2.0]}
    report = report_of(secs, {"native-1": 9, "native-2": 4, "fsdp2-2": 4})
    time, memory = report.comparisons
    assert (time.what, time.rival) == ("step time of native-2", "raw FSDP2 on 2 processes")
    assert time.ratio == 1.5
    assert time.loses
    assert time.reason
    assert memory.ratio == 1.0
    assert not memory.loses


def test_a_case_that_failed_is_a_missed_check():
    from _report import Result
    from scaling import CASES, make_report

    case = CASES[0]
    report = make_report([case], {case.name: Result(error="killed")}, {}, [], rounds=1, steps=1)
    assert [check.verdict for check in report.checks] == ["missed", "held"]
    assert "killed" in report.checks[0].text
    assert report.tables[0].rows == []


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_get_what_a_launcher_would_give_them(processes, monkeypatch):
    from _teams import launch_environment

    monkeypatch.setenv("WORLD_SIZE", "7")
    found = launch_environment(0, processes, 1234, {"PJRT_DEVICE": "CPU"})
    assert found.get("WORLD_SIZE") == ("2" if processes == 2 else None)
    assert found["PJRT_DEVICE"] == "CPU"
