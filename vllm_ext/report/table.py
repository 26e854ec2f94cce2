"""A table, as text for a terminal or as Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of equal length under a header.

    Floats are shown with four significant digits, None as ``-``.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    """Stands above the text."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"rows: {len(row)} cells in {row!r:.80}, {len(self.header)} in the header")

    def __str__(self) -> str:
        """Return plain text: columns of numbers to the right, others to the left."""
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = [all(isinstance(value, int | float | None) for value in column) for column in self._columns()]
        lines = [
            "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
            for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([f"\n{self.title}", *lines] if self.title else lines)

    def markdown(self) -> str:
        """Return Markdown; every line ends in a newline."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.cells()]
        first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) + "\n" for row in rows)
        return "".join([first, "|" + "---|" * len(self.header) + "\n", *others])

    def cells(self) -> list[list[str]]:
        """Return the header and the rows as texts."""
        return [list(self.header), *([_cell(value) for value in row] for row in self.rows)]

    def _columns(self) -> list[list[object]]:
        return [[row[at] for row in self.rows] for at in range(len(self.header))]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
