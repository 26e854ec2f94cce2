"""Latency metrics from token times; expected values worked by hand."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.latency import RequestTimeline, saturated_tokens_per_s, summarise


def line(arrival_s: float, *times: float, req_id: str = "r") -> RequestTimeline:
    return RequestTimeline(req_id=req_id, arrival_s=arrival_s, token_times_s=times)


def test_summary_of_two_requests_worked_by_hand() -> None:
    # a: ttft 1 s, e2e 3 s, 2 tokens -> 1.5 s/token, gap 2 s; b: ttft 1 s, e2e 4 s, 4 tokens -> 1 s/token, gaps 1 s
    metrics = summarise([line(0.0, 1.0, 3.0), line(2.0, 3.0, 4.0, 5.0, 6.0)])
    assert metrics["normalised_latency_mean_ms_per_token"] == pytest.approx(1250)
    assert metrics["normalised_latency_p90_ms_per_token"] == pytest.approx(1450)
    assert metrics["ttft_mean_ms"] == pytest.approx(1000)
    assert metrics["e2e_mean_ms"] == pytest.approx(3500)
    assert metrics["tbt_p50_ms"] == pytest.approx(1000)
    assert metrics["tbt_p99_ms"] == pytest.approx(1970)
    assert metrics["throughput_tokens_per_s"] == pytest.approx(6 / 6)
    assert metrics["throughput_requests_per_s"] == pytest.approx(2 / 6)
    assert (metrics["requests"], metrics["output_tokens"], metrics["duration_s"]) == (2, 6, 6)


def test_normalised_latency_is_a_mean_over_requests_not_over_tokens() -> None:
    metrics = summarise([line(0.0, 10.0), line(0.0, *[float(t) for t in range(1, 11)])])
    assert metrics["normalised_latency_mean_ms_per_token"] == pytest.approx((10_000 + 1_000) / 2)


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
