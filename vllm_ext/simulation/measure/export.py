"""Tables of a run for other tools, as DataFrames and files: a row per request, per step, per sample; panels to draw.

What is not known (the first token of an aborted request) is NaN, empty in CSV and null in Parquet. pandas is imported
when a table is made, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.files import packed, replaced
from vllm_ext.report import plots
from vllm_ext.simulation.measure.metrics import met_objectives
from vllm_ext.simulation.measure.run_data import COLUMNS, DERIVED, SERIES, RunData, StepEvent

if TYPE_CHECKING:
    import pandas as pd

_SUFFIXES = (".csv", ".csv.gz", ".parquet")


def requests_frame(run: RunData) -> pd.DataFrame:
    """Return a row per ended request, in the order of their ends.

    Columns are `COLUMNS` and `DERIVED`, ``normalised_latency_s_per_token`` and ``slo_met``.

    Raises:
        ImportError: pandas is missing.
    """
    table = run.requests
    frame = _frame({name: table.column(name) for name in (*COLUMNS, *DERIVED)})
    frame = frame.astype({name: "str" for name, kind in COLUMNS.items() if kind == "str"})
    tokens = frame["output_tokens"]
    frame["normalised_latency_s_per_token"] = frame["e2e_s"] / tokens.where(tokens > 0)
    frame["slo_met"] = met_objectives(table, run.finished())["all"]
    return frame


def steps_frame(run: RunData) -> pd.DataFrame:
    """Return the steps that a run kept, a row each; ``preempted`` is how many lost their seats.

    Raises:
        ImportError: pandas is missing.
        ValueError: the run kept no events.
    """
    if run.events is None:
        raise ValueError(f"events of {run.label}: the run kept none; set record.events to the number to keep")
    frame = _frame(run.events.steps, columns=StepEvent._fields)
    frame["preempted"] = frame["preempted"].map(len)
    return frame


def series_frame(run: RunData) -> pd.DataFrame:
    """Return the time series, a row per sample.

    Columns are those of `TimeSeries`, in requests, fractions and bytes; the last five count from the start of the run.

    Raises:
        ImportError: pandas is missing.
    """
    frame = _frame({name: run.series.column(name) for name in SERIES})
    return frame.rename(columns={"running": "running_requests", "waiting": "waiting_requests"})


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a table; the suffix chooses: ``.csv``, ``.csv.gz`` or ``.parquet``.

    Raises:
        ValueError: the suffix is none of those.
        ImportError: Parquet was asked for and pyarrow is missing.
        OSError: the file cannot be written; one that was there before is as it was.
    """
    if not path.name.endswith(_SUFFIXES):
        raise ValueError(f"path={path.name!r}: must end in one of {', '.join(_SUFFIXES)}")
    with replaced(path) as file:
        if path.suffix == ".parquet":
            try:
                frame.to_parquet(file, engine="pyarrow", index=False)
            except ImportError as error:
                raise ImportError(
                    "Parquet needs pyarrow: pip install 'vllm-ext[lab]', or write .csv.gz instead"
                ) from error
            return
        with packed(file, compress=path.suffix == ".gz") as out:
            frame.to_csv(out, index=False, lineterminator="\n")


def _frame(data: Any, **options: Any) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'vllm-ext[lab]'") from error
    return pd.DataFrame(data, **options)


def state_panels(runs: Mapping[str, RunData]) -> list[plots.Panel]:
    """Return panels of KV cache use, running and waiting requests of runs by their names, for `over_time`."""
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
                    label=label,
                    x=run.series.column("time_s").tolist(),
                    y=(run.series.column(column) * scale).tolist(),
                )
                for label, run in runs.items()
            ],
        )
        for ylabel, column, scale in wanted
    ]
