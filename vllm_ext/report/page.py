"""Results as one HTML page that loads nothing: verdicts, charts, tables that sort, and the command that repeats them.

Charts are drawn by `vllm_ext.report.plots` and stand in the page as SVG, whose black becomes the page's text colour.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_ext.files import replaced
from vllm_ext.report import plots
from vllm_ext.report.results import Result
from vllm_ext.report.table import Table

KINDS: Mapping[str, str] = {"better": "▲", "same": "=", "worse": "▼", "unknown": "?", "met": "✓", "missed": "✗"}
"""What a verdict can say, and its sign, which is told apart without its colour."""
_PAINT = {
    "#000000": "currentColor", "#595959": "currentColor", "#ffffff": "none", "#dddddd": "var(--grid)",
    "#0072b2": "var(--blue)", "#5e3c99": "var(--purple)", "#8c6d31": "var(--brown)",
}  # fmt: skip
"""Colours of figures that a dark page can't show -> what stands for them."""
_STRIPPED = re.compile(
    r'<metadata>.*?</metadata>|^.*?(?=<svg)| xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', re.S
)
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) [\d.]+"')
_ID = re.compile(r'(\bid="|href="#|url\(#)')


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line of what was found."""

    text: str
    kind: str
    """One of `KINDS`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: must be one of {', '.join(KINDS)}")

    @classmethod
    def of_ratio(cls, text: str, low: float, high: float) -> Verdict:
        """Return the verdict on how many times better something is, by the interval of that; 1.00 is the same."""
        kind = "better" if low > 1 else "worse" if high < 1 else "unknown"
        return cls(text=text, kind="same" if round(low, 2) == round(high, 2) == 1 else kind)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure."""

    caption: str
    alt: str
    """What it shows, for those who can't see it."""
    draw: Callable[[Path], None]
    """Writes an SVG to a path, as the functions of `plots` do; the ValueError of one that can't stands in its place."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page that folds."""

    title: str
    text: str = ""
    """A paragraph per line; an indented line is code."""
    charts: Sequence[Chart] = ()
    table: Table | None = None
    open: bool = True


@dataclass(frozen=True, kw_only=True)
class Page:
    """What `write` shows, in this order but for the command, which ends the page."""

    title: str
    verdicts: Sequence[Verdict] = ()
    sections: Sequence[Section]
    left_out: Sequence[str] = ()
    """What was dropped, failed or is incomplete, a line each."""
    command: str
    """Repeats the run."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions, machine, configuration; one of several lines folds."""


def facts_of(result: Result) -> dict[str, str]:
    """Return what a page tells of how a result came about."""
    served = result.workload
    rows = f", {served.rows} rows" if served.rows else ""  # lengths that are drawn come of no file
    return {
        "workload": f"{served.name}{rows}, SHA-256 {served.sha256}",
        "seed": str(result.seed),
        **{name.replace("_", " "): str(value) for name, value in {**result.versions, **result.machine}.items()},
        "configuration": json.dumps(result.config, indent=1),
    }


def write(page: Page, path: Path) -> None:
    """Write a page; a file that was there before is replaced when the new one is complete.

    Raises:
        ImportError: jinja2 or matplotlib is missing.
        OSError: the file cannot be written.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("pages need jinja2: pip install 'vllm-ext[lab]'") from error
    template = Environment(
        loader=PackageLoader("vllm_ext.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    ).get_template("page.html")  # fmt: skip
    html = template.render(page=page, signs=KINDS, rows_of=_rows, svg_of=_svg)
    with replaced(path) as file:
        file.write(html.encode())


def _rows(table: Table) -> Iterator[list[tuple[str, float | None]]]:
    """Yield rows of cells: the text, and the number to sort by if it is one."""
    for row, texts in zip(table.rows, table.cells()[1:], strict=True):
        numbers = (
            v if isinstance(v, int | float) and math.isfinite(v) and v is not True and v is not False else None
            for v in row
        )
        yield list(zip(texts, numbers, strict=True))


def _svg(chart: Chart, prefix: str) -> str:
    """Return a chart for the page, where ids get a prefix of its own; or why it can't be drawn."""
    from markupsafe import Markup

    with TemporaryDirectory() as folder, plots.narrow():
        file = Path(folder, "chart.svg")
        try:
            chart.draw(file)
        except ValueError as error:
            return f"Not drawn: {error}"
        svg = _STRIPPED.sub("", file.read_text(encoding="utf-8"))
    for colour, paint in _PAINT.items():
        svg = svg.replace(colour, paint)
    svg = _SIZE.sub(lambda found: f'{found[0]} style="width: {1.1 * float(found[1]):.0f}px; '
                                  f'min-width: {0.85 * float(found[1]):.0f}px"', svg, count=1)  # fmt: skip
    return Markup(_ID.sub(rf"\g<1>{prefix}-", svg).replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif"))
