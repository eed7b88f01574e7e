"""The report of a run: one HTML page with its curves and facts, which needs nothing beside itself."""

import datetime
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from torchacc.env import installed_version
from torchacc.train.metric_sinks import Row
from torchacc.train.report_charts import charts, colors
from torchacc.train.run_reading import memory_points, points

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
        charts=charts({"": rows}),
        tables={"Run": flat, "Machine": _machine()} | {k: v for k, v in sections.items() if _is_flat(v)},
        texts={k: _as_yaml(v) for k, v in sections.items() if not _is_flat(v)},
        events=[row for row in rows if "event" in row],
    )
    path.write_text(page, encoding="utf-8")


def write_comparison(
    path: Path,
    runs: Mapping[str, Sequence[Row]],
    outcomes: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]],
    planned: Mapping[str, int] | None = None,
) -> None:
    """Write a page of several runs: their curves in the same pictures, and the options in which they differ.

    Args:
        path: The file.
        runs: Name of a run -> its rows, as metrics.jsonl holds them.
        outcomes: How each ended, by its name.
        options: Those of each, by its name: dotted name -> value.
        planned: What a device needs by `torchacc plan`, which is drawn beside the memory: name -> bytes.
    """
    tiles = {run: {"outcome": outcomes[run].partition("\n")[0]} | _tiles(rows) for run, rows in runs.items()}
    for run, rows in runs.items():
        marks = [row["mark"] for row in rows if "mark" in row]
        tiles[run] |= {"restarts": str(marks.count("restart")), "compiled anew": str(marks.count("compile"))}
    names = list(dict.fromkeys(name for of_run in tiles.values() for name in of_run))
    all_options = list(dict.fromkeys(name for of_run in options.values() for name in of_run))
    differing = [name for name in all_options if len({_shown(of_run.get(name)) for of_run in options.values()}) > 1]
    page = _TEMPLATE.render(
        title=" and ".join(runs) if len(runs) < 4 else f"{len(runs)} runs",
        outcome=f"{len(runs)} runs" if len(runs) > 1 else next(iter(outcomes.values())),
        kind=next(iter(outcomes.values())).partition(":")[0] if len(runs) == 1 else "",
        when=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        colors=dict(zip(runs, colors(runs), strict=True)),
        compared={
            "What was measured": {name: [tiles[run].get(name, "") for run in runs] for name in names},
            "Options that differ": {name: [options[run].get(name) for run in runs] for name in differing},
        },
        charts=charts(runs, planned),
        events=[{**row, "run": run} for run, rows in runs.items() for row in rows if "event" in row],
    )
    path.write_text(page, encoding="utf-8")


def _tiles(rows: Sequence[Row]) -> dict[str, str]:
    losses, evals = points(rows, "loss")[1], points(rows, "eval_loss")[1]
    rates, shares = points(rows, "tokens_per_sec")[1], points(rows, "mfu")[1]
    tiles = {}
    if losses:
        tiles["loss, first → last"] = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    if evals:
        tiles["eval loss, last"] = f"{evals[-1]:.3f}" + (f" (best {min(evals):.3f})" if evals[-1] > min(evals) else "")
    if tokens := points(rows, "tokens")[1]:
        tiles["tokens"] = f"{tokens[-1]:,}"
    if rates:
        tiles["tokens/s, median"] = f"{sorted(rates)[len(rates) // 2]:,.0f}"
    if shares:
        tiles["MFU, median"] = f"{sorted(shares)[len(shares) // 2]:.1%}"
    for of, (_, peaks) in memory_points(rows).items():
        tiles[f"peak {of} memory"] = f"{max(peaks) / 2**30:.2f} GiB"
    if secs := points(rows, "secs")[1]:
        tiles["duration"] = str(datetime.timedelta(seconds=round(secs[-1])))
    return tiles


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
