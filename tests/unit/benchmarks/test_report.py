"""The pure half of the step-time benchmark; what it measures is nowhere asserted."""

import pytest


def make_result(times, **values):
    from _report import Block, Result

    blocks = {index: Block(secs, 2 * secs, 0.0, 1.0, None) for index, secs in times.items()}
    return Result(first_step_secs=3.0, compiles=2, blocks=blocks, **values)


def test_a_ratio_is_taken_within_a_round():
    from _report import paired_ratios

    slowed_in_round_1 = {0: 0.2, 1: 2.0, 2: 0.2}
    reference = {0: 0.1, 1: 1.0, 3: 0.1}
    assert paired_ratios(make_result(slowed_in_round_1), make_result(reference)) == [2.0, 2.0]


def test_a_row_has_a_cell_for_each_column_also_where_the_case_failed():
    from _cases import Case
    from _report import HEADER, table_row

    results = {
        "fast": make_result({0: 0.1}, loss=8.5),
        "slow": make_result({0: 0.2}, loss=8.5, late_compiles=1),
        "broken": make_result({}, error="rank 0: no"),
    }
    slow = dict(zip(HEADER, table_row(Case("slow", "eager", 2, 1, "fast"), results), strict=True))
    assert slow["processes x devices"] == "2 x 1"
    assert slow["compiles"] == "2 + 1 late"
    assert (slow["step s"], slow["ratio"], slow["to"]) == ("0.2000", "2.000", "fast")
    broken = table_row(Case("broken", "eager", reference="fast"), results)
    assert len(broken) == len(HEADER)
    assert "failed" in broken


@pytest.mark.parametrize(
    ("secs", "limit", "verdict"),
    [
        pytest.param({0: 1.0, 1: 1.0, 2: 1.0}, 1.0, "HELD", id="held"),
        pytest.param({0: 1.2, 1: 1.3, 2: 1.4}, 1.0, "MISSED", id="missed"),
        pytest.param({0: 0.8, 1: 1.1, 2: 1.4}, 1.0, "MISSED, within the noise", id="noise"),
        pytest.param({0: 2.0}, None, "reported only", id="no-limit"),
    ],
)
def test_a_check_names_the_ratio_and_whether_it_holds(secs, limit, verdict):
    from _cases import Expectation
    from _report import judge

    results = {"case": make_result(secs), "reference": make_result(dict.fromkeys(secs, 1.0))}
    line = judge(Expectation("case", "reference", limit), results)
    assert line.startswith("case / reference")
    assert line.endswith(verdict)


def test_a_check_of_a_case_that_failed_holds_nothing():
    from _cases import Expectation
    from _report import judge

    expectation = Expectation("case", "reference", 1.0)
    assert judge(expectation, {"case": make_result({0: 1.0})}).endswith("not run")
    results = {"case": make_result({0: 0.5}, error="rank 1: died"), "reference": make_result({0: 1.0})}
    assert "failed" in judge(expectation, results)


def test_a_loss_apart_from_the_others_is_named():
    from _report import differing_losses

    close = {"a": make_result({}, loss=8.0), "b": make_result({}, loss=8.0003), "c": make_result({}, loss=8.0)}
    assert differing_losses(close) == []
    for wrong in (8.01, float("nan")):
        assert [line.split(":")[0] for line in differing_losses(close | {"d": make_result({}, loss=wrong)})] == ["d"]


def test_every_reference_is_a_case_and_every_check_is_about_neighbours():
    from _cases import CASES, EXPECTATIONS, GLOBAL_BATCH

    position = {case.name: index for index, case in enumerate(CASES)}
    assert len(position) == len(CASES)
    assert all(case.reference in position for case in CASES if case.reference)
    assert all(GLOBAL_BATCH % case.total_devices == 0 for case in CASES)
    assert all(abs(position[e.case] - position[e.reference]) <= 2 for e in EXPECTATIONS)
