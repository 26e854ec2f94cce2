"""Times of a small recorded run, worked out on paper."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.recorded.recording import ClientRequest, RecordingError, Run
from vllm_ext.simulation.recorded.run import arrival_windows, offsets, timed_steps

from .recorded_runs import add, client, header, step, update


def run_of(*entries: Any, requests: tuple[ClientRequest, ...] = ()) -> Run:
    return Run(
        source="run.jsonl", line=1, header=header(), entries=entries, lines=tuple(range(len(entries))),
        requests=requests, dropped=0,
    )  # fmt: skip


SYNC = run_of(
    add(req_id="a-1", at_s=10.0),
    step(0, 10.0, ("a-1", 8, 0)),  # a chunk of 8 that is not the last
    update(0, 11.0, ("a-1", 0)),
    add(req_id="b-1", at_s=11.5),
    step(1, 12.0, ("a-1", 4, 8), ("b-1", 3, 0)),
    update(1, 13.0, ("a-1", 1), ("b-1", 1)),
    step(2, 14.0, ("a-1", 1, 12), ("b-1", 1, 3)),
    update(2, 15.0, ("a-1", 1), ("b-1", 1)),
    step(3, 15.5),  # tells the runner who ended
    update(3, 15.75, busy=False),
    add(req_id="c-1", at_s=20.0),
    add(req_id="d-1", at_s=20.001),
    step(4, 20.01, ("c-1", 3, 0), ("d-1", 3, 0)),
    update(4, 21.0, ("c-1", 1), ("d-1", 1), busy=False),
    requests=(client("b", 11.0, 14.5, 16.0), client("c", 19.75, 22.0)),
)


def test_step_lasts_until_the_engine_core_schedules_again() -> None:
    steps = timed_steps(SYNC)
    assert [(s.start_s, s.end_s) for s in steps] == [(10.0, 12.0), (12.0, 14.0), (14.0, 15.5), (20.01, 21.25)]
    assert [s.back_to_back for s in steps] == [True, True, True, False]
    assert steps[1].req_ids == {"a-1", "b-1"}


def test_shape_is_that_of_the_simulators_runner() -> None:
    chunk, last_chunks, decodes, _ = (s.shape for s in timed_steps(SYNC))
    assert chunk == StepShape(1, 8, 0, 0, 0, 8, 8 * (8 - 3.5))
    assert last_chunks == StepShape(2, 7, 0, 2, 0, 12 + 3, 4 * (12 - 1.5) + 3 * (3 - 1.0))
    assert decodes == StepShape(2, 2, 2, 2, 13 + 4, 0, 0.0)


def test_pipelined_step_begins_when_the_one_before_has_ended() -> None:
    """Async scheduling: step 1 is scheduled while step 0 runs."""
    run = run_of(
        add(req_id="a-1", at_s=0.0),
        step(0, 0.0, ("a-1", 3, 0)),
        step(1, 0.1, ("a-1", 1, 3)),
        update(0, 1.0, ("a-1", 1)),
        step(2, 1.5, ("a-1", 1, 4)),
        update(1, 2.5, ("a-1", 1)),
        update(2, 4.0, ("a-1", 1), busy=False),
    )
    assert [(s.start_s, s.end_s) for s in timed_steps(run)] == [(0.0, 1.5), (1.5, 2.75), (2.75, 4.25)]


def test_request_arrives_between_two_drains_or_at_once_where_nothing_runs() -> None:
    windows = arrival_windows(SYNC)
    assert windows["b-1"] == (10.0, 11.5)
    assert windows["a-1"] == pytest.approx((10.0, 10.0), abs=1e-3)
    assert windows["c-1"] == pytest.approx((20.0, 20.0), abs=1e-3)
    assert windows["d-1"] == windows["c-1"], "both are in the first step; a later arrival would miss it"


def test_offsets_lie_where_most_windows_overlap_and_count_from_the_end_of_a_step() -> None:
    found = offsets([SYNC])
    # b: reached the core in [10, 11.5], due at 11: -1 to 0.5; c: at 20, due at 19.75: 0.25
    assert found.intake_s == pytest.approx(0.25, abs=1e-3)
    # b's tokens: 14.5 - 14 and 16 - 15.5; c's: 22 - 21.25
    assert found.delivery_s == pytest.approx(0.5)


def test_run_without_measured_requests_has_no_offsets() -> None:
    with pytest.raises(RecordingError, match="no measured request"):
        offsets([run_of(*SYNC.entries)])
