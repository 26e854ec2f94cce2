"""Figures of single steps: what the cost model says of them; no request is served."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_ext.experiments.experiment import Findings, line_plot
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Workload
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.devices import find_device
from vllm_ext.simulation.cost.models import find_model
from vllm_ext.simulation.cost.roofline import Roofline

DIFFERENCES = (
    "No request is served: times are those of the cost model's steps on the paper's devices, without the host's time. "
    "They are not measured on a device, so that ratios are what is compared.",
    "The paper's curves are pictures; what its text says of them is compared.",
)


def roofline(model: str, device: str = "a100-80", tensor_parallel: int = 1, **changed: Any) -> Roofline:
    """Return the cost model of a model on a device of which some fields are changed."""
    return Roofline(find_model(model), replace(find_device(device), **changed), tensor_parallel)


def findings(
    of: str,
    rows: Mapping[Any, Mapping[str, float]],
    claims: Sequence[Claim],
    *,
    beside: Sequence[Table] = (),
    lines: Sequence[str] = (),
    **labels: Any,
) -> Findings:
    """Return a table of steps as findings; every cell is a metric.

    Args:
        of: What tells a row from the others.
        rows: Cells by the names of their columns, which all rows have alike.
        claims: What the paper says of them.
        beside: Other tables.
        lines: Columns that are drawn over the rows, whose names are numbers then.
        labels: Of the plot, see `plots.lines`.
    """
    drawn = {column: [(at, cells[column]) for at, cells in rows.items()] for column in lines}
    columns = next(iter(rows.values()))
    return Findings(
        tables=[Table((of, *columns), [(str(at), *cells.values()) for at, cells in rows.items()]), *beside],
        claims=claims,
        metrics={f"{of} {at}: {column}": value for at, cells in rows.items() for column, value in cells.items()},
        plots=[line_plot("", drawn, xlabel=of, **labels)] if lines else [],
        workload=[Workload(name="steps", rows=len(rows), sha256=hashlib.sha256(repr([*rows]).encode()).hexdigest())],
    )
