"""Write tables as Markdown. Pure functions."""

from collections.abc import Sequence


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns: text to the left in the first, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return " | ".join(["| " + first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = "|".join(["|" + "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def count(number: int, noun: str) -> str:
    """Return a number of things in words, such as `1 round`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
