"""Tables as DataFrames, written and read back."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas as pd
import pytest

from vllm_ext.simulation.measure import export
from vllm_ext.simulation.measure.run_data import COLUMNS, GapHistogram, RequestTable, RunData
from vllm_ext.simulation.measure.run_data import TimeSeries as Series

from .test_metrics import Row, make_run

SUFFIXES = (".csv", ".csv.gz", ".parquet")


def run_of(num_rows: int = 5) -> RunData:
    """Row i arrives at i, waits 0.5 s, has i + 1 tokens from 1 s to 2 s after its arrival; every fifth is aborted."""
    rows = [
        Row(
            arrival_s=i,
            end_s=i + 2.0,
            scheduled_s=math.nan if i % 5 == 4 else i + 0.5,
            tokens_s=() if i % 5 == 4 else (*(i + 1.0,) * i, i + 2.0),
            waited_s=0.1 + 0.2,
            tier='a, "quoted"',
            session_id="s",
            slo_ttft_s=0.75 if i == 1 else math.nan,
        )
        for i in range(num_rows)
    ]
    series = Series()
    for i in range(num_rows):
        series.add(float(i), i, 2 * i, i / 10, 0.0, 0.0, 0, 0, 0, i)
    return make_run(rows, series=series)


def test_a_row_per_request_has_derived_columns() -> None:
    frame = export.requests_frame(run_of())
    derived = ["scheduling_delay_s", "ttft_s", "e2e_s", "normalised_latency_s_per_token", "slo_met"]
    assert list(frame.columns) == [*COLUMNS, *derived]
    assert frame["req_id"].tolist() == ["r0", "r1", "r2", "r3", "r4"]
    assert frame["ttft_s"].tolist()[:4] == [2.0, 1.0, 1.0, 1.0]
    assert frame["scheduling_delay_s"].tolist()[:4] == [0.5] * 4
    assert frame["normalised_latency_s_per_token"].tolist()[:4] == [2 / (i + 1) for i in range(4)]
    assert frame["slo_met"].tolist() == [True, False, True, True, False]
    for name in ("first_token_s", "normalised_latency_s_per_token"):
        assert frame[name].isna().tolist() == [False] * 4 + [True]


def test_time_series_has_units_in_the_names() -> None:
    frame = export.series_frame(run_of())
    assert frame[["time_s", "running_requests", "waiting_requests", "steps"]].to_numpy().tolist() == [
        [i, i, 2 * i, i] for i in range(5)
    ]
    assert frame["kv_used_fraction"].tolist() == pytest.approx([i / 10 for i in range(5)])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("rows", [5, 0])
def test_table_reads_back_to_the_last_bit_and_equal_runs_give_equal_bytes(
    tmp_path: Path, suffix: str, rows: int
) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        export.write(export.requests_frame(run_of(rows)), path)
    read = pd.read_parquet(first) if suffix == ".parquet" else pd.read_csv(first)
    expected = export.requests_frame(run_of(rows))
    assert list(read.columns) == list(expected.columns)
    pd.testing.assert_frame_equal(read, expected, check_dtype=rows > 0, check_index_type=rows > 0, check_exact=True)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["x.tsv", "x", "x.gz", "csv"])
def test_unknown_suffix_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.csv, \.csv\.gz, \.parquet"):
        export.write(pd.DataFrame(), tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "says"), [("pandas", "tables need pandas"), ("pyarrow", "Parquet needs pyarrow")])
def test_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "x.parquet").write_text("earlier")
    with pytest.raises(ImportError, match=rf"{says}: pip install 'vllm-ext\[lab\]'"):
        export.write(export.requests_frame(run_of()), tmp_path / "x.parquet")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.parquet", "earlier")]


def test_state_of_runs_becomes_three_panels() -> None:
    series = Series()
    series.add(0.0, 3, 5, 0.25, 0.0, 0.0, 0, 0, 0, 0)
    run = RunData(label="", requests=RequestTable(), gaps=GapHistogram(), series=series)
    assert [(p.ylabel, p.series[0].label, p.series[0].y) for p in export.state_panels({"orca": run})] == [
        ("KV cache used (%)", "orca", [25.0]),
        ("running (requests)", "orca", [3.0]),
        ("waiting (requests)", "orca", [5.0]),
    ]
