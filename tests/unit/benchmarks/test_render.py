"""The report: what it says first, and that what is committed is what the committed results say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def make_comparison(ours, theirs=1.0, *, reason=None, what="step", rival="them"):
    from _results import compare

    return compare(what, rival, [ours, ours], [theirs, theirs], "s", reason=reason)


def make_report(name="step_time", **values):
    from _results import Report

    facts = {"date": "2026-01-02T03:04:05", "cores": 2, "torch": "2.9.0", "torch_xla": None}
    given = {"name": name, "title": name.title(), "setting": "A small model.", "machine": facts, **values}
    return Report(**given, command=f"python benchmarks/{name}.py")


def test_what_loses_comes_first_the_largest_first_each_with_its_reason():
    from _render import render_page

    lost = [make_comparison(1.2, reason="two programs", what="a"), make_comparison(1.5, what="b")]
    page = render_page([make_report(comparisons=[make_comparison(0.5, what="won"), *lost])])
    before = page.partition("## How it was measured")[0]
    assert "In 2 of 3 comparisons" in before
    first, second = [line for line in before.splitlines() if line.startswith("- ")]
    assert first == "- **b** against them: **1.5** times (1.5 s against 1); the reason is not known."
    assert second == "- **a** against them: **1.2** times (1.2 s against 1); two programs."
    assert "won" not in before
    assert "| won " in page


def test_what_was_expected_and_is_not_so_comes_before_what_was_measured():
    from _render import render_page
    from _results import Check

    checks = [
        Check("a is small, is 3", "missed", "it is old"),
        Check("b is small", "held", "no"),
        Check("c", "reported"),
    ]
    before = render_page([make_report(checks=checks)]).partition("## How it was measured")[0]
    assert "- Expected and not so (step_time): a is small, is 3; it is old." in before
    assert "b is small" not in before


def test_a_machine_that_was_not_quiet_is_named_at_the_top_and_in_its_section():
    from _render import render_page

    page = render_page([make_report(other_cores=0.0), make_report("memory", other_cores=0.7, quiet=False)])
    top, _, rest = page.partition("## Step_Time")
    assert "Memory: other work took 0.70 cores: **the machine was not quiet**" in top
    assert "otherwise idle" not in page
    assert rest.count("was not quiet") == 1
    assert "otherwise idle" in render_page([make_report(other_cores=0.0)])


def test_results_of_different_machines_are_told_apart():
    from _render import measured_on

    other = make_report("gpu", machine={"date": "2026-02-03", "cores": 16})
    lines = list(measured_on([make_report(), other]))
    assert lines[:2] == ["step_time: cores 2, torch 2.9.0; 2026-01-02.", "gpu: cores 16; 2026-02-03."]


def test_the_figures_have_the_worst_first_and_replace_the_former_ones():
    from _render import BEGIN, END, put_figures, render_figures

    comparisons = [make_comparison(0.5, rival="won"), make_comparison(1.5, rival="lost")]
    figures = render_figures([make_report(comparisons=comparisons, reading=["It is fast.", "Not this."])])
    assert figures.index("1.50") < figures.index("0.50")
    assert "It is fast." in figures
    assert "Not this." not in figures
    readme = f"# Title\n{BEGIN}\nold\n{END}\nrest\n"
    assert put_figures(readme, "new") == f"# Title\n{BEGIN}\n\nnew\n\n{END}\nrest\n"
    assert put_figures(put_figures(readme, "new"), "newer") == put_figures(readme, "newer")
    with pytest.raises(ValueError, match="no place for the figures"):
        put_figures("# Title\n", "new")


def test_a_plot_is_drawn_for_each_title_and_says_what_it_was_drawn_from(tmp_path):
    from _plots import DATA, digest, draw
    from _render import plots_of
    from _results import Series
    from PIL import Image

    line = {"plot": "Loss parity", "x_label": "step", "y_label": "difference"}
    report = make_report(
        series=[
            Series(label="a", x=[1.0, 2.0], y=[0.0, 1e-7], **line),
            Series(label="b", x=[1.0, 2.0], y=[1e-4, 1e-9], **line),
            Series(plot="Ratio", label="ratio", x=["c", "d"], y=[0.9, 1.1], x_label="", y_label="ratio"),
        ]
    )
    plots = plots_of(report)
    assert list(plots) == ["step_time-loss-parity.png", "step_time-ratio.png"]
    draw(plots, tmp_path)
    for name, series in plots.items():
        with Image.open(tmp_path / name) as image:
            assert image.text[DATA] == digest(series)
            assert image.width > image.height > 100


def test_the_committed_report_is_what_the_committed_results_say():
    from _plots import DATA, digest
    from _programs import read_reports
    from _render import IMAGES, plots_of, put_figures, render_figures, render_page
    from PIL import Image

    reports = read_reports()
    assert reports
    docs = ROOT / "docs"
    assert (docs / "benchmarks.md").read_text(encoding="utf-8") == render_page(reports)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert put_figures(readme, render_figures(reports)) == readme
    for report in reports:
        for name, series in plots_of(report).items():
            with Image.open(docs / IMAGES / name) as image:
                assert image.text[DATA] == digest(series), f"{name} was drawn from other results"


def test_a_benchmark_that_does_not_exist_is_refused_before_anything_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "steptime", "--results", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no benchmark is called 'steptime'; there are step_time, memory" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_runner_writes_results_and_a_report_of_its_own(tmp_path):
    from _results import read

    command = [sys.executable, "-m", "benchmarks", "step_time", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[1/1] step_time ended with 0" in done.stderr
    report = read(tmp_path / "step_time.json")
    assert report.command == "python benchmarks/step_time.py --quick"
    assert [row[0] for row in report.tables[0].rows] == ["eager", "fsdp2-2", "native-2"]
    assert report.checks[0].text == "the losses of all cases agree at every step"
    assert report.checks[0].verdict == "held"
    (against,) = report.comparisons
    assert (against.rival, against.ratio > 0) == ("raw FSDP2", True)
    assert {line.label for line in report.series if line.plot == "Loss parity"} == {"fsdp2-2", "native-2"}
    assert "# Benchmarks" in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert (tmp_path / "images" / "step_time-loss-parity.png").exists()
