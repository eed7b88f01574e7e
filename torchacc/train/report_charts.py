"""The curves of a report: of a run, or of several in one picture, as the addresses of images."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from torchacc.train.metric_sinks import Row
from torchacc.train.run_reading import memory_points, points

_INK, _FAINT = "#1f2933", "#9aa5b1"
_COLORS = ("#2f6fde", "#e8710a", "#1a936f", "#b5179e", "#6d4c41", "#00838f", "#c62828", "#7e57c2", "#9e9d24", "#455a64")
_EVALUATION = _COLORS[1]
_MANY = 5000
"""Points of a curve from which on it is drawn as pixels, so that the page does not grow with them."""
_MARKS = {"compile": ("compiled anew", ":", "#c62828"), "restart": ("restart", "--", "#6d4c41")}
"""Kind of event -> how it is marked."""
_CURVES = (
    ("lr", "learning rate", None),
    ("grad_norm", "gradient norm", None),
    ("tokens_per_sec", "tokens/s", EngFormatter()),
    ("compile_secs", "seconds that the process has compiled", None),
    ("mfu", "MFU", PercentFormatter(1.0)),
    ("data_wait", "share of time waiting for data", PercentFormatter(1.0)),
    ("expert_imbalance", "tokens of the fullest expert, of an even share", None),
)
Runs = Mapping[str, Sequence[Row]]
"""Name of a run -> its rows, as metrics.jsonl holds them."""


def charts(runs: Runs, planned: Mapping[str, int] | None = None) -> list[str]:
    """Draw what was measured; what no run has measured is left out.

    Args:
        runs: The runs.
        planned: What a device needs by `torchacc plan`: name -> bytes; drawn beside the memory.

    Returns:
        Addresses of images that hold them.
    """
    drawn = [_loss(runs), *(_curve(runs, *curve) for curve in _CURVES), *_memory(runs, planned or {})]
    return [chart for chart in drawn if chart]


def _loss(runs: Runs) -> str:
    if not any(points(rows, name)[0] for rows in runs.values() for name in ("loss", "eval_loss")):
        return ""
    figure, axes = _axes("loss", (11, 4.2))
    alone = len(runs) == 1
    for color, (run, rows) in zip(colors(runs), runs.items(), strict=True):
        steps, losses = points(rows, "loss")
        eval_steps, evals = points(rows, "eval_loss")
        reach = len(losses) // 40
        style: dict[str, Any] = {"label": "training" if alone else run}
        if reach:
            style = {"alpha": 0.3, "linewidth": 1} | ({"label": "training, each step"} if alone else {})
        axes.plot(steps, losses, color=color, rasterized=len(steps) > _MANY, **style)
        if reach:
            label = "training, smoothed" if alone else run
            axes.plot(steps, _smooth(losses, reach), color=color, linewidth=2, label=label)
        if evals:
            style = (
                {"color": _EVALUATION, "label": "evaluation"}
                if alone
                else {"color": color, "label": f"{run}, evaluation"}
            )
            axes.plot(eval_steps, evals, "o-" if alone else "o--", markersize=5, linewidth=1.5, **style)
    _mark(axes, runs)
    axes.legend(loc="upper right", frameon=False, labelcolor=_INK)
    return _embedded(figure)


def _curve(runs: Runs, name: str, title: str, formatter: Any) -> str:
    found = {run: points(rows, name) for run, rows in runs.items()}
    values = [value for _, of_run in found.values() for value in of_run]
    if not values or (name == "compile_secs" and not max(values)):
        return ""
    figure, axes = _axes(title, (5.4, 2.8))
    _draw(axes, found)
    _mark(axes, runs)
    if formatter is not None:
        axes.yaxis.set_major_formatter(formatter)
    if name == "grad_norm" and min(values) > 0 and max(values) / min(values) > 30:
        axes.set_yscale("log")
    elif name != "grad_norm":
        _from_zero(axes)
    return _embedded(figure)


def _memory(runs: Runs, planned: Mapping[str, int]) -> list[str]:
    drawn = []
    gib = 2**30  # the axis is in GiB, so that its ticks are round
    measured = {run: memory_points(rows) for run, rows in runs.items()}
    for of in {of: None for peaks in measured.values() for of in peaks}:
        found = {run: peaks.get(of, ([], [])) for run, peaks in measured.items()}
        figure, axes = _axes(f"peak memory of {'the fullest device' if of == 'device' else 'the process'}", (5.4, 2.8))
        _draw(axes, {run: (steps, [nbytes / gib for nbytes in values]) for run, (steps, values) in found.items()})
        for index, (name, nbytes) in enumerate(planned.items()):
            style = ("--", ":", "-.", (0, (5, 1)))[index % 4]
            axes.axhline(nbytes / gib, color=_INK, linestyle=style, linewidth=1.2, label=f"plan, {name}")
        if planned:
            axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g} GiB"))
        _from_zero(axes)
        drawn.append(_embedded(figure))
    return drawn


def _from_zero(axes: Axes) -> None:
    """Set an axis to begin at 0, with room above also where the values are all alike."""
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])


def _draw(axes: Axes, found: Mapping[str, tuple[list[int], list[Any]]]) -> None:
    for color, (steps, values) in zip(colors(found), found.values(), strict=True):
        marker = "o" if len(steps) < 40 else None
        axes.plot(steps, values, color=color, linewidth=1.5, marker=marker, markersize=3, rasterized=len(steps) > _MANY)


def _mark(axes: Axes, runs: Runs) -> None:
    """Draw a line where a run was started again, or compiled a program anew."""
    named = set()
    for color, rows in zip(colors(runs), runs.values(), strict=True):
        for kind, step in {(row["mark"], row["step"]) for row in rows if row.get("mark") in _MARKS}:
            label, style, own = _MARKS[kind]
            shown_once = None if kind in named else label
            named.add(kind)
            axes.axvline(step, color=own if len(runs) == 1 else color, linestyle=style, linewidth=1, label=shown_once)


def colors(runs: Mapping[str, Any]) -> list[str]:
    """Return the color of each run."""
    return [_COLORS[index % len(_COLORS)] for index in range(len(runs))]


def _smooth(values: Sequence[float], reach: int) -> Any:
    """Return for each value the mean of as many before it as after it, which does not lag behind."""
    index = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(index, index[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + reaches + 1] - sums[index - reaches]) / (2 * reaches + 1)


def _axes(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_FAINT)
    axes.tick_params(colors=_FAINT, labelcolor=_INK, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.ticklabel_format(axis="y", scilimits=(-3, 4))
    axes.grid(alpha=0.25)
    return figure, axes


def _embedded(figure: Figure) -> str:
    """Return a figure as the address of an image that holds it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, dpi=150)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
