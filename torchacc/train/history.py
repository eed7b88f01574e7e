"""`metrics.jsonl`, what a stage has measured: one JSON object a line, with its step."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchacc.config.text_file import read_text
from torchacc.errors import ConfigError, in_one_line, shown

_MAX_BYTES = 1 << 30

Row = dict[str, Any]
"""What was measured at a step, by name."""


def read_history(path: Path) -> list[Row]:
    """Return the lines of a file; none where there is no file. A line that was cut off by a crash is left out.

    Raises:
        ConfigError: Another line is not what a run has measured; names it.
    """
    if not path.exists():
        return []
    lines = read_text(path, _MAX_BYTES).split("\n")
    return [_read_line(path, i, line) for i, line in enumerate(lines[:-1], 1)]


def _read_line(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
        problem = "expected an object with a step"
    except (ValueError, RecursionError) as error:
        problem = in_one_line(error)
    raise ConfigError(
        f"{path}:{number}: {shown(line)} is nothing that a run has measured: {problem}; move the file away"
    )


class History:
    """The file of a stage that is running; it is added to line by line, each whole."""

    def __init__(self, path: Path, *, resumed_at: int) -> None:
        """Open the file, and cut off what a run before had measured after the step that this one goes on from.

        Args:
            path: The file.
            resumed_at: That step; 0 for a run that starts, whose file is empty.
        """
        self._path = path
        self.kept = [row for row in read_history(path) if row["step"] <= resumed_at] if resumed_at else []
        renewed = path.with_suffix(".renewed")
        renewed.write_text("".join(map(_line, self.kept)), encoding="utf-8")
        os.replace(renewed, path)
        self._file = path.open("ab", buffering=0)

    def write(self, rows: Iterable[Row]) -> None:
        """Add rows, each by one write; what is not finite is null."""
        for row in rows:
            self._file.write(_line(row).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> list[Row]:
        """Return all rows, those of the runs before included."""
        return read_history(self._path)


def _line(row: Mapping[str, Any]) -> str:
    values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(values, allow_nan=False) + "\n"
