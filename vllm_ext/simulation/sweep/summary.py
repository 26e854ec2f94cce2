"""The outcome of a sweep as one table and one plot."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ext.files import replaced
from vllm_ext.report.table import Table
from vllm_ext.simulation.sweep.capacity import Constraint
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM, Point, SweepSpec

METRIC = "normalised_latency_mean_ms_per_token"
"""What is plotted of a grid unless told otherwise."""
SHOWN = (
    "requests",
    "unfinished_requests",
    "rejected_requests",
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


class Row(NamedTuple):
    """One combination of the axes' values."""

    plain: dict[str, Any]
    """The axes' values, how many runs there were and failed, and what a search found."""
    metrics: dict[str, float]
    """Means over the repeats, of the metrics that all of them have."""


def rows_of(sweep: SweepSpec, ran: Sequence[Point]) -> list[Row]:
    """Return a row per combination, with ``_min`` and ``_max`` of each metric where it has several repeats.

    Of a grid, ``meets`` says whether every run met all constraints; a run that failed meets none. Of a search, there
    are its capacity and bracket, and the metrics at both ends. The capacity is missing where a search failed, or where
    no rate met the constraints; ``found`` says which.

    Raises:
        ValueError: a constraint names a metric that the runs do not have.
    """
    groups = [ran[start : start + sweep.repeats] for start in range(0, len(ran), sweep.repeats)]
    if sweep.capacity is not None:
        return [_capacity_row(group) for group in groups]
    constraints = [Constraint.parse(text) for text in sweep.constraints]
    return [_grid_row(group, constraints) for group in groups]


def _grid_row(group: Sequence[Point], constraints: Sequence[Constraint]) -> Row:
    metrics = [one.outcome.metrics for one in group if one.outcome.metrics is not None]
    plain = {**_cells(group), "runs": len(group), "failed": len(group) - len(metrics)}
    if constraints:
        kept = [all(constraint.meets(found) for constraint in constraints) for found in metrics]
        plain["meets"] = len(kept) == len(group) and all(kept)
    return Row(plain, _reduced(metrics))


def _capacity_row(group: Sequence[Point]) -> Row:
    found = [one.capacity for one in group if one.capacity is not None]
    ends = {name: [end for one in found if (end := getattr(one, name)) is not None] for name in ("lower", "upper")}
    plain = {
        **_cells(group),
        "runs": sum(len(capacity.trials) for capacity in found),
        "failed": len(group) - len(found),
        "found": _joined("failed" if one.capacity is None else one.capacity.found.value for one in group),
    }
    if len(ends["lower"]) == len(group):
        plain.update(_reduced([{CAPACITY: trial.rate_per_s} for trial in ends["lower"]]))
    if len(ends["upper"]) == len(group):
        plain["upper_requests_per_s"] = statistics.fmean(trial.rate_per_s for trial in ends["upper"])
    plain["violated_above"] = _joined(name for trial in ends["upper"] for name in trial.violated)
    plain["met_again_above"] = any(capacity.met_above for capacity in found)
    reduced = {name: _reduced([trial.metrics for trial in trials], spread=False) for name, trials in ends.items()}
    return Row(plain, {f"{end}.{key}": value for end, metrics in reduced.items() for key, value in metrics.items()})


def _cells(group: Sequence[Point]) -> dict[str, Any]:
    values = group[0].values.items()
    return {path: json.dumps(value) if isinstance(value, (dict, list, tuple)) else value for path, value in values}


def _reduced(metrics: Sequence[Mapping[str, float]], *, spread: bool = True) -> dict[str, float]:
    reduced: dict[str, float] = {}
    for name in sorted(set.intersection(*map(set, metrics)) if metrics else ()):
        values = [one[name] for one in metrics]
        reduced[name] = statistics.fmean(values)
        if spread and len(values) > 1:
            reduced[f"{name}_min"], reduced[f"{name}_max"] = min(values), max(values)
    return reduced


def _joined(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(names))


def table(rows: Sequence[Row]) -> Table:
    """Return the rows with the metrics that matter most."""
    known = {name for row in rows for name in row.metrics}
    shown = [*dict.fromkeys(name for row in rows for name in row.plain), *(name for name in SHOWN if name in known)]
    cells = [[(row.plain | row.metrics).get(name) for name in shown] for row in rows]
    return Table([name.rpartition(".")[2] for name in shown], cells)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all columns, axes and counts first, atomically; an empty cell is a value that there is not."""
    columns = dict.fromkeys(name for row in rows for name in row.plain)
    columns |= dict.fromkeys(sorted({name for row in rows for name in row.metrics}))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.plain | row.metrics for row in rows)
    with replaced(path) as file:
        file.write(text.getvalue().encode())


def plot(sweep: SweepSpec, ran: Sequence[Point], metric: str, path: Path) -> bool:
    """Draw a metric against the rate, or the first axis of numbers, with a line per combination of the other axes.

    Returns:
        Whether there was something to draw: no axis of numbers, or no run with the metric, gives no file.
    """
    from vllm_ext.report import plots

    numbers = (path for path, values in sweep.axes.items() if len(values) > 1 and all(map(_is_number, values)))
    axis = RATE if sweep.capacity is not None or RATE in sweep.axes else next(numbers, None)
    if axis is None:
        return False
    found: dict[str, dict[float, list[float]]] = {}
    for one in ran:
        trials = [] if one.capacity is None else [(trial.rate_per_s, trial.metrics) for trial in one.capacity.trials]
        if sweep.capacity is None and one.outcome.metrics is not None:
            trials = [(one.values[axis], one.outcome.metrics)]
        for x, metrics in trials:
            if metric in metrics:
                found.setdefault(_label(one, axis), {}).setdefault(x, []).append(metrics[metric])
    if not found:
        return False
    series = [
        plots.Series(label=label, x=sorted(ys), y=[statistics.fmean(ys[x]) for x in sorted(ys)])
        for label, ys in found.items()
    ]
    limit = next((bound for bound in map(Constraint.parse, sweep.constraints) if bound.metric == metric), None)
    plots.lines(
        series,
        path,
        xlabel="request rate (requests/s)" if axis == RATE else axis,
        ylabel=metric,
        limit=None if limit is None else limit.limit,
        limit_label=str(limit),
        y_max=5 * limit.limit if limit and limit.op.startswith("<") else None,
    )
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _label(one: Point, axis: str) -> str:
    """What tells a line from the others: the system, and other axes with their names."""
    parts = [
        str(value) if path == SYSTEM else f"{path.split('.')[-1]}={value}"
        for path, value in one.values.items()
        if path != axis
    ]
    return ", ".join(parts) or one.spec.engine.system
