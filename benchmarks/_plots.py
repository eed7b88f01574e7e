"""Draw the series of a report: bars where they have names, lines where they have numbers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
from _results import Series

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#1f6fb4", "#e1812c", "#3a923a", "#c03d3e", "#8d69b8", "#84584e", "#d684bd", "#7f7f7f")
STYLES = ("-", "--", ":")
LOG_FROM = 100.0  # values that are further apart than this are drawn on a logarithmic scale
DATA = "Data"
"""The text in a PNG that says what it was drawn from."""


def digest(series: Sequence[Series]) -> str:
    """Return what tells a plot's data from any other."""
    return hashlib.sha256(repr([asdict(each) for each in series]).encode()).hexdigest()[:16]


def draw(plots: Mapping[str, Sequence[Series]], folder: Path) -> None:
    """Write each plot as a PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, series in plots.items():
        bars = isinstance(series[0].x[0], str)
        height = 1.2 + 0.28 * sum(len(each.x) for each in series) if bars else 3.6
        figure, axes = plt.subplots(figsize=(8, max(2.4, height)), layout="constrained")
        (_draw_bars if bars else _draw_lines)(axes, series)
        axes.set_title(series[0].plot, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if len(series) > 1:
            axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(folder / name, dpi=100, metadata={"Software": None, DATA: digest(series)})
        plt.close(figure)


def _draw_bars(axes: Axes, series: Sequence[Series]) -> None:
    names = list(dict.fromkeys(str(name) for each in series for name in each.x))
    thick = 0.8 / len(series)
    ratios = "ratio" in series[0].y_label
    for index, each in enumerate(series):
        places = [names.index(str(name)) + (index - (len(series) - 1) / 2) * thick for name in each.x]
        own = COLOURS[index % len(COLOURS)]
        colours = [COLOURS[1] if ratios and len(series) == 1 and value > 1 else own for value in each.y]
        drawn = axes.barh(places, each.y, thick, color=colours, label=each.label)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(series[0].y_label, fontsize=8)
    if ratios:
        axes.axvline(1.0, color="black", linewidth=0.8)
    axes.margins(x=0.12)


def _draw_lines(axes: Axes, series: Sequence[Series]) -> None:
    for index, each in enumerate(series):
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
        marker = "o" if len(each.x) <= 10 else None
        axes.plot(each.x, each.y, style, color=colour, marker=marker, markersize=3, linewidth=1.2, label=each.label)
    sizes = [abs(value) for each in series for value in each.y if value]
    if sizes and max(sizes) / min(sizes) > LOG_FROM:
        axes.set_yscale("symlog", linthresh=min(sizes))  # it has a place for zero
    else:
        axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(series[0].x_label, fontsize=8)
    axes.set_ylabel(series[0].y_label, fontsize=8)
    axes.grid(alpha=0.25)
