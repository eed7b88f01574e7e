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


@pytest.mark.parametrize(("secs", "verdict"), [(1.0, "held"), (2.0, "missed")])
def test_time_is_judged(secs, verdict):
    from _checkpoint_cases import Faster
    from checkpoint import judge

    check = judge(Faster("torchacc", "torch_xla", 2.0), make_runs(own=[secs], other=[3.0]))
    assert check.text.startswith("torchacc >= 2.0 times faster than torch_xla, was ")
    assert check.verdict == verdict


@pytest.mark.parametrize(("extra", "verdict"), [(10, "held"), (151, "missed")])
def test_memory_is_judged(extra, verdict):
    from _checkpoint_cases import Lean
    from checkpoint import judge

    check = judge(Lean("torchacc", 150.0), make_runs([1.0], [3.0], extra * 10**6))
    assert check.text.endswith(f"took {extra} at most")
    assert check.verdict == verdict


def test_the_report_has_every_case_and_names_what_loses_with_its_reason():
    from _checkpoint_cases import AGAINST_DCP, CASES, LIVE_REFERENCES
    from checkpoint import make_report

    secs = dict.fromkeys(LIVE_REFERENCES, [1.0]) | {"load": [2.0], "async save": [0.05]}
    secs |= {"step": [1.0], "step beside": [1.5]}
    live = {"bytes": 3 * 10**8, "secs": secs, "other_cores": 0.0}
    report = make_report(make_runs([1.0], [3.0], extra_bytes=10**6), live, agree=False)
    consolidated, of_live = report.tables
    assert [row[0] for row in consolidated.rows] == [case.name for case in CASES]
    assert [row[0] for row in of_live.rows] == list(LIVE_REFERENCES)
    assert report.checks[0].verdict == "missed"
    assert [(each.what, each.reason) for each in report.comparisons if each.loses] == [
        ("load of a live model", AGAINST_DCP["load"])
    ]
