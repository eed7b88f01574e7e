"""The report of a run: one HTML page with its curves and facts, which needs nothing beside itself."""

import base64
import datetime
import io
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from torchacc.env import installed_version
from torchacc.train.metric_sinks import Row

_INK, _FAINT, _BLUE, _ORANGE = "#1f2933", "#9aa5b1", "#2f6fde", "#e8710a"
_MANY = 5000
"""Points of a curve from which on it is drawn as pixels, so that the page does not grow with them."""
_PACKAGES = ("torchacc", "torch", "torch_xla", "transformers", "datasets")


def write_report(path: Path, rows: Sequence[Row], outcome: str, facts: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: The file.
        rows: The run's, as metrics.jsonl holds them.
        outcome: How it ended, such as `finished` or `failed: out of memory`.
        facts: What to say of the run: name -> value, or a heading -> such a mapping.
    """
    sections = {name: dict(value) for name, value in facts.items() if isinstance(value, Mapping)}
    flat = {name: value for name, value in facts.items() if name not in sections}
    page = _TEMPLATE.render(
        title=f"{path.resolve().parent.parent.name} / {path.resolve().parent.name}",
        outcome=outcome.partition("\n")[0],
        kind=outcome.partition(":")[0],
        when=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        tiles=_tiles(rows),
        charts=[chart for chart in (_loss(rows), *(_curve(rows, *curve) for curve in _CURVES)) if chart],
        tables={"Run": flat, "Machine": _machine()} | {k: v for k, v in sections.items() if _is_flat(v)},
        texts={k: _as_yaml(v) for k, v in sections.items() if not _is_flat(v)},
        events=[row for row in rows if "event" in row],
    )
    path.write_text(page, encoding="utf-8")


def _tiles(rows: Sequence[Row]) -> dict[str, str]:
    losses, evals = _points(rows, "loss")[1], _points(rows, "eval_loss")[1]
    rates, shares = _points(rows, "tokens_per_sec")[1], _points(rows, "mfu")[1]
    tiles = {}
    if losses:
        tiles["loss, first → last"] = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    if evals:
        tiles["eval loss, last"] = f"{evals[-1]:.3f}" + (f" (best {min(evals):.3f})" if evals[-1] > min(evals) else "")
    if tokens := _points(rows, "tokens")[1]:
        tiles["tokens"] = f"{tokens[-1]:,}"
    if rates:
        tiles["tokens/s, median"] = f"{sorted(rates)[len(rates) // 2]:,.0f}"
    if shares:
        tiles["MFU, median"] = f"{sorted(shares)[len(shares) // 2]:.1%}"
    for of in ("device", "process"):
        if peaks := _points(rows, f"{of}_memory_bytes")[1]:
            tiles[f"peak {of} memory"] = f"{max(peaks) / 2**30:.2f} GiB"
    if secs := _points(rows, "secs")[1]:
        tiles["duration"] = str(datetime.timedelta(seconds=round(secs[-1])))
    return tiles


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[Any]]:
    """Return the steps at which a value was measured, and its values."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _loss(rows: Sequence[Row]) -> str:
    steps, losses = _points(rows, "loss")
    eval_steps, evals = _points(rows, "eval_loss")
    if not steps and not eval_steps:
        return ""
    figure, axes = _axes("loss", (11, 4.2))
    reach = len(losses) // 40
    style: dict[str, Any] = {"alpha": 0.3, "linewidth": 1} if reach else {}
    axes.plot(steps, losses, color=_BLUE, label="training, each step", rasterized=len(steps) > _MANY, **style)
    if reach:
        axes.plot(steps, _smooth(losses, reach), color=_BLUE, linewidth=2, label="training, smoothed")
    if evals:
        axes.plot(eval_steps, evals, "o-", color=_ORANGE, markersize=5, linewidth=1.5, label="evaluation")
    axes.legend(loc="upper right", frameon=False, labelcolor=_INK)
    return _embedded(figure)


def _smooth(values: Sequence[float], reach: int) -> Any:
    """Return for each value the mean of as many before it as after it, which does not lag behind."""
    index = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(index, index[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + reaches + 1] - sums[index - reaches]) / (2 * reaches + 1)


_CURVES = (
    ("lr", "learning rate", None),
    ("grad_norm", "gradient norm", None),
    ("tokens_per_sec", "tokens/s", EngFormatter()),
    ("mfu", "MFU", PercentFormatter(1.0)),
    ("data_wait", "share of time waiting for data", PercentFormatter(1.0)),
)


def _curve(rows: Sequence[Row], name: str, title: str, formatter: Any) -> str:
    steps, values = _points(rows, name)
    if not steps:
        return ""
    figure, axes = _axes(title, (5.4, 2.8))
    axes.plot(
        steps,
        values,
        color=_BLUE,
        linewidth=1.5,
        marker="o" if len(steps) < 40 else None,
        markersize=3,
        rasterized=len(steps) > _MANY,
    )
    if formatter is not None:
        axes.yaxis.set_major_formatter(formatter)
    if name == "grad_norm" and min(values) > 0 and max(values) / min(values) > 30:
        axes.set_yscale("log")
    elif name != "grad_norm":
        axes.set_ylim(bottom=0)
    return _embedded(figure)


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


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed_version(name) or "not installed" for name in _PACKAGES},
        "command": " ".join(sys.argv),
    }


def _is_flat(section: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, Mapping | list | tuple) for value in section.values())


def _as_yaml(section: Mapping[str, Any]) -> str:
    return yaml.safe_dump(_plain(section), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


_environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_environment.filters["shown"] = _shown
_TEMPLATE = _environment.from_string(Path(__file__).with_name("report_template.html").read_text(encoding="utf-8"))
