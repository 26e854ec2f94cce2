"""What came in time, token by token: an example worked by hand, and what a point of a sweep keeps."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from vllm_ext.simulation.measure.iterations import iterations
from vllm_ext.simulation.measure.run_data import UNFINISHED, RequestRow, RequestTable, RunData
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec
from vllm_ext.simulation.sweep.pools import simulate_point
from vllm_ext.simulation.workloads.spec import WorkloadSpec


def made_table(*rows: tuple[list[float], str], ttft_s: float = 1.0, tbt_s: float = 0.2) -> RequestTable:
    """Requests that arrive at 0 s, by their tokens' times and how they ended."""
    table = RequestTable()
    for times, reason in rows:
        gaps = np.diff(times)
        ended_s = math.nan if reason == UNFINISHED else times[-1] if times else 10.0
        row = RequestRow(
            finish_reason=reason, output_tokens=len(times), prompt_tokens=1, arrival_s=0.0,
            first_scheduled_s=times[0] - 0.25 if times else math.nan,
            first_token_s=times[0] if times else math.nan, finish_s=ended_s,
            max_gap_s=gaps.max() if len(gaps) else math.nan, slo_ttft_s=ttft_s, slo_tbt_s=tbt_s,
        )  # fmt: skip
        table.append(row, array("d", times))
    return table


def made_run(table: RequestTable, unserved: RequestTable, duration_s: float = 10.0) -> RunData:
    return RunData(label="x", requests=table, unserved=unserved, duration_s=duration_s,
                   gaps=None, series=None)  # type: ignore[arg-type]  # fmt: skip  # not looked at


ENDED = made_table(
    ([0.5, 0.6, 0.7], "stop"),  # all in time
    ([0.5, 0.9, 1.0], "stop"),  # one gap too long, but done before 1 + 2 * 0.2
    ([3.0, 3.1], "stop"),  # first token late
    ([], "abort"),  # nobody came
)
LEFT = made_table(([0.5, 0.6], UNFINISHED), ([], UNFINISHED))


def test_measures_of_six_requests_worked_by_hand() -> None:
    found = iterations(made_run(ENDED, LEFT))
    assert found == pytest.approx(
        {
            "delivered_tokens_per_s": 1.0,
            "tokens_in_time_per_s": 0.8,
            "tokens_in_time_fraction": 8 / 10,
            "ended_requests_per_s": 0.3,
            "request_attainment_fraction": 1 / 6,
            "first_in_time_fraction": 3 / 6,
            "deadline_attainment_fraction": 2 / 6,
            "jct_mean_s": (0.7 + 1.0 + 3.1) / 3,
            "jct_to_end_mean_s": (0.7 + 1.0 + 3.1 + 3 * 10.0) / 6,
            "strictest_running_fraction": (10.0 - 0.25) / 10.0,
        }
    )


def test_rates_are_over_the_window_that_was_asked_for() -> None:
    """One that has served everybody before its end counts the rest of it too."""
    found = iterations(made_run(ENDED, RequestTable()), span_s=20.0)
    assert (found["delivered_tokens_per_s"], found["ended_requests_per_s"]) == (8 / 20, 3 / 20)


def test_without_objectives_all_that_comes_is_in_time() -> None:
    table = made_table(([3.0, 9.0], "stop"), ([], "abort"), ttft_s=math.nan, tbt_s=math.nan)
    found = iterations(made_run(table, RequestTable()))
    assert (found["tokens_in_time_fraction"], found["first_in_time_fraction"]) == (1.0, 0.5)
    assert (found["request_attainment_fraction"], found["deadline_attainment_fraction"]) == (0.5, 0.5)


def test_time_with_a_strictest_objective_is_counted_once() -> None:
    table = made_table(([1.25, 3.0], "stop"), ([2.25, 4.0], "stop"), ([2.75, 4.5], "stop"), tbt_s=0.1)
    for row, times in ((one, [9.0, 9.5]) for one in made_table(([9.0, 9.5], "stop")).rows()):
        table.append(
            RequestRow(**{**row, "first_scheduled_s": 0.0, "finish_s": 10.0, "slo_tbt_s": 0.2}), array("d", times)
        )
    found = iterations(made_run(table, made_table(([9.25], UNFINISHED), ([], UNFINISHED), tbt_s=0.1)))
    assert found["strictest_running_fraction"] == pytest.approx((3.5 + 1.0) / 10.0)


def test_a_run_without_requests_has_no_measures() -> None:
    assert iterations(made_run(RequestTable(), RequestTable())) == {}


def test_a_point_tells_of_tokens_where_it_was_told_to_keep_their_times() -> None:
    spec = SimulationSpec(
        engine=EngineSpec(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=2048),
        workload=WorkloadSpec(num_requests=4, rate_per_s=10.0),
        record=RecordSpec(token_times=True),
        max_time_s=1000.0,
    )
    found = simulate_point(spec)
    assert found["delivered_tokens_per_s"] == pytest.approx(found["output_tokens"] / 1000.0)
    assert "delivered_tokens_per_s" not in simulate_point(spec.model_copy(update={"record": RecordSpec()}))
