"""The histogram of gaps, the time series that thins itself, and the table's slices."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.measure.run_data import COLUMNS, DERIVED, GapHistogram, RequestRow, RequestTable, TimeSeries


def histogram(*gaps_s: float) -> GapHistogram:
    gaps = GapHistogram()
    for gap_s in gaps_s:
        gaps.add(gap_s)
    return gaps


def sampled(times_s: list[float], *, capacity: int, interval_s: float = 1.0) -> TimeSeries:
    """Samples wherever one is due; ``running`` holds the time as well."""
    series = TimeSeries(interval_s=interval_s, capacity=capacity)
    for time_s in times_s:
        if time_s >= series.next_s:
            series.add(time_s, time_s, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    return series


@given(st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_those_of_numpy_or_up_to_a_thousandth_above(gaps_s: list[float], q: float) -> None:
    true = float(np.quantile(gaps_s, q))
    assert true * (1 - 1e-9) <= histogram(*gaps_s).quantile_s(q) <= true * (1.001 + 1e-9)


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=60))
def test_extremes_and_mean_are_exact(gaps_s: list[float]) -> None:
    gaps = histogram(*gaps_s)
    assert (gaps.quantile_s(0.0), gaps.quantile_s(1.0)) == (min(gaps_s), max(gaps_s))
    assert gaps.mean_s == pytest.approx(np.mean(gaps_s))


def test_counting_a_gap_several_times_is_adding_it_as_often() -> None:
    once, one_by_one = GapHistogram(), histogram(0.25, 0.25, 0.25, 0.5)
    once.add(0.25, 3)
    once.add(0.5)
    assert once.count == one_by_one.count == 4
    assert once.total_s == one_by_one.total_s
    assert [once.quantile_s(q / 10) for q in range(11)] == [one_by_one.quantile_s(q / 10) for q in range(11)]


def test_lowest_quantile_is_the_smallest_gap_not_the_smallest_bin() -> None:
    """Rank 0 was looked up as if an empty first bin held it: the answer was one microsecond."""
    assert histogram(2.0, 3.0).quantile_s(0.0) == 2.0


def test_without_gaps_there_is_no_quantile_and_no_mean() -> None:
    assert math.isnan(GapHistogram().quantile_s(0.5))
    assert math.isnan(GapHistogram().mean_s)


@pytest.mark.parametrize("gap_s", [-1e-9, math.nan], ids=["negative", "nan"])
def test_impossible_gap_is_refused(gap_s: float) -> None:
    with pytest.raises(ValueError, match="gap_s"):
        histogram(gap_s)


def test_thinned_samples_keep_even_distances_and_the_start() -> None:
    """Every second sample from the second on was kept once: the start was lost and the next one came too early."""
    series = sampled([float(t) for t in range(12)], capacity=8)
    assert series.interval_s == 2.0
    assert series.column("time_s").tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert series.next_s == 12.0


def test_samples_on_both_sides_of_a_pause_survive_thinning() -> None:
    series = sampled([0.0, 1.0, 2.0, 3.0, 100.0, 200.0, 201.0, 202.0], capacity=8)
    assert series.column("time_s").tolist() == [0.0, 2.0, 100.0, 200.0, 202.0]


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=300).map(sorted),
    st.integers(2, 20),
    st.sampled_from([0.1, 0.5, 3.0]),
)
def test_series_stays_bounded_ordered_and_sparse(times_s: list[float], capacity: int, interval_s: float) -> None:
    series = sampled(times_s, capacity=capacity, interval_s=interval_s)
    kept = series.column("time_s")
    assert 1 <= len(series) < capacity
    assert kept[0] == times_s[0]
    assert len(set(np.floor(kept / series.interval_s))) == len(kept)
    assert series.column("running").tolist() == kept.tolist()


def test_series_for_a_single_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=1"):
        TimeSeries(capacity=1)


def test_table_has_its_rows_and_columns_in_order() -> None:
    values: dict[str, Callable[[int], object]] = {
        "str": lambda i: f"x{i}",
        "int": lambda i: i,
        "float": lambda i: i / 4,
    }
    rows = [{name: values[kind](index) for name, kind in COLUMNS.items()} for index in range(3)]
    table = RequestTable()
    for row in rows:
        table.append(RequestRow(**row))  # type: ignore[arg-type]
    assert [list(row.items()) for row in table.rows()] == [list(row.items()) for row in rows]
    for name in COLUMNS:
        assert table.column(name).tolist() == [row[name] for row in rows]


def test_derived_columns_count_from_the_arrival() -> None:
    table = RequestTable()
    table.append(RequestRow(arrival_s=1.0, first_scheduled_s=1.25, first_token_s=1.5, finish_s=4.0))
    table.append(RequestRow(arrival_s=2.0))
    found = {name: table.column(name) for name in DERIVED}
    assert {name: column[0] for name, column in found.items()} == {
        "scheduling_delay_s": 0.25, "ttft_s": 0.5, "e2e_s": 3.0,
    }  # fmt: skip
    assert all(np.isnan(column[1]) for column in found.values())
