"""The report: what it says first, and that what is committed is what the committed results say."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import forkrun

ROOT = Path(__file__).parents[3]


def make_comparison(ours, theirs=1.0, *, reason=None, what="step", rival="them", compiles=False):
    from _results import compare

    return compare(what, rival, [ours, ours], [theirs, theirs], "s", reason=reason, compiles=compiles)


def make_report(name="step_time", **values):
    from _results import Report

    facts = {"date": "2026-01-02T03:04:05", "cores": 2, "torch": "2.9.0", "torch_xla": None}
    given = {"name": name, "title": name.title(), "setting": "A small model.", "machine": facts, **values}
    return Report(**given, command=f"python benchmarks/{name}.py")


def first_lines(page):
    return [line for line in page.partition("## How it was measured")[0].splitlines() if line]


def test_what_loses_comes_first_by_benchmark_the_largest_first_each_with_its_reason():
    from _render import render_page

    lost = [make_comparison(1.2, reason="two programs", what="a"), make_comparison(1.5, what="b")]
    time = make_report(comparisons=[make_comparison(0.5, what="won"), *lost])
    memory = make_report("memory", comparisons=[make_comparison(3.0, what="c")])
    page = render_page([time, memory, make_report("scaling", comparisons=[make_comparison(1.004, what="even")])])
    lines = first_lines(page)
    assert "In 3 of 5 comparisons" in lines[3]
    assert lines[4:] == [
        "- Step_Time:",
        "  - **b** against them: **1.5** times (1.5 s against 1); the reason is not known.",
        "  - **a** against them: **1.2** times (1.2 s against 1); two programs.",
        "- Memory:",
        "  - **c** against them: **3** times (3 s against 1); the reason is not known.",
    ]
    assert "| won " in page
    assert "| even " in page


def test_losses_with_one_rival_and_one_reason_share_a_line():
    from _render import render_page

    lost = [make_comparison(ratio, reason="it is old", what=what) for what, ratio in (("a", 1.2), ("b", 1.5))]
    other = make_comparison(1.3, reason="it is old", rival="others", what="c")
    assert first_lines(render_page([make_report(comparisons=[*lost, other])]))[5:] == [
        "  - **b** against them: **1.5** times (1.5 s against 1); it is old. Likewise: a, 1.2.",
        "  - **c** against others: **1.3** times (1.3 s against 1); it is old.",
    ]


def test_what_is_lost_to_compiling_is_one_sentence_after_the_others():
    from _render import render_page

    epochs = [
        make_comparison(ratio, what=what, compiles=True, reason="it compiles 9 programs")
        for what, ratio in (("first of a", 4.0), ("first of b", 70.0), ("first of c", 0.5))
    ]
    lines = first_lines(render_page([make_report(comparisons=[*epochs, make_comparison(1.5, what="later")])]))
    assert lines[4:6] == [
        "- Step_Time:",
        "  - **later** against them: **1.5** times (1.5 s against 1); the reason is not known.",
    ]
    assert lines[6].startswith("Compile time is apart: 2 of the 3 ")
    assert "from 4 times on. The largest: **first of b** against them: **70** times" in lines[6]
    assert not any("first of a" in line or "first of c" in line for line in lines)


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


def test_ratios_on_the_same_runtime_come_first_and_several_runs_give_a_range(tmp_path):
    from _render import FIGURES, render_figures
    from _results import keep_earlier, read, write

    def report(ratio):
        found = [make_comparison(ratio, rival="eager"), make_comparison(1.5, rival="torch_xla")]
        found[0].same_runtime = False
        return make_report(comparisons=found)

    write(report(1.12), tmp_path / "step_time.json")
    new, last = report(1.34), report(0.88)
    keep_earlier(new, read(tmp_path / "step_time.json"))
    keep_earlier(last, new)
    figures = render_figures([last])
    same, _, other = figures.partition(FIGURES[False])
    assert FIGURES[True] in same
    assert "1.50 .. 1.50 in 3 runs" in same
    assert "0.88 .. 1.34 in 3 runs" in other


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


def run(*arguments, **options):
    command = [forkrun.python(), "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["steptime"], "no benchmark is called 'steptime'; there are step_time, memory", id="wrong name"),
        pytest.param(["gpu"], "no benchmark is called 'gpu'; that is of --profile gpu; there are", id="other profile"),
        pytest.param(["report", "memory"], "`report` runs nothing, and stands alone", id="report and more"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused_before_anything_runs(arguments, said, tmp_path):
    done = run(*arguments, "--results", tmp_path / "results")
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_hold_results_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    done = run("step_time", "--results", tmp_path / "file")
    assert done.returncode == 2
    assert f"error: --results {tmp_path / 'file'}: cannot write there: File exists" in done.stderr
    assert "[1/1]" not in done.stderr


@pytest.mark.parametrize("content", ["{", '{"name": "memory"}'])
def test_results_that_are_damaged_are_named_before_anything_runs(content, tmp_path):
    from _programs import ResultsError, read_reports

    (tmp_path / "memory.json").write_text(content)
    with pytest.raises(ResultsError, match=r"memory.json is not what this version writes .* `python -m benchmarks mem"):
        read_reports(tmp_path)
    assert read_reports(tmp_path, leave_out=["memory"]) == []
    done = run("step_time", "--results", tmp_path)
    assert done.returncode == 2
    assert "memory.json is not what this version writes" in done.stderr
    assert "[1/1]" not in done.stderr


def test_a_report_of_nothing_fails(tmp_path):
    done = run("report", "--results", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"no results in {tmp_path}\n")


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_keeps_what_has_ended(tmp_path):
    (tmp_path / "compile.json").write_bytes((ROOT / "benchmarks/results/compile.json").read_bytes())
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "step_time", "--quick", "--results", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    while not any("--worker" in command for command in processes_of(process.pid)):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 130, said
    assert f"stopped; the results of what has ended are in {tmp_path}" in said
    assert not processes_of(process.pid)
    assert [path.name for path in tmp_path.iterdir()] == ["compile.json"]


def processes_of(session):
    """Return the command lines of a session's processes that are alive."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append((folder / "cmdline").read_text())
    return found


@pytest.mark.slow
def test_the_runner_writes_results_and_a_report_of_its_own(tmp_path):
    from _results import read

    command = [forkrun.python(), "-m", "benchmarks", "step_time", "--quick", "--results", str(tmp_path)]
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
