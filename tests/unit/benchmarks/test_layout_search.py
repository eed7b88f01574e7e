"""What the benchmark of layouts makes of its measurements; what it measures is nowhere asserted."""

import pytest


@pytest.fixture
def checks_of():
    def make(**found):
        """Return the checks of layouts: their planned and held bytes, estimated and measured seconds."""
        from layout_search import Case, judge_memory, judge_order

        names = {name: f"{name} 2, FULL_SHARD" for name in found}
        plans = {
            names[name]: {"bytes": {"total": each[0]}, "seconds": {"total": each[2]}} for name, each in found.items()
        }
        secs = {names[name]: each[3] for name, each in found.items()}
        ratios = {names[name]: each[0] / each[1] for name, each in found.items()}
        cases = [Case(name) for name in names.values()]
        return judge_memory(ratios), judge_order(cases, secs, plans)

    return make


def test_memory_that_is_off_by_more_than_a_tenth_is_named(checks_of):
    held, _ = checks_of(fsdp=(109, 100, 1, 1), tp=(91, 100, 1, 1))
    assert held.verdict == "held"
    missed, _ = checks_of(fsdp=(100, 100, 1, 1), tp=(89, 100, 1, 1))
    assert missed.verdict == "missed"
    assert missed.reason == "planned / held: tp 2, FULL_SHARD 0.89"


def test_only_times_that_differ_clearly_have_to_be_in_order(checks_of):
    _, (check,) = checks_of(fsdp=(1, 1, 1.0, 2.0), tp=(1, 1, 2.0, 2.3), sp=(1, 1, 3.0, 1.0))
    assert "0 of 2 pairs" in check.text, "fsdp and tp differ by less than a fifth"
    assert check.verdict == "missed"
    assert "sp 2, FULL_SHARD is faster than tp 2, FULL_SHARD" in check.reason


def test_each_number_of_processes_is_a_check_of_its_own():
    from layout_search import Case, judge_order

    cases = [Case(name) for name in ("fsdp 2, FULL_SHARD", "fsdp 4 x pp 2, FULL_SHARD", "dp 2 x fsdp 4, HYBRID_SHARD")]
    assert [case.processes for case in cases] == [2, 8, 8]
    secs = {case.name: index + 1 for index, case in enumerate(cases)}
    plans = {case.name: {"seconds": {"total": index}} for index, case in enumerate(cases)}
    on_two, on_eight = judge_order(cases, secs, plans)
    assert "on 2 processes the search has 0 of 0" in on_two.text
    assert "on 8 processes the search has 1 of 1" in on_eight.text
    assert on_eight.verdict == "held"


def test_a_layouts_time_is_what_it_takes_beside_the_first_one():
    from _report import Block, Result
    from layout_search import step_times

    def took(*secs):
        return Result(blocks={index: Block(each, 0, 0, 0, None) for index, each in enumerate(secs)})

    quiet = {"first": took(1.0, 1.0, 1.0, 1.0), "other": took(2.0, 2.0, 2.0, 2.0)}
    busy = {"first": took(2.0, 2.0, 2.0), "another": took(3.0, 3.0, 3.0), "failed": Result(error="it ended")}
    assert step_times([quiet, busy]) == {"first": 1.0, "other": 2.0, "another": 1.5}


def test_losses_of_layouts_in_different_groups_are_compared():
    from _report import Result
    from layout_search import wrong_losses

    def lost(loss):
        return Result(losses=[loss])

    assert wrong_losses([{"first": lost(1.0), "other": lost(1.000004)}, {"first": lost(1.0), "last": lost(1.0)}]) == []
    groups = [{"first": lost(1.0), "other": lost(1.000008)}, {"first": lost(1.0), "last": lost(0.999992)}]
    line, another = wrong_losses(groups)  # which differ by less than the tolerance within each group
    assert line.startswith("other: loss 1.000008 at step 1")
    assert another.startswith("last: loss 0.999992 at step 1")


def test_a_first_layout_that_fails_in_a_later_group_has_failed():
    from _report import Result
    from layout_search import joined

    failed = Result(error="it ended")
    assert joined([{"first": Result(), "other": Result()}, {"first": failed, "another": Result()}])["first"] is failed
