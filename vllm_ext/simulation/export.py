"""Tables of a run for other tools: a row per request, and the time series, as CSV or Parquet; and panels to draw.

The suffix chooses the format: ``.csv``, ``.csv.gz`` or ``.parquet``. Rows are converted in blocks, so that memory does
not grow with their number. What is not known (the first token of an aborted request) is empty in CSV, null in Parquet.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vllm_ext.observability import plots
from vllm_ext.observability.files import packed, replaced
from vllm_ext.simulation.metrics import met_objectives
from vllm_ext.simulation.run_data import FLOAT_COLUMNS, INT_COLUMNS, SERIES, TEXT_COLUMNS, RunData

if TYPE_CHECKING:
    import pandas as pd

_ROWS = 16_384
_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_DERIVED = ("scheduling_delay_s", "ttft_s", "e2e_s", "normalised_latency_s_per_token")
_REQUESTS = {
    **dict.fromkeys(TEXT_COLUMNS, "string"),
    **dict.fromkeys(INT_COLUMNS, "int64"),
    **dict.fromkeys((*FLOAT_COLUMNS, *_DERIVED), "float64"),
    "slo_met": "bool_",
}
"""Columns in their order, with pyarrow's names of their types."""
_UNITS = {"running": "running_requests", "waiting": "waiting_requests"}
_SERIES = {_UNITS.get(name, name): "float64" for name in SERIES}

Block = Mapping[str, list[Any]]
"""Columns of equal length."""


def export_requests(run: RunData, path: Path) -> None:
    """Write a row per ended request, in the order of their ends.

    Columns are those of `RequestTable`, and ``scheduling_delay_s``, ``ttft_s``, ``e2e_s``,
    ``normalised_latency_s_per_token`` and ``slo_met``, which are derived.

    Raises:
        ValueError: the suffix is none of those above.
        ImportError: Parquet was asked for and pyarrow is missing.
        OSError: the file cannot be written; one that was there before is as it was.
    """
    _write(_REQUESTS, _request_blocks(run), path)


def export_series(run: RunData, path: Path) -> None:
    """Write the time series, a row per sample; raises as `export_requests`.

    Columns are those of `TimeSeries`, in requests, fractions and bytes; the last five count from the start of the run.
    """
    _write(_SERIES, _series_blocks(run), path)


def requests_frame(run: RunData) -> pd.DataFrame:
    """Return what `export_requests` writes as a DataFrame.

    Raises:
        ImportError: pandas is missing.
    """
    blocks = list(_request_blocks(run))
    columns = {name: [value for block in blocks for value in block[name]] for name in _REQUESTS}
    return _pandas().DataFrame(columns)


def steps_frame(run: RunData) -> pd.DataFrame:
    """Return the steps that a run kept as a DataFrame, a row each; ``preempted`` is how many lost their seats.

    Raises:
        ImportError: pandas is missing.
        ValueError: the run kept no events.
    """
    if run.events is None:
        raise ValueError(f"events of {run.label}: the run kept none; set record.events to the number to keep")
    names = ("start_s", "end_s", "num_requests", "prefill_tokens", "decode_tokens")
    steps = run.events.steps
    columns = {name: [getattr(step, name) for step in steps] for name in names}
    return _pandas().DataFrame({**columns, "preempted": [len(step.preempted) for step in steps]})


def _request_blocks(run: RunData) -> Iterator[Block]:
    table = run.requests
    met = met_objectives(table, run.finished())["all"]
    for start in range(0, max(len(table), 1), _ROWS):
        block = table.slice(start, start + _ROWS)
        arrived, ended = block["arrival_s"], block["finish_s"]
        block["scheduling_delay_s"] = [b - a for a, b in zip(arrived, block["first_scheduled_s"], strict=True)]
        block["ttft_s"] = [b - a for a, b in zip(arrived, block["first_token_s"], strict=True)]
        block["e2e_s"] = [b - a for a, b in zip(arrived, ended, strict=True)]
        block["normalised_latency_s_per_token"] = [
            e2e / tokens if tokens else math.nan
            for e2e, tokens in zip(block["e2e_s"], block["output_tokens"], strict=True)
        ]
        block["slo_met"] = met[start : start + _ROWS].tolist()
        yield block


def _series_blocks(run: RunData) -> Iterator[Block]:
    yield {_UNITS.get(name, name): run.series.column(name).tolist() for name in SERIES}


def _write(columns: Mapping[str, str], blocks: Iterator[Block], path: Path) -> None:
    suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"path={path.name!r}: must end in one of {', '.join(_SUFFIXES)}")
    if suffix == ".parquet":
        _pyarrow()
    with replaced(path) as file:
        if suffix == ".parquet":
            _write_parquet(columns, blocks, file)
        else:
            _write_csv(columns, blocks, file, compress=suffix == ".csv.gz")


def _write_csv(columns: Mapping[str, str], blocks: Iterator[Block], file: BinaryIO, *, compress: bool) -> None:
    with packed(file, compress=compress) as out:
        text = io.TextIOWrapper(out, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for block in blocks:
            cells = [_blank(block[name]) if kind == "float64" else block[name] for name, kind in columns.items()]
            writer.writerows(zip(*cells, strict=True))
        text.detach()


def _blank(column: list[float]) -> list[float | str]:
    return ["" if value != value else value for value in column]  # what is not a number does not equal itself


def _write_parquet(columns: Mapping[str, str], blocks: Iterator[Block], file: BinaryIO) -> None:
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in columns.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        for block in blocks:
            arrays = [arrow.array(block[field.name], type=field.type, from_pandas=True) for field in schema]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("DataFrames need pandas: pip install 'vllm-ext[bench]'") from error
    return pandas


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'vllm-ext[bench]', or write .csv.gz instead") from error
    return pyarrow, parquet


def state_panels(runs: Sequence[RunData]) -> list[plots.Panel]:
    """Return panels of KV cache use, running and waiting requests of simulated runs, for `over_time`."""
    wanted = (
        ("KV cache used (%)", "kv_used_fraction", 100.0),
        ("running (requests)", "running", 1.0),
        ("waiting (requests)", "waiting", 1.0),
    )
    return [
        plots.Panel(
            ylabel=ylabel,
            series=[
                plots.Series(
                    label=run.label,
                    x=run.series.column("time_s").tolist(),
                    y=(run.series.column(column) * scale).tolist(),
                )
                for run in runs
            ],
        )
        for ylabel, column, scale in wanted
    ]
