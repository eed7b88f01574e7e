"""Write tables as Markdown. Pure functions."""

from collections.abc import Mapping, Sequence


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


def megabytes(size: float) -> str:
    """Return a number of bytes in MB."""
    return f"{size / 1e6:.1f}"


TRAFFIC_HEADER = ["gathers", "reductions", "other"]


def traffic_cells(traffic: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the collectives of a step as number / MB under `TRAFFIC_HEADER`.

    Args:
        traffic: `count` and `size` in bytes, by kind.
    """
    kinds = (("all-gather",), ("all-reduce", "reduce-scatter"), ("all-to-all", "collective-permute"))
    return [
        " + ".join(f"{traffic[kind]['count']} / {megabytes(traffic[kind]['size'])}" for kind in cell if kind in traffic)
        for cell in kinds
    ]
