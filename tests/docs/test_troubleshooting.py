"""docs/troubleshooting.md quotes messages of the package: each heading in backticks is a part of one."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
VALUE = "\0"
"""Stands in a message for what is filled in."""


@cache
def texts() -> str:
    """Return every string of the package's source but docstrings, f-strings with their values left out."""
    found = []
    for path in sorted((ROOT / "torchacc").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if node in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]|%\.\d+f", VALUE, node.value))
    return "\n".join(found)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_heading_quotes_a_message(heading):
    parts = [re.escape(part) for part in heading.split("…")]
    assert re.search(f"[^\n]*{VALUE}[^\n]*".join(parts), texts()), f"no message of the package has {heading!r}"


def test_headings_were_found():
    assert len(HEADINGS) > 40
    assert len(set(HEADINGS)) == len(HEADINGS)
    assert min(map(len, HEADINGS)) >= len("cannot split")
