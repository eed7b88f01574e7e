"""The format that every benchmark hands over, and how it is printed."""

import pytest


def make_report(**values):
    from _results import Report

    return Report(**{"name": "step", "title": "Step time", "setting": "A small model.", **values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([5.0], (5.0, 5.0, 5.0), id="one"),
        pytest.param([1.0, 2.0], (1.25, 1.5, 1.75), id="two"),
        pytest.param([4.0, 0.0, 3.0, 1.0, 2.0], (1.0, 2.0, 3.0), id="unsorted"),
    ],
)
def test_a_spread_is_the_median_and_the_quartiles(values, expected):
    from _results import spread

    assert spread(values) == expected


def test_a_table_is_aligned_markdown():
    from _markdown import render_table

    assert render_table(["a", "bb"], [["long", "1"], ["x", "22222"]]).splitlines() == [
        "| a    |    bb |",
        "|------|------:|",
        "| long |     1 |",
        "| x    | 22222 |",
    ]


def test_ours_is_compared_with_the_rivals_within_a_round():
    from _results import compare

    slowed_in_round_1 = compare("step", "them", [0.2, 2.0, 0.2], [0.1, 1.0, 0.1], "s", reason="two programs")
    assert (slowed_in_round_1.ratio, slowed_in_round_1.spread) == (2.0, (2.0, 2.0))
    assert slowed_in_round_1.loses
    assert slowed_in_round_1.reason == "two programs"


@pytest.mark.parametrize(
    ("ours", "loses"),
    [
        pytest.param([1.2], True, id="exact"),
        pytest.param([1.0], False, id="equal"),
        pytest.param([1.1, 1.2, 1.3], True, id="beyond-the-noise"),
        pytest.param([0.9, 1.1, 1.3, 0.8, 1.2], False, id="within-the-noise"),
        pytest.param([0.7, 0.8], False, id="faster"),
    ],
)
def test_a_comparison_is_lost_beyond_the_noise_and_only_then_has_a_reason(ours, loses):
    from _results import compare

    found = compare("step", "them", ours, [1.0] * len(ours), "s", reason="a reason")
    assert found.loses is loses
    assert found.reason == ("a reason" if loses else None)


def test_what_is_written_is_read_again(tmp_path, capsys):
    from _results import Check, Series, Table, compare, emit, read

    report = make_report(
        other_cores=0.3,
        tables=[Table(title="Seconds", header=["case", "s"], rows=[["ours", "1.00"]], note="A note.")],
        checks=[Check("ours <= 1", "held"), Check("theirs", "reported")],
        comparisons=[compare("step", "them", [1.0, 1.1], [1.0, 1.0], "s")],
        series=[
            Series(plot="p", label="line", x=[1.0, 2.0], y=[3.0, 4.0], x_label="N", y_label="s"),
            Series(plot="q", label="bars", x=["a", "b"], y=[3.0, 4.0], x_label="", y_label="ratio"),
        ],
        reading=["Ours takes 1.00 s."],
    )
    emit(report, tmp_path / "new" / "step.json")
    assert read(tmp_path / "new" / "step.json") == report
    printed = capsys.readouterr().out
    for line in ("Seconds:", "| ours | 1.00 |", "A note.", "- Ours takes 1.00 s.", "- ours <= 1: HELD"):
        assert line in printed
    assert "- theirs: reported only" in printed
    assert "the machine was not quiet" in printed


@pytest.mark.parametrize(
    ("arguments", "command"),
    [([], ""), (["--json", "/tmp/x.json", "--rounds", "3"], " --rounds 3"), (["--quick", "--json", "x"], " --quick")],
)
def test_the_command_is_told_without_where_its_json_goes(arguments, command):
    from _machine import ROOT
    from _results import own_command

    assert own_command([str(ROOT / "benchmarks/step.py"), *arguments]) == f"python benchmarks/step.py{command}"
