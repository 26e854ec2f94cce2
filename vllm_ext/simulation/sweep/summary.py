"""The outcome of a sweep as one table and one plot."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_ext.observability.files import replaced
from vllm_ext.observability.results import format_table
from vllm_ext.simulation.constraint import Constraint
from vllm_ext.simulation.sweep.driver import Ran, Searched
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM, Point

Row = dict[str, Any]
"""One combination: the axes' values, counts, then metrics."""
METRIC = "normalised_latency_mean_ms_per_token"
"""What is plotted unless told otherwise."""
SHOWN = (
    "requests",
    METRIC,
    "ttft_mean_ms",
    "ttft_p99_ms",
    "tbt_p99_ms",
    "scheduling_delay_p50_s",
    "goodput_requests_per_s",
    "preemptions",
)
"""Metrics of the printed table; the files have all."""
CAPACITY = "capacity_requests_per_s"


def grid_rows(ran: Sequence[Ran], constraints: Sequence[Constraint]) -> list[Row]:
    """Return a row per combination: means over its repeats, with ``_min`` and ``_max`` where there are several.

    ``meets`` says whether every run met all constraints; a run that failed meets none.

    Raises:
        ValueError: a constraint names a metric that the runs do not have.
    """
    rows = []
    for group in _groups(ran, lambda one: one.point):
        metrics = [one.outcome.metrics for one in group if one.outcome.metrics is not None]
        row: Row = {**_cells(group[0].point), "runs": len(group), "failed": len(group) - len(metrics)}
        if constraints:
            kept = [all(constraint.meets(found) for constraint in constraints) for found in metrics]
            row["meets"] = len(kept) == len(group) and all(kept)
        row.update(_reduced(metrics))
        rows.append(row)
    return rows


def capacity_rows(searched: Sequence[Searched]) -> list[Row]:
    """Return a row per combination: its capacity and bracket, means over repeats, and the metrics at both ends.

    The capacity is missing where a search failed, or where no rate met the constraints; ``found`` says which.
    """
    rows = []
    for group in _groups(searched, lambda one: one.point):
        found = [one.capacity for one in group if one.capacity is not None]
        rates = [rate for capacity in found if (rate := capacity.rate_per_s) is not None]
        lower = [capacity.lower for capacity in found if capacity.lower is not None]
        upper = [capacity.upper for capacity in found if capacity.upper is not None]
        row: Row = {
            **_cells(group[0].point),
            "runs": sum(len(capacity.trials) for capacity in found),
            "failed": len(group) - len(found),
            "found": _joined(["failed" if one.capacity is None else one.capacity.found.value for one in group]),
        }
        if len(rates) == len(group):
            row.update(_reduced([{CAPACITY: rate} for rate in rates]))
        if len(upper) == len(group):
            row["upper_requests_per_s"] = statistics.fmean(trial.rate_per_s for trial in upper)
        row["violated_above"] = _joined([name for trial in upper for name in trial.violated])
        row["met_again_above"] = any(capacity.met_above for capacity in found)
        for prefix, trials in (("lower", lower), ("upper", upper)):
            row.update({f"{prefix}.{key}": v for key, v in _reduced([t.metrics for t in trials], spread=False).items()})
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, with the metrics that matter most."""
    columns = _columns(rows)
    plain = [name for name in columns if not _is_metric(name)]
    shown = [*plain, *(name for name in SHOWN if name in columns)]
    header = [name.split(".")[-1] if name.split(".")[0] in _SECTIONS else name for name in shown]
    return format_table(header, [[row.get(name) for name in shown] for row in rows])


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all columns, atomically; an empty cell is a value that there is not."""
    columns = _columns(rows)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if row.get(name) is None else row[name] for name in columns] for row in rows])
    with replaced(path) as file:
        file.write(text.getvalue().encode())


