"""The pure half of the benchmark of compiles; what it measures is nowhere asserted."""

import pytest


def run(graphs, secs):
    return {"graphs": graphs, "secs": secs}


def make_runs(own, other):
    return {"xla-spmd, 4 layers": [own], "torch_xla, 4 layers": [other]}


BY_HAND = run([2, 1, 0, 0], [3.0, 3.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("own", "verdicts"),
    [
        (run([1, 0, 0, 0], [3.0, 0.1, 0.1, 0.1]), ["held", "held"]),
        (run([1, 0, 1, 0], [3.0, 0.1, 3.0, 0.1]), ["missed", "held"]),
        (run([1, 1, 0, 0], [3.0, 3.0, 0.1, 0.1]), ["missed", "missed"]),
    ],
)
def test_programs_are_counted_in_all_steps_and_time_in_two(own, verdicts):
    from compile import judgements

    assert [check.verdict for check in judgements(make_runs(own, BY_HAND))] == verdicts


def test_what_did_not_run_is_not_judged():
    from compile import judgements

    assert list(judgements({"torch_xla, 4 layers": [BY_HAND]})) == []


def test_the_table_has_the_programs_of_each_step():
    from compile import make_report

    (table,) = make_report(make_runs(run([1, 0, 0, 0], [3.0, 0.1, 0.1, 0.2]), BY_HAND), rounds=1).tables
    assert table.rows == [
        ["xla-spmd, 4 layers", "1", "0", "0", "0", "3.00", "0.10", "0.20"],
        ["torch_xla, 4 layers", "2", "1", "0", "0", "3.00", "3.00", "0.10"],
    ]


def test_the_time_until_the_second_step_is_compared_at_each_depth_that_ran():
    from compile import make_report

    (found,) = make_report(make_runs(run([1, 1, 0, 0], [4.0, 4.0, 0.1, 0.1]), BY_HAND), rounds=1).comparisons
    assert (found.ours, found.theirs, found.loses) == (8.0, 6.0, True)
