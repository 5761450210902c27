"""Numbers and tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from lightning_zb.planning import budget

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def time_unit(seconds: Iterable[float]) -> tuple[float, str]:
    """The unit in which the largest of some times has two digits or more: its seconds and its name."""
    longest = max(seconds, default=0.0)
    return next((unit for unit in _TIMES if longest >= 10 * unit[0]), _TIMES[-1])


def byte_unit(sizes: Iterable[float]) -> tuple[float, str]:
    """The unit in which the largest of some sizes is 1 or more: its bytes and its name."""
    return budget.byte_unit(max(sizes, default=0.0))


def duration(seconds: float) -> str:
    """A time with its unit."""
    scale, name = time_unit([seconds])
    return f"{seconds / scale:.5g} {name}"


def share(value: float) -> str:
    """A share of one, without a minus before a zero."""
    return f"{round(value, 4) + 0.0:.4f}"


def runs(values: Sequence[str]) -> str:
    """A list in which equal neighbours are counted: 2.5, 2.5, 2.5, 2.0 become `3x2.5 2.0`."""
    counted = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(value if count == 1 else f"{count}x{value}" for value, count in counted)


def as_option(value: object) -> str:
    """A memory budget as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> str:
    """Columns as wide as they must be.

    Args:
        header: a name for each column.
        rows: cells.
        left: columns that are aligned on the left; numbers stay on the right.
    """
    left = set(left)
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