def plot(
    outcomes: Sequence[Ran] | Sequence[Searched], constraints: Sequence[Constraint], metric: str, path: Path
) -> bool:
    """Draw a metric against the rate, or the first axis of numbers, with a line per combination of the other axes.

    Returns:
        Whether there was something to draw: no axis of numbers, or no run with the metric, gives no file.
    """
    from vllm_ext.observability import plots

    axis = _x_axis([one.point for one in outcomes], searched=any(isinstance(one, Searched) for one in outcomes))
    found: dict[str, dict[float, list[float]]] = {}
    for one in outcomes:
        for x, metrics in _samples(one, axis):
            if metric in metrics:
                found.setdefault(_label(one.point, axis), {}).setdefault(x, []).append(metrics[metric])
    if axis is None or not found:
        return False
    series = [
        plots.Series(label=label, x=sorted(ys), y=[statistics.fmean(ys[x]) for x in sorted(ys)])
        for label, ys in found.items()
    ]
    limits = [constraint for constraint in constraints if constraint.metric == metric]
    plots.lines(
        series,
        path,
        xlabel="request rate (requests/s)" if axis == RATE else axis,
        ylabel=metric,
        limit=limits[0].limit if limits else None,
        limit_label=str(limits[0]) if limits else "limit",
        y_max=5 * limits[0].limit if limits and limits[0].op.startswith("<") else None,
    )
    return True


def _groups(outcomes: Sequence[Any], point_of: Callable[[Any], Point]) -> Iterable[list[Any]]:
    """Repeats of one combination together, in the order of the sweep."""
    groups: dict[str, list[Any]] = {}
    for one in outcomes:
        groups.setdefault(json.dumps(dict(point_of(one).values), sort_keys=True), []).append(one)
    return groups.values()


def _cells(point: Point) -> Row:
    return {path: value if _is_plain(value) else json.dumps(value) for path, value in point.values.items()}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _reduced(metrics: Sequence[Mapping[str, float]], *, spread: bool = True) -> dict[str, float]:
    """Means of the metrics that all runs have."""
    reduced: dict[str, float] = {}
    for name in sorted(set.intersection(*(set(one) for one in metrics)) if metrics else ()):
        values = [one[name] for one in metrics]
        reduced[name] = statistics.fmean(values)
        if spread and len(values) > 1:
            reduced[f"{name}_min"], reduced[f"{name}_max"] = min(values), max(values)
    return reduced


def _joined(names: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(names))


def _columns(rows: Sequence[Row]) -> list[str]:
    """Columns in the order of the first row that has them: axes and counts first, then the metrics by name."""
    known = dict.fromkeys(name for row in rows for name in row)
    plain = [name for name in known if not _is_metric(name)]
    return [*plain, *sorted(name for name in known if name not in plain)]


_COUNTS = frozenset({"runs", "failed", "meets", "found", CAPACITY, f"{CAPACITY}_min", f"{CAPACITY}_max",
                     "upper_requests_per_s", "violated_above", "met_again_above"})  # fmt: skip


def _is_metric(name: str) -> bool:
    """Axes are dotted paths into a description; columns of our own have fixed names."""
    return name not in _COUNTS and name.split(".")[0] not in _SECTIONS


_SECTIONS = frozenset({"engine", "hardware", "cost", "workload", "record", "max_time_s"})


def _x_axis(points: Sequence[Point], *, searched: bool) -> str | None:
    axes = dict.fromkeys(path for point in points for path in point.values)
    if searched or RATE in axes:
        return RATE
    for path in axes:
        values = {point.values[path] for point in points if _is_number(point.values[path])}
        if len(values) > 1 and all(_is_number(point.values[path]) for point in points):
            return path
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _label(point: Point, axis: str | None) -> str:
    """What tells a line from the others: the system, and other axes with their names."""
    parts = [
        str(value) if path == SYSTEM else f"{path.split('.')[-1]}={value}"
        for path, value in point.values.items()
        if path != axis
    ]
    return ", ".join(parts) or point.spec.engine.system


def _samples(one: Ran | Searched, axis: str | None) -> Iterable[tuple[float, Mapping[str, float]]]:
    if isinstance(one, Searched):
        return [] if one.capacity is None else [(trial.rate_per_s, trial.metrics) for trial in one.capacity.trials]
    return [] if one.outcome.metrics is None or axis is None else [(one.point.values[axis], one.outcome.metrics)]
