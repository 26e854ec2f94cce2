"""Tables written and read back."""

from __future__ import annotations

import builtins
import gzip
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from vllm_ext.simulation import export
from vllm_ext.simulation.export import export_requests, export_series, state_panels
from vllm_ext.simulation.run_data import FLOAT_COLUMNS, INT_COLUMNS, TEXT_COLUMNS, GapHistogram, RequestTable, RunData
from vllm_ext.simulation.run_data import TimeSeries as Series

SUFFIXES = (".csv", ".csv.gz", ".parquet")


def make_run(rows: int = 5) -> RunData:
    """Row i arrives at i, waits 0.5 s, has its first token after 1 s, i + 1 tokens in 2 s; every fifth is aborted."""
    table, series = RequestTable(), Series()
    for i in range(rows):
        aborted = i % 5 == 4
        table.append(
            {
                **dict.fromkeys(FLOAT_COLUMNS, math.nan),
                **dict.fromkeys(INT_COLUMNS, 1),
                "req_id": f"r{i}",
                "session_id": "",
                "tier": 'a, "quoted"',
                "finish_reason": "abort" if aborted else "stop",
                "output_tokens": 0 if aborted else i + 1,
                "arrival_s": float(i),
                "first_scheduled_s": math.nan if aborted else i + 0.5,
                "first_token_s": math.nan if aborted else i + 1.0,
                "finish_s": i + 2.0,
                "slo_ttft_s": 0.75 if i == 1 else math.nan,
            }
        )
        series.add(float(i), i, 2 * i, i / 10, 0.0, 0.0, 0, 0, 0, i)
    return RunData(label="x", requests=table, gaps=GapHistogram(), series=series)


def read(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, keep_default_na=True)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_row_per_request_reads_back_with_derived_columns(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"requests{suffix}"
    export_requests(make_run(), path)
    frame = read(path)
    assert list(frame.columns) == [
        *TEXT_COLUMNS, *INT_COLUMNS, *FLOAT_COLUMNS,
        "scheduling_delay_s", "ttft_s", "e2e_s", "normalised_latency_s_per_token", "slo_met",
    ]  # fmt: skip
    assert frame["req_id"].tolist() == ["r0", "r1", "r2", "r3", "r4"]
    assert set(frame["tier"]) == {'a, "quoted"'}
    assert frame["ttft_s"].tolist()[:4] == [1.0] * 4
    assert frame["scheduling_delay_s"].tolist()[:4] == [0.5] * 4
    assert frame["normalised_latency_s_per_token"].tolist()[:4] == [2 / (i + 1) for i in range(4)]
    assert frame["slo_met"].tolist() == [True, False, True, True, False]
    assert frame["first_token_s"].isna().tolist() == [False] * 4 + [True]
    assert frame["output_tokens"].dtype == "int64"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_time_series_reads_back_with_units_in_the_names(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"series{suffix}"
    export_series(make_run(), path)
    frame = read(path)
    assert frame[["time_s", "running_requests", "waiting_requests", "steps"]].to_numpy().tolist() == [
        [i, i, 2 * i, i] for i in range(5)
    ]
    assert frame["kv_used_fraction"].tolist() == pytest.approx([i / 10 for i in range(5)])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_of_several_blocks_stay_in_order(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_ROWS", 4)
    path = tmp_path / f"requests{suffix}"
    export_requests(make_run(11), path)
    assert read(path)["arrival_s"].tolist() == [float(i) for i in range(11)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_run_without_requests_gives_a_table_without_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"requests{suffix}"
    export_requests(make_run(0), path)
    frame = read(path)
    assert len(frame) == 0
    assert "arrival_s" in frame.columns


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_runs_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    export_requests(make_run(), first)
    export_requests(make_run(), second)
    assert first.read_bytes() == second.read_bytes()


def test_floats_survive_csv_to_the_last_bit(tmp_path: Path) -> None:
    run = make_run(1)
    run.requests._floats["finish_s"][0] = 0.1 + 0.2
    export_requests(run, tmp_path / "x.csv.gz")
    with gzip.open(tmp_path / "x.csv.gz", "rt", encoding="utf-8") as file:
        header, row = (line.rstrip("\n") for line in file)
    assert (
        float(row.rsplit(",", header.count(",") - header.split(",").index("finish_s") + 1)[1].split(",")[0])
        == 0.1 + 0.2
    )


@pytest.mark.parametrize("name", ["x.tsv", "x", "x.gz", "csv"])
def test_unknown_suffix_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.csv, \.csv\.gz, \.parquet"):
        export_requests(make_run(), tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failure_leaves_the_earlier_file(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("earlier")
    monkeypatch.setattr(RequestTable, "slice", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        export_requests(make_run(), path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "earlier"


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"vllm-ext\[bench\]"):
        export_requests(make_run(), tmp_path / "x.parquet")


def test_state_of_runs_becomes_three_panels() -> None:
    series = Series()
    series.add(0.0, 3, 5, 0.25, 0.0, 0.0, 0, 0, 0, 0)
    run = RunData(label="orca", requests=RequestTable(), gaps=GapHistogram(), series=series)
    panels = state_panels([run])
    assert [(p.ylabel, p.series[0].label, p.series[0].y) for p in panels] == [
        ("KV cache used (%)", "orca", [25.0]),
        ("running (requests)", "orca", [3.0]),
        ("waiting (requests)", "orca", [5.0]),
    ]
