"""Read a run's folder while it trains or afterwards: what was measured, by what options, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchacc.config.text_file import read_json
from torchacc.errors import ConfigError
from torchacc.train.metric_sinks import Row, read_metrics
from torchacc.train.run_folder import METRICS, RUN, is_finished


@dataclass(frozen=True)
class RunRead:
    """What a run's folder says."""

    rows: list[Row]
    """What was measured, as metrics.jsonl holds it."""
    options: Mapping[str, Any]
    """Dotted name -> value, as the run was first started with; of a script's own run there are none."""
    outcome: str
    """How it ended, such as `finished`; `no end yet` while it trains, or where it was killed."""

    @property
    def has_ended(self) -> bool:
        """Whether it has said how it ended; one that failed may be started again."""
        return self.outcome != _NO_END

    @property
    def is_finished(self) -> bool:
        """Whether it has trained all its steps, so that nothing follows."""
        return self.outcome == _FINISHED


_NO_END = "no end yet"
_FINISHED = "finished"


def points(rows: Sequence[Row], name: str) -> tuple[list[int], list[Any]]:
    """Return the steps at which a value was measured, and its values."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def memory_points(rows: Sequence[Row]) -> dict[str, tuple[list[int], list[int]]]:
    """Return peaks of memory in bytes, as `points()` does, of what was measured: the `device`, the `process`."""
    found = {of: points(rows, f"{of}_memory_bytes") for of in ("device", "process")}
    return {of: measured for of, measured in found.items() if measured[0]}


def read_run(folder: Path) -> RunRead:
    """Read a run's folder.

    Raises:
        ConfigError: It holds no run, or something in it cannot be read.
    """
    if not (folder / METRICS).is_file():
        below = sorted(
            path.parent.relative_to(folder).as_posix()
            for under in ("*", "*/*")
            for path in folder.glob(f"{under}/{METRICS}")
        )
        hint = f"name one of those below it: {', '.join(below[:8])}" if below else "name the folder of a stage"
        raise ConfigError(f"{folder} holds no {METRICS}, which a run writes from its first step on; {hint}")
    rows = read_metrics(folder / METRICS)
    options: Mapping[str, Any] = {}
    if (folder / RUN).is_file():
        found = read_json(folder / RUN)
        facts = found if isinstance(found, dict) else {}
        options = {**facts.get("identity", {}), **facts.get("options", {})}
    last = rows[-1] if rows else {}
    said = str(last["event"]) if "event" in last and "secs" in last else _NO_END  # the row that ends a run has both
    return RunRead(rows, options, _FINISHED if is_finished(folder) and said == _NO_END else said)
