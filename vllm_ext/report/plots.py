"""Figures of benchmarks and simulations, drawn from plain data; PNG or SVG by suffix, equal data gives equal bytes.

A system has one colour and one marker in every figure. Text in an SVG stays text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ext.files import replaced
from vllm_ext.report.plot_style import RC, Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = {".png": "png", ".svg": "svg"}
_METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
_BAR, _LETTER = 0.55, 0.085
"""Widths of a bar and of a letter of a tick's label, in inches."""
_INSIDE = 4
"""More legend entries than this go beside the axes."""
_NARROW: ContextVar[bool] = ContextVar("_NARROW", default=False)
_ENTRY, _SHORT = 0.19, 24
"""Height of a legend's line in inches, and length of labels of which two fit side by side in a narrow figure."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one line."""

    label: str
    """Name of the system; decides colour and marker."""
    x: Sequence[float]
    y: Sequence[float]
    """As many as x; NaN or infinite where there is no value."""
    low: Sequence[float] = ()
    """Lower edge of a band around y, as many as x; empty: no band."""
    high: Sequence[float] = ()
    """Upper edge."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"y of {self.label}: {len(self.y)} values for {len(self.x)} of x")
        if len(self.low) != len(self.high) or len(self.low) not in (0, len(self.x)):
            raise ValueError(f"band of {self.label}: {len(self.low)} and {len(self.high)} for {len(self.x)} of x")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of several axes that share their x."""

    ylabel: str
    series: Sequence[Series]


def empirical_cdf(label: str, values: ArrayLike, *, points: int = 1000, parts: Sequence[ArrayLike] = ()) -> Series:
    """Return the fraction of values up to each, thinned to at most ``points``; values that are not finite are left out.

    Args:
        label: Of the line.
        values: In any order.
        points: Most that are kept.
        parts: The same measure by run, or by part of the run: the band spans their distributions. Empty ones are left
            out.

    Raises:
        ValueError: no value is finite.
    """
    ordered, *others = (_finite(some) for some in (values, *parts))
    if not len(ordered):
        raise ValueError(f"values of {label}: at least one finite value is needed")
    ranks = np.unique(np.linspace(len(ordered), 1, min(points, len(ordered))).round().astype(int))
    x = ordered[ranks - 1]
    beside = [np.searchsorted(part, x, side="right") / len(part) for part in others if len(part)]
    low, high = (edge(beside, axis=0).tolist() if beside else [] for edge in (np.min, np.max))
    return Series(label=label, x=x.tolist(), y=(ranks / len(ordered)).tolist(), low=low, high=high)


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    return np.sort(found[np.isfinite(found)])


@contextmanager
def narrow() -> Iterator[None]:
    """Draw narrower figures, with legends below, while the block lasts: their text is legible on a phone."""
    token = _NARROW.set(True)
    try:
        yield
    finally:
        _NARROW.reset(token)


def lines(
    series: Sequence[Series],
    path: Path,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    limit: float | None = None,
    limit_label: str = "limit",
    y_max: float | None = None,
) -> None:
    """Draw a measure against a load, a line per system: latency or goodput against request rate, say.

    Args:
        series: One line each, by the order of the legend.
        path: Ends in ``.png`` or ``.svg``.
        xlabel: With its unit; so is ``ylabel``.
        ylabel: See ``xlabel``.
        title: Above the axes.
        log_x: Logarithmic x axis; so is ``log_y``.
        log_y: See ``log_x``.
        limit: Draw a horizontal line here: the objective.
        limit_label: Its name in the legend.
        y_max: Top of the axis; a line that leaves it (the system saturates) ends there.

    Raises:
        ValueError: there is nothing to draw, or the suffix is unknown; nothing is written.
    """
    _refuse_nothing(series)
    with _figure(path, width=6.4) as (figure, axes):
        for one, style in _styled(series):
            x, y = _points(one, y_max)
            axes.plot(x, y, label=one.label, color=style.colour, marker=style.marker, clip_on=True)
            _band(axes, one, style)
        if limit is not None:
            axes.axhline(limit, color="0.35", linestyle="--", linewidth=1.0, label=limit_label)
        _finish(axes, xlabel, ylabel, title, log_x=log_x, log_y=log_y)
        if y_max is not None:
            axes.set_ylim(top=y_max)
        if not log_y:
            axes.set_ylim(bottom=0)
        _legend(figure, axes)


