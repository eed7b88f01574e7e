"""What the benchmark of the axes' memory makes of its measurements; what it measures is nowhere asserted."""

import pytest


@pytest.fixture
def report_of():
    def make(answers):
        from _report import Result
        from axes_memory import CASES, make_report

        results = {name: Result(answers=found) for name, found in answers.items()}
        return make_report([case for case in CASES if case.name in answers], results, [], is_small=False)

    return make


def answers(steps, held):
    """Return what the processes answer: bytes at rest and at most, then held, of which half are experts'."""
    return [
        *({"rest": rest, "peak": peak} for rest, peak in steps),
        *({"held": size, "experts": size // 2} for size in held),
    ]


def test_the_process_that_has_most_is_held_to_the_limit(report_of):
    whole = answers([(10, 110)], [1000])
    even = answers([(10, 30)] * 4, [250] * 4)
    one_too_large = answers([(10, 30)] * 3 + [(10, 41)], [250] * 3 + [301])
    report = report_of({"sp-1": whole, "sp-4": even, "pp-1": whole, "pp-4": one_too_large})
    verdicts = {check.text.split(" <=")[0]: check.verdict for check in report.checks}
    assert verdicts["activations of sp-4 / sp-1"] == "held"
    assert verdicts["parameters and state of pp-4 / pp-1"] == "missed"
    assert verdicts["experts of ep-4 / ep-1"] == "reported"
    ratios = {row[0]: row[2::2] for row in report.tables[0].rows}
    assert ratios["sp-4"] == ["0.200", "0.250", "0.250"]
    assert ratios["pp-4"] == ["0.310", "0.301", "0.300"]


def test_a_case_that_did_not_answer_is_no_row_and_no_ratio(report_of):
    report = report_of({"sp-1": answers([(10, 110)], [1000]), "sp-4": []})
    assert [row[0] for row in report.tables[0].rows] == ["sp-1"]
    assert "not measured" in report.checks[0].text
