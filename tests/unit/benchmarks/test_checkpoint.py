"""The pure half of the checkpoint benchmark; what it measures is nowhere asserted."""

import pytest


def make_runs(own, other, extra_bytes=0):
    def runs(times):
        return [{"secs": secs, "cpu_secs": 2 * secs, "extra_bytes": extra_bytes, "digest": 1} for secs in times]

    return {"torchacc, verified": runs(own), "torchacc": runs(own), "torch_xla": runs(other)}


@pytest.mark.parametrize(("extra", "verdict"), [(10, "held"), (301, "missed")])
@pytest.mark.parametrize(("secs", "of_time"), [(3.0, "held"), (4.0, "missed")])
def test_time_and_memory_of_consolidation_are_judged(secs, of_time, extra, verdict):
    checks = report_of(make_runs([secs], [3.0], extra * 10**6)).checks
    assert checks[1].text.startswith("time of consolidation of torchacc / torch_xla <= 1.00, is ")
    assert checks[1].verdict == of_time
    assert checks[2].text.endswith(f"took {extra} at most")
    assert checks[2].verdict == verdict


def report_of(runs, **secs):
    from _checkpoint_cases import LIVE_REFERENCES
    from checkpoint import make_report

    found = dict.fromkeys(LIVE_REFERENCES, [1.0]) | secs
    return make_report(runs, {"bytes": 3 * 10**8, "secs": found, "other_cores": 0.0}, agree=False)


def test_the_report_has_every_case_and_names_what_loses_with_its_reason():
    from _checkpoint_cases import AGAINST_DCP, CASES, LIVE_REFERENCES

    report = report_of(make_runs([1.0], [3.0], extra_bytes=10**6), load=[2.0], **{"async save": [0.05]})
    consolidated, of_live = report.tables
    assert [row[0] for row in consolidated.rows] == [case.name for case in CASES]
    assert [row[0] for row in of_live.rows] == list(LIVE_REFERENCES)
    assert report.checks[0].verdict == "missed"
    assert [(each.what, each.reason) for each in report.comparisons if each.loses] == [
        ("load of a live model", AGAINST_DCP["load"])
    ]
