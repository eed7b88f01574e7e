"""What is made of the step times of the trainers; what they are is nowhere asserted."""

import pytest


@pytest.fixture
def report_of(results_of):
    def make(secs):
        from trainer_overhead import CASES, make_report

        return make_report([case for case in CASES if case.name in secs], results_of(secs), [], rounds=2)

    return make


def test_each_trainer_is_compared_with_the_loop_by_hand_on_its_own_engine(report_of):
    report = report_of(
        {
            "staged on native-1": [0.11, 0.22],
            "bare on native-1": [0.1, 0.2],
            "hf on xla-spmd-2": [0.3, 0.3],
            "bare on xla-spmd-2": [0.4, 0.4],
        }
    )
    staged, hf = report.comparisons
    assert (round(staged.ratio, 3), staged.loses, bool(staged.reason)) == (1.1, True, True)
    assert (round(hf.ratio, 3), hf.loses, hf.reason) == (0.75, False, None)
    rows = {row[0]: row for row in report.tables[0].rows}
    assert rows["staged on native-1"][-1] == "+15.0"
    assert rows["bare on native-1"][-3:] == ["", "", ""]
    assert len(report.reading) == 2


def test_a_case_that_saves_says_so_and_has_its_own_reason(report_of):
    from _trainer_cases import CASES, REASONS

    saving = next(case for case in CASES if case.save_every_steps)
    report = report_of({saving.name: [2.0], "bare on native-1": [1.0]})
    assert "saving every 10" in saving.name
    assert [found.reason for found in report.comparisons] == [REASONS["saving"]]


def test_each_case_has_a_loop_by_hand_to_stand_beside():
    from _trainer_cases import CASES, LOOPS, QUICK

    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert {case.reference for case in CASES} | set(QUICK) <= names
    assert {case.loop for case in CASES} == set(LOOPS)


def test_the_text_has_more_tokens_than_the_steps_take(tmp_path):
    import json

    from _trainer_cases import GLOBAL_BATCH, LENGTH, TEXT, write_text

    write_text(tmp_path, 5)
    words = [json.loads(line)["text"].split() for line in (tmp_path / TEXT).read_text().splitlines()]
    assert sum(map(len, words)) > 5 * GLOBAL_BATCH * LENGTH