def latency_vs_rate(
    series: Sequence[Series], path: Path, *, ylabel: str = "normalised latency (ms/token)", **options: Any
) -> None:
    """Draw latency against request rate; see `lines`."""
    lines(series, path, xlabel="request rate (requests/s)", ylabel=ylabel, **options)


def cdf(series: Sequence[Series], path: Path, *, xlabel: str, title: str = "", log_x: bool = False) -> None:
    """Draw cumulative distributions, as from `empirical_cdf`; raises as `lines`."""
    _refuse_nothing(series)
    with _figure(path, width=6.4) as (figure, axes):
        for one, style in _styled(series):
            axes.step(one.x, one.y, where="post", label=one.label, color=style.colour, linestyle=style.dash)
            _band(axes, one, style, step="post")
        _finish(axes, xlabel, "fraction", title, log_x=log_x)
        axes.set_ylim(0, 1.02)
        _legend(figure, axes)


def over_time(panels: Sequence[Panel], path: Path, *, title: str = "", xlabel: str = "time (s)") -> None:
    """Draw quantities over time, one below the other: KV cache used, running, waiting; raises as `lines`."""
    with _stacked(panels, path, xlabel, title) as pairs:
        for axes, one, style in pairs:
            look = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.2}
            axes.step(one.x, one.y, where="post", label=one.label, **look)
        for axes, _, _ in pairs:  # once all are drawn, as it fixes the top too
            axes.set_ylim(bottom=0)


def stacked(panels: Sequence[Panel], path: Path, *, xlabel: str, title: str = "", log_y: bool = False) -> None:
    """Draw measures against one load, one below the other: several percentiles, say; raises as `lines`."""
    with _stacked(panels, path, xlabel, title, log_y=log_y) as pairs:
        for axes, one, style in pairs:
            axes.plot(one.x, one.y, label=one.label, color=style.colour, marker=style.marker, markersize=3.5)


@contextmanager
def _stacked(
    panels: Sequence[Panel], path: Path, xlabel: str, title: str, *, log_y: bool = False
) -> Iterator[list[tuple[Axes, Series, Style]]]:
    _refuse_nothing([one for panel in panels for one in panel.series])
    names = styles([one.label for panel in panels for one in panel.series])
    with _figure(path, width=7.2, height=0.9 + 1.7 * len(panels), rows=len(panels)) as (figure, found):
        all_axes = np.atleast_1d(found)
        yield [
            (axes, one, names[one.label]) for panel, axes in zip(panels, all_axes, strict=True) for one in panel.series
        ]
        for panel, axes in zip(panels, all_axes, strict=True):
            _finish(axes, "", panel.ylabel, "", log_y=log_y)
        all_axes[0].set_title(title)
        all_axes[-1].set_xlabel(xlabel)
        figure.align_ylabels()
        _legend(figure, *all_axes, beside=True)


