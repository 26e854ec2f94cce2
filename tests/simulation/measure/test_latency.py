"""Latency metrics from token times; expected values worked by hand."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.measure.latency import RequestTimeline, saturated_tokens_per_s, summarise


def line(arrival_s: float, *times: float, req_id: str = "r") -> RequestTimeline:
    return RequestTimeline(req_id=req_id, arrival_s=arrival_s, token_times_s=times)


def test_time_between_tokens_is_absent_when_no_request_has_a_second_token() -> None:
    assert not [key for key in summarise([line(0.0, 1.0)]) if key.startswith("tbt")]


@pytest.mark.parametrize(
    ("arrival_s", "times", "problem"),
    [(0.0, (), "at least one token"), (0.0, (2.0, 1.0), "not decrease"), (5.0, (1.0,), "before the arrival")],
    ids=["no-token", "backwards", "before-arrival"],
)
def test_impossible_timelines_are_refused_by_name(arrival_s: float, times: tuple[float, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"token_times_s of culprit: .*{problem}"):
        line(arrival_s, *times, req_id="culprit")


def test_no_requests_cannot_be_summarised() -> None:
    with pytest.raises(ValueError, match="timelines"):
        summarise([])


def test_capacity_counts_only_the_time_in_which_every_seat_was_taken() -> None:
    # one seat: b starts when a has ended; its long tail alone in the server says nothing of the capacity
    a = line(0.0, 1.0, 2.0, 3.0)
    b = line(0.0, 4.0, 100.0, 200.0)
    assert saturated_tokens_per_s([a, b]) == pytest.approx(3 / 3)


def test_capacity_ignores_a_moment_of_disturbance() -> None:
    """A server emits 100 tokens/s but pauses for 60 s in the middle: by the plain mean it would carry 25."""
    times = [i / 100 for i in range(1000)] + [70 + i / 100 for i in range(1000)]
    lines = [line(0.0, *times[i : i + 20]) for i in range(0, 2000, 20)]
    assert saturated_tokens_per_s(lines) == pytest.approx(100, rel=0.02)


def test_capacity_needs_a_queue() -> None:
    with pytest.raises(ValueError, match="more requests than the server has seats"):
        saturated_tokens_per_s([line(0.0, 1.0, 2.0), line(0.0, 1.0)])
