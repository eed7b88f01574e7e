"""Render the committed results: `docs/benchmarks.md`, and the figures in the README. Pure functions."""

import re
from collections.abc import Iterator, Sequence

from _markdown import count, render_table
from _results import Comparison, Report, Series, report_body, trust

IMAGES = "images"
"""Where the plots lie, beside the page."""
BEGIN, END = "<!-- figures, written by python -m benchmarks report -->", "<!-- end of the figures -->"
FIGURES = {
    True: "On the rival's runtime, PyTorch's own or XLA, which is what torchacc adds or saves:",
    False: "On another runtime than the rival's (PyTorch's own, XLA, torch.compile), which depends far more on the "
    "machine:",
}
"""What stands above the README's tables: ratios on the same runtime first."""
COMPARED = ["what", "against", "torchacc", "rival", "ratio", "quartiles"]


def render_page(reports: Sequence[Report]) -> str:
    """Return the page: first where torchacc loses, then how it was measured, then each benchmark."""
    losses = [each for report in reports for each in report.comparisons if each.loses]
    total = sum(len(report.comparisons) for report in reports)
    blocks = [
        "# Benchmarks",
        "Written by `python -m benchmarks`; each figure is from one run of it, or a range over several where it says "
        "so; ratios are from neighbours in time.",
        "## Where torchacc is slower or larger than a rival",
        f"In {len(losses)} of {count(total, 'comparison')}, beyond the noise; in each benchmark the largest first:",
        "\n".join(line for report in reports for line in losses_of(report)),
        "\n".join(compiling(losses)),
        "\n".join(f"- {line}" for line in missed_checks(reports)),
        "## How it was measured",
        "\n".join(f"- {line}" for line in measured_on(reports)),
        *(section(report) for report in reports),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def losses_of(report: Report) -> Iterator[str]:
    """Yield the comparisons of a benchmark that torchacc loses, compiling apart, as one item of a list.

    Those that share a rival and a reason share a line.
    """
    alike: dict[tuple[str, str], list[Comparison]] = {}
    for each in sorted(report.comparisons, key=lambda each: -each.ratio):
        if each.loses and not each.compiles:
            alike.setdefault((each.rival, each.reason or each.what), []).append(each)
    if alike:
        yield f"- {report.title}:"
    for worst, *others in alike.values():
        likewise = " · ".join(f"{each.what}, {each.ratio:.3g}" for each in others)
        yield f"  - {describe_loss(worst)}" + (f" Likewise: {likewise}." if others else "")


def describe_loss(found: Comparison) -> str:
    """Return a sentence on a comparison that torchacc loses."""
    numbers = f"{_number(found.ours)} {found.unit} against {_number(found.theirs)}"
    why = found.reason or "the reason is not known"
    return f"**{found.what}** against {found.rival}: **{found.ratio:.3g}** times ({numbers}); {why}."


def compiling(losses: Sequence[Comparison]) -> Iterator[str]:
    """Yield, in one sentence, the losses that are times in which torchacc compiles and the rival does not."""
    found = sorted((each for each in losses if each.compiles), key=lambda each: each.ratio)
    if found:
        yield (
            f"Compile time is apart: {len(found)} of the {len(losses)} are times in which XLA compiles and the rival "
            f"has nothing to compile, from {found[0].ratio:.3g} times on. The largest: {describe_loss(found[-1])}"
        )


def missed_checks(reports: Sequence[Report]) -> Iterator[str]:
    """Yield what was expected and is not so."""
    for report in reports:
        for check in report.checks:
            if check.verdict == "missed":
                why = f"; {check.reason}" if check.reason else ""
                yield f"Expected and not so ({report.title.lower()}): {check.text}{why}."


def measured_on(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the machines and versions, how long it took, and what else went on."""
    machines: dict[str, list[Report]] = {}
    for report in reports:
        facts = [f"{name} {value}" for name, value in report.machine.items() if name != "date" and value is not None]
        machines.setdefault(", ".join(facts), []).append(report)
    for facts, alike in machines.items():
        dates = sorted({str(report.machine["date"])[:10] for report in alike})
        where = "" if len(machines) == 1 else f"{', '.join(report.name for report in alike)}: "
        yield f"{where}{facts}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    yield f"All of it takes {sum(report.secs for report in reports) / 60:.0f} minutes."
    restless = [report for report in reports if not report.quiet]
    for report in restless:
        yield f"{report.title}: {trust(report)}."
    if not restless:
        yield "The machine was otherwise idle."


def section(report: Report) -> str:
    """Return one benchmark: its plots, what they say, its tables, and its checks."""
    plots = plots_of(report)
    blocks = [
        f"## {report.title}",
        f"`{report.command}`, {report.secs:.0f} s; {trust(report)}. {report.setting}",
        "\n".join(f"- {line}" for line in report.reading),
        *(f"![{series[0].plot}]({IMAGES}/{name})" for name, series in plots.items()),
    ]
    if report.comparisons:
        blocks += ["Beside the rivals, smaller is better:", render_table(COMPARED, compared_rows(report.comparisons))]
    return "\n\n".join(filter(None, [*blocks, *report_body(report)]))


def plots_of(report: Report) -> dict[str, list[Series]]:
    """Return the series of each plot under the name of its file."""
    found: dict[str, list[Series]] = {}
    for series in report.series:
        slug = re.sub(r"[^a-z0-9]+", "-", series.plot.lower()).strip("-")
        found.setdefault(f"{report.name}-{slug}.png", []).append(series)
    return found


def compared_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the cells under `COMPARED`."""
    return [
        [
            each.what,
            each.rival,
            f"{_number(each.ours)} {each.unit}",
            f"{_number(each.theirs)} {each.unit}",
            ratio_in_words(each, 3),
            f"{each.spread[0]:.3f} .. {each.spread[1]:.3f}" if each.spread else "",
        ]
        for each in comparisons
    ]


def ratio_in_words(found: Comparison, digits: int) -> str:
    """Return a ratio, or from where to where it lay where there were several runs."""
    every = [*found.earlier, found.ratio]
    if len(every) == 1:
        return f"{found.ratio:.{digits}f}"
    return f"{min(every):.{digits}f} .. {max(every):.{digits}f} in {len(every)} runs"


def render_figures(reports: Sequence[Report]) -> str:
    """Return what stands between the README's comments."""
    step = next((report for report in reports if report.name == "step_time"), None)
    blocks = []
    if step is not None:
        blocks.append(f"{step.setting} {trust(step).capitalize()}. Step time over the rival's, the worst first.")
        for is_same, title in FIGURES.items():
            found = sorted(step.comparisons, key=lambda each: -each.ratio)
            found = [each for each in found if each.same_runtime is is_same]
            rows = [
                [each.what.removeprefix("step time of "), each.rival, ratio_in_words(each, 2), cells[-1]]
                for each, cells in zip(found, compared_rows(found), strict=True)
            ]
            blocks += [title, render_table(["torchacc", "rival", "ratio", "quartiles"], rows)] if rows else []
    lines = [f"- **{report.title}**: {report.reading[0]}" for report in reports if report.reading]
    return "\n\n".join(filter(None, [*blocks, "\n".join(lines)]))


def put_figures(readme: str, figures: str) -> str:
    """Return a README with these figures between its comments."""
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?(\n{re.escape(END)})", re.DOTALL)
    if not pattern.search(readme):
        raise ValueError(f"the README has no place for the figures: a line {BEGIN!r} and one {END!r}")
    return pattern.sub(lambda found: f"{found[1]}\n{figures}\n{found[2]}", readme)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
