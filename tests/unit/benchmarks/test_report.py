"""The pure half of the step-time benchmark; what it measures is nowhere asserted."""

import pytest


def make_result(times, **values):
    from _report import Block, Result

    blocks = {index: Block(secs, 2 * secs, 0.0, 1.0, None) for index, secs in times.items()}
    return Result(first_steps=[3.0], compiles=2, blocks=blocks, **values)


def test_a_ratio_is_taken_within_a_round_and_nothing_where_one_failed():
    from _report import paired_ratios, ratio_cells

    slowed_in_round_1 = make_result({0: 0.2, 1: 2.0, 2: 0.2})
    reference = make_result({0: 0.1, 1: 1.0, 3: 0.1})
    assert paired_ratios(slowed_in_round_1, reference) == [2.0, 2.0]
    assert ratio_cells([2.0, 2.0], "them") == ["2.000", "2.000 .. 2.000", "them"]
    assert paired_ratios(slowed_in_round_1, make_result({0: 1.0}, error="died")) == []
    assert paired_ratios(slowed_in_round_1, None) == []


def test_a_row_has_a_cell_for_each_column_also_where_the_case_failed():
    from _cases import Case
    from step_time import HEADER, table_row

    results = {
        "fast": make_result({0: 0.1}, losses=[8.5]),
        "slow": make_result({0: 0.2}, losses=[8.5], late_compiles=1),
        "broken": make_result({}, error="rank 0: no"),
    }
    slow = dict(zip(HEADER, table_row(Case("slow", "eager", 2, 1, "fast"), results), strict=True))
    assert slow["processes x devices"] == "2 x 1"
    assert slow["compiles"] == "2 + 1 late"
    assert (slow["step s"], slow["ratio"], slow["to"]) == ("0.2000", "2.000", "fast")
    broken = table_row(Case("broken", "eager", reference="fast"), results)
    assert len(broken) == len(HEADER)
    assert "failed" in broken
    absent = table_row(Case("absent", "fabric"), {"absent": make_result({}, cannot_run="not installed")})
    assert absent[2] == "cannot run"


@pytest.mark.parametrize(
    ("secs", "limit", "verdict", "ending"),
    [
        pytest.param({0: 1.0, 1: 1.0, 2: 1.0}, 1.0, "held", "is 1.000", id="held"),
        pytest.param({0: 1.2, 1: 1.3, 2: 1.4}, 1.0, "missed", ")", id="missed"),
        pytest.param({0: 0.8, 1: 1.1, 2: 1.4}, 1.0, "missed", ", within the noise", id="noise"),
        pytest.param({0: 2.0}, None, "reported", "no limit, is 2.000", id="no-limit"),
    ],
)
def test_a_check_names_the_ratio_and_whether_it_holds(secs, limit, verdict, ending):
    from _report import judge
    from _results import Limit

    results = {"case": make_result(secs), "reference": make_result(dict.fromkeys(secs, 1.0))}
    check = judge(Limit("case", "reference", limit, "a reason"), results)
    assert check.text.startswith("step time of case / reference")
    assert check.text.endswith(ending)
    assert check.verdict == verdict


@pytest.mark.parametrize(
    ("ended", "verdict"), [({"error": "rank 1: died"}, "missed"), ({"cannot_run": "not installed"}, "reported")]
)
def test_a_check_of_a_case_that_did_not_run_holds_nothing(ended, verdict):
    from _report import judge
    from _results import Limit

    results = {"case": make_result({0: 0.5}, **ended), "reference": make_result({0: 1.0})}
    check = judge(Limit("case", "reference", 1.0), results)
    assert (check.text.rpartition(", ")[2], check.verdict) == ("not measured", verdict)


def test_a_loss_apart_from_the_others_at_any_step_is_named_with_the_step():
    from _report import differing_losses

    close = {
        "a": make_result({}, losses=[9.0, 8.0]),
        "b": make_result({}, losses=[9.0, 8.0003]),
        "c": make_result({}, losses=[9.0, 8.0]),
        "absent": make_result({}, cannot_run="not installed"),
    }
    assert differing_losses(close) == []
    for wrong in ([9.01, 8.0], [float("nan"), float("nan")]):
        (line,) = differing_losses(close | {"d": make_result({}, losses=wrong)})
        assert line.startswith("d: loss")
        assert "at step 1" in line


def test_losses_are_drawn_against_the_reference_step_by_step():
    from _report import parity

    results = {"eager": make_result({}, losses=[4.0, 2.0]), "ours": make_result({}, losses=[4.0, 2.5])}
    (line,) = parity(results, "eager")
    assert (line.label, line.x, line.y) == ("ours", [1.0, 2.0], [0.0, 0.25])


def test_rivals_are_compared_in_the_rounds_that_both_took():
    from _report import compare_steps

    ours, theirs = make_result({0: 1.0, 1: 9.0, 2: 3.0}), make_result({0: 2.0, 2: 3.0})
    (found,) = compare_steps("ours", "Them", ours, theirs, unit="ms")
    assert (found.rival, found.ours, found.theirs, found.ratio) == ("Them", 2000.0, 2500.0, 0.75)
    assert list(compare_steps("ours", "The absent", ours, make_result({}, cannot_run="not installed"))) == []


def test_a_rival_is_on_the_same_runtime_or_not():
    from _cases import RIVALRIES

    other = {(pair.case, pair.rival) for pair in RIVALRIES if not pair.same_runtime}
    assert ("xla-spmd-1", "eager") in other
    assert ("native-1", "compile") in other
    assert not other & {("xla-spmd-4", "fsdpv2-4"), ("xla-spmd-1", "torch_xla"), ("native-2", "fabric-2")}
    assert ("native-1", "eager") not in other


def test_every_reference_is_a_case_and_every_check_is_about_neighbours():
    from _cases import CASES, EXPECTATIONS, GLOBAL_BATCH, QUICK, RIVALRIES

    position = {case.name: index for index, case in enumerate(CASES)}
    assert len(position) == len(CASES)
    assert all(case.reference in position for case in CASES if case.reference)
    assert all({pair.case, pair.rival} <= position.keys() for pair in RIVALRIES)
    assert position.keys() >= set(QUICK)
    assert all(GLOBAL_BATCH % case.total_devices == 0 for case in CASES)
    assert all(abs(position[e.case] - position[e.reference]) <= 2 for e in EXPECTATIONS)