def bars(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    path: Path,
    *,
    ylabel: str,
    title: str = "",
) -> None:
    """Draw grouped bars with their values above: memory per system, or a paper's value beside ours.

    Args:
        groups: Names along the x axis.
        values: Legend entry -> a value per group, NaN where there is none.
        path: Ends in ``.png`` or ``.svg``.
        ylabel: With its unit.
        title: Above the axes.

    Raises:
        ValueError: there is nothing to draw, an entry has not one value per group, or the suffix is unknown.
    """
    if not groups or not values:
        raise ValueError("values: at least one group with one value is needed")
    for label, heights in values.items():
        if len(heights) != len(groups):
            raise ValueError(f"values of {label}: {len(heights)} for {len(groups)} groups")
    names, width = styles(list(values)), 0.8 / len(values)
    with _figure(path, width=max(5.0, 1.4 + _BAR * len(groups) * len(values))) as (figure, axes):
        for index, (label, heights) in enumerate(values.items()):
            places = np.arange(len(groups)) + (index - (len(values) - 1) / 2) * width
            known = [height if math.isfinite(height) else 0.0 for height in heights]
            drawn = axes.bar(places, known, width * 0.92, label=label, color=names[label].colour)
            axes.bar_label(drawn, labels=[_number(height) for height in heights], padding=2, fontsize=8)
        fits = all(len(group) * _LETTER < _BAR * len(values) for group in groups)
        slanted: dict[str, Any] = {} if fits else {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(groups)), list(groups), **slanted)
        _finish(axes, "", ylabel, title)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
        if len(values) > 1:
            _legend(figure, axes, beside=True)


def compare_with_paper(
    items: Sequence[str], paper: Sequence[float], ours: Sequence[float], path: Path, *, ylabel: str, title: str = ""
) -> None:
    """Draw what a paper reports beside what we found; raises as `bars`."""
    bars(items, {"paper": paper, "ours": ours}, path, ylabel=ylabel, title=title)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _refuse_nothing(series: Sequence[Series]) -> None:
    if not any(len(one.x) for one in series):
        raise ValueError("series: at least one line with one point is needed")


def _styled(series: Sequence[Series]) -> Iterator[tuple[Series, Style]]:
    names = styles([one.label for one in series])
    for one in series:
        yield one, names[one.label]


def _band(axes: Axes, series: Series, style: Style, step: Literal["post"] | None = None) -> None:
    if series.low:
        x, low, high = zip(*sorted(zip(series.x, series.low, series.high, strict=True)), strict=True)
        axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0, step=step)


def _points(series: Series, y_max: float | None) -> tuple[list[float], list[float]]:
    """Finite points by x, up to and with the first above ``y_max``."""
    x, y = [], []
    for place, value in sorted(zip(series.x, series.y, strict=True)):
        if not math.isfinite(value):
            continue
        x.append(place)
        y.append(value)
        if y_max is not None and value > y_max:
            break
    return x, y


@contextmanager
def _figure(path: Path, *, width: float, height: float = 3.8, rows: int = 1) -> Iterator[tuple[Any, Any]]:
    """Offer a figure and its axes, and write the file when the block is through; sizes are inches."""
    kind = _SUFFIXES.get(path.suffix)
    if kind is None:
        raise ValueError(f"path={path.name!r}: must end in one of {', '.join(_SUFFIXES)}")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'vllm-ext[lab]'") from error
    with rc_context(RC):
        size = (0.75 * width, 0.85 * height) if _NARROW.get() else (width, height)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, 1, sharex=True)
        with replaced(path) as file:
            figure.savefig(file, format=kind, metadata=_METADATA[kind])


def _finish(axes: Axes, xlabel: str, ylabel: str, title: str, *, log_x: bool = False, log_y: bool = False) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    for log, name in ((log_x, "x"), (log_y, "y")):
        if log:
            getattr(axes, f"set_{name}scale")("log")
            _plain_numbers(getattr(axes, f"{name}axis"))


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 10, 20, 100 in place of powers, whose labels run into each other."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def _legend(figure: Any, *all_axes: Axes, beside: bool = False) -> None:
    """List every label once: inside the axes, or beside them where there are many or it is asked for.

    A narrow figure has it below, and grows by it.
    """
    entries: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if _NARROW.get():
        columns = 2 if max(map(len, entries)) < _SHORT else 1
        figure.set_figheight(figure.get_figheight() + _ENTRY * math.ceil(len(entries) / columns))
        figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=columns)
    elif beside or len(entries) > _INSIDE:
        figure.legend(list(entries.values()), list(entries), loc="outside right upper")
    else:
        all_axes[0].legend(list(entries.values()), list(entries), loc="best")
