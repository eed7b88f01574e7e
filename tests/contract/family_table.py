"""docs/families.md: how each family went on each engine.

python tests/contract/family_table.py build/families   # prints the page of what a sweep has come to so far
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from families import all_families
from sweep import NUM_RANKS, read

ENGINES = ("native", "xla-multiprocess", "xla-spmd")
KINDS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence-to-sequence models",
    "vision": "Image classification",
}
HEADER = """\
# Families of models

Every causal, masked, sequence-to-sequence and image-classifying class of transformers
{version} that can be built small from its configuration, as the names of its options tell: two steps of SGD on each
[engine](engines.md), sharded over two devices, beside the same model in plain PyTorch on the whole batch. *agrees*:
both losses and both gradient norms to 1e-4, and all parameters after the steps to 2e-5, in float32, relative to the
number or to 1. Where rounding moves plain PyTorch's own numbers by more, four times as much is allowed as they move
when each weight does by 1e-7, and a note says so. Buffers are not compared: some are statistics of a device's batch.
Dropout is 0, and BatchNorm uses what it has stored, as each is
[another thing in each engine](engines.md#where-they-differ-by-nature); a router of zeros, whose experts all tie, gets
random weights.

{counts}

Written by `python -m pytest tests/contract/test_families.py --write-tables`.
"""

Found = Mapping[str, Mapping[str, Mapping[str, Any]]]


def table(found: Found) -> str:
    """Return the page of what a sweep has found: by engine and by family."""
    import transformers

    lines: list[str] = []
    notes: list[str] = []
    untried: dict[str, str] = {}
    families = all_families()
    for kind, heading in KINDS.items():
        lines += ["", f"## {heading}", "", f"| | {' | '.join(ENGINES)} |", "|---|---|---|---|"]
        for family in (each for each in families.values() if each.kind == kind):
            facts = [found.get(engine, {}).get(family.name, {}) for engine in ENGINES]
            if any(each.get("outcome") == "not built" for each in facts):
                untried[family.model_class] = next(each["reason"] for each in facts if each.get("reason"))
                continue
            cells = [_cell(each, notes) for each in facts]
            lines.append(f"| `{family.model_class}` | {' | '.join(cells)} |")
    lines += ["", "## What the table says", ""] if notes else []
    lines += [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    lines += ["", "## Not tried", "", "What cannot be built small so, or does not train in plain PyTorch:", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| `{name}` | {_escaped(reason)[:160]} |" for name, reason in untried.items()]
    return HEADER.format(version=transformers.__version__, counts=_counts(found)) + "\n".join(lines) + "\n"


def _cell(facts: Mapping[str, Any], notes: list[str]) -> str:
    outcome = facts.get("outcome", "not tried")
    if outcome == "not tried" or not facts.get("reason"):
        return str(outcome)
    reason = _escaped(facts["reason"])[:400]
    if reason not in notes:
        notes.append(reason)
    return f"{outcome} ({notes.index(reason) + 1})"


def _counts(found: Found) -> str:
    parts = []
    for engine in ENGINES:
        counts = Counter(each["outcome"] for each in found.get(engine, {}).values())
        tried = sum(counts.values()) - counts["not built"]
        others = [f"{number} {name}" for name, number in counts.items() if name not in ("agrees", "not built")]
        parts.append(f"{engine}: {counts['agrees']} of {tried} agree{''.join(f', {each}' for each in others)}.")
    return " ".join(parts)


def _escaped(text: str) -> str:
    """Return a message as text of a table: angle brackets and bars would be markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    names = list(all_families())
    print(table({engine: read(folder / engine, engine, names) for engine in ENGINES if engine in NUM_RANKS}), end="")
