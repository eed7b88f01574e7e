"""The pure half of the checkpoint benchmark; what it measures is nowhere asserted."""

import pytest


def make_runs(own, other, extra_bytes=0):
    def runs(times):
        return [{"secs": secs, "cpu_secs": 2 * secs, "extra_bytes": extra_bytes, "digest": 1} for secs in times]

    return {"torchacc, verified": runs(own), "torchacc": runs(own), "torch_xla": runs(other)}


def test_how_much_faster_is_taken_within_a_round():
    from checkpoint import times_faster

    slowed_in_round_1 = make_runs(own=[1.0, 10.0, 1.0], other=[3.0, 30.0, 3.0])
    assert times_faster(slowed_in_round_1, "torchacc", "torch_xla") == pytest.approx((3.0, 3.0, 3.0))


@pytest.mark.parametrize(("secs", "verdict"), [(1.0, "HELD"), (2.0, "MISSED")])
def test_time_is_judged(secs, verdict):
    from _checkpoint_cases import Faster
    from checkpoint import judge

    line = judge(Faster("torchacc", "torch_xla", 2.0), make_runs(own=[secs], other=[3.0]))
    assert line.startswith("torchacc >= 2.0 times faster than torch_xla: ")
    assert line.endswith(verdict)


@pytest.mark.parametrize(("extra", "line"), [(10, "10 at most, HELD"), (151, "151 at most, MISSED")])
def test_memory_is_judged(extra, line):
    from _checkpoint_cases import Lean
    from checkpoint import judge

    assert judge(Lean("torchacc", 150.0), make_runs([1.0], [3.0], extra * 10**6)) == f"torchacc <= 150 MB: {line}"


def test_the_report_has_every_case():
    from _checkpoint_cases import CASES
    from checkpoint import make_report

    report = make_report(make_runs([1.0], [3.0]), agree=False, rounds=1)
    assert all(f"| {case.name} " in report for case in CASES)
    assert "THE RESULTS DIFFER" in report
