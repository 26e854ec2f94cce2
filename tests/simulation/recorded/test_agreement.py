"""Errors and agreements worked out by hand."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.measure.latency import RequestTimeline
from vllm_ext.simulation.recorded.agreement import (
    Batch,
    aggregate_errors,
    aggregates,
    batch_agreement,
    order_agreement,
    request_errors,
)


def line(req_id: str, arrival_s: float, *times: float) -> RequestTimeline:
    return RequestTimeline(req_id=req_id, arrival_s=arrival_s, token_times_s=times)


def batch(start_s: float, end_s: float, ids: str) -> Batch:
    return Batch(start_s, end_s, frozenset(ids))


def test_errors_are_relative_to_what_was_measured() -> None:
    errors = request_errors([line("a", 0, 1.5, 3.0)], [line("a", 0, 1.0, 4.0)])
    assert errors == pytest.approx(
        {
            "e2e_error_median": 0.25,
            "e2e_error_p90": 0.25,
            "ttft_error_median": 0.5,
            "ttft_error_p90": 0.5,
            "tbt_mean_error_median": 0.5,
            "tbt_mean_error_p90": 0.5,
            "tbt_p99_error_median": 0.5,
            "tbt_p99_error_p90": 0.5,
        }
    )


def test_requests_with_one_token_have_no_gaps_to_err_in() -> None:
    assert "tbt_mean_error_median" not in request_errors([line("a", 0, 1)], [line("a", 0, 2)])
    both = request_errors([line("a", 0, 1), line("b", 0, 1, 2)], [line("a", 0, 1), line("b", 0, 1, 3)])
    assert both["tbt_mean_error_median"] == pytest.approx(0.5)


def test_same_run_has_no_error_and_agrees_wholly() -> None:
    lines = [line("a", 0, 1, 2), line("b", 0.5, 2, 4)]
    steps = [batch(0, 1, "a"), batch(1, 2, "ab")]
    assert set(request_errors(lines, lines).values()) == {0.0}
    assert batch_agreement(steps, steps) == {"batch_jaccard_mean": 1.0, "equal_batches_fraction": 1.0}
    assert order_agreement(lines, lines) == 1.0


@pytest.mark.parametrize(
    "other",
    [[], [line("b", 0, 1.0, 2.0)], [line("a", 0, 1.0)], [line("a", 0, 1.0, 2.0), line("b", 0, 1.0)]],
    ids=["nobody", "another", "other-length", "one-more"],
)
def test_runs_of_other_requests_are_refused(other: list[RequestTimeline]) -> None:
    with pytest.raises(ValueError, match="same requests"):
        request_errors(other, [line("a", 0, 1.0, 2.0)])


def test_aggregates_are_in_milliseconds_and_their_errors_have_a_sign() -> None:
    measured = aggregates([line("a", 0, 1, 3), line("b", 0, 1, 5)])
    assert measured["e2e_mean_ms"] == pytest.approx(4000)
    assert measured["ttft_p99_ms"] == pytest.approx(1000)
    assert measured["tbt_p50_ms"] == pytest.approx(3000)
    assert measured["normalised_latency_mean_ms_per_token"] == pytest.approx(2000)
    errors = aggregate_errors(aggregates([line("a", 0, 1, 2), line("b", 0, 1, 4)]), measured)
    assert errors["e2e_mean_error"] == pytest.approx(-0.25)
    assert errors["ttft_mean_error"] == pytest.approx(0)
    assert errors["normalised_latency_mean_error"] == pytest.approx(-0.25)


def test_batches_are_compared_at_the_middle_of_each_step_of_the_reference() -> None:
    reference = [batch(0, 2, "ab"), batch(2, 4, "abc"), batch(4, 6, "c"), batch(10, 12, "d")]
    steps = [batch(0, 3, "ab"), batch(3, 6, "cd"), batch(6, 7, "e")]
    # at 1: ab and ab, 2/2; at 3 the second step begins: abc and cd, 1/4; at 5: c and cd, 1/2; at 11 the other idles
    found = batch_agreement(steps, reference)
    assert found["batch_jaccard_mean"] == pytest.approx((1 + 1 / 4 + 1 / 2 + 0) / 4)
    assert found["equal_batches_fraction"] == pytest.approx(1 / 4)


def test_run_that_did_nothing_agrees_in_nothing_and_no_reference_is_an_error() -> None:
    assert batch_agreement([], [batch(0, 1, "a")])["batch_jaccard_mean"] == 0
    with pytest.raises(ValueError, match="without steps"):
        batch_agreement([batch(0, 1, "a")], [])


def test_order_counts_pairs_and_leaves_ties_out() -> None:
    measured = [line("a", 0, 1), line("b", 0, 2), line("c", 0, 3)]
    assert order_agreement([line("a", 0, 2), line("b", 0, 1), line("c", 0, 3)], measured) == pytest.approx(2 / 3)
    assert order_agreement([line("a", 0, 1), line("b", 0, 1), line("c", 0, 1)], measured) == 1.0
