"""The forecast of a new request's wait: what counts as pace, and what is made of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.scheduling.wait_forecast import WaitForecast
from vllm_ext.slo.queue_state import QueueState


def queue(**changes: Any) -> QueueState:
    values: dict[str, Any] = {"waiting": 4, "tokens": 400, "starts_per_s": 2.0, "prefill_token_s": 0.001}
    return QueueState(**{**values, **changes})


def saturated(starts: int, steps: int, step_s: float, memory_s: float = 1e9) -> WaitForecast:
    """A queue of which every step starts so many, and which never drains."""
    forecast = WaitForecast(memory_s)
    for i in range(starts * steps + 3):
        forecast.entered(f"r{i}", 10)
    forecast.stepped(0.0)
    for step in range(1, steps + 1):
        for i in range(starts):
            forecast.started(f"r{(step - 1) * starts + i}")
        forecast.stepped(step * step_s)
    return forecast


def test_an_empty_queue_has_no_forecast_whatever_was_learned() -> None:
    forecast = saturated(starts=1, steps=5, step_s=0.5)
    for i in range(8):
        forecast.left(f"r{i}")
    state = forecast.state()
    assert (state["waiting"], state["tokens"]) == (0, 0)
    assert queue(**state).wait_s(sent=100, sent_tokens=1e6) is None
    assert queue(**state).ttft_s(10**6) is None


def test_the_pace_is_starts_per_second_while_somebody_stays_behind() -> None:
    forecast = saturated(starts=3, steps=10, step_s=0.5)
    assert forecast.state() == {"waiting": 3, "tokens": 30, "starts_per_s": pytest.approx(30 / 5)}


def test_requests_that_start_at_once_do_not_pass_for_a_fast_queue() -> None:
    forecast = WaitForecast()
    for i in range(100):
        forecast.entered(f"r{i}", 10)
        forecast.started(f"r{i}")
        forecast.stepped(i * 0.001)
    assert forecast.state() == {"waiting": 0, "tokens": 0, "starts_per_s": None}


def test_the_step_that_drains_the_queue_does_not_count() -> None:
    forecast = WaitForecast()
    for i in range(3):
        forecast.entered(f"r{i}", 10)
    forecast.stepped(0.0)
    for i in range(3):
        forecast.started(f"r{i}")
    forecast.stepped(1.0)
    assert forecast.state()["starts_per_s"] is None


def test_a_queue_that_does_not_move_is_given_the_pace_at_which_the_first_start_is_due() -> None:
    forecast = WaitForecast(memory_s=1e9)
    forecast.entered("a", 10)
    forecast.stepped(10.0)
    forecast.stepped(14.0)
    assert forecast.state()["starts_per_s"] == pytest.approx(1 / 4)


def test_time_without_a_queue_is_not_counted() -> None:
    forecast = saturated(starts=1, steps=4, step_s=1.0)
    before = forecast.state()["starts_per_s"]
    for i in range(7):
        forecast.started(f"r{i}")
    forecast.stepped(5.0)
    forecast.entered("late", 10)
    forecast.stepped(1000.0)
    assert forecast.state()["starts_per_s"] == before


def test_an_old_pace_is_forgotten() -> None:
    forecast = saturated(starts=10, steps=10, step_s=0.1, memory_s=1.0)
    fast = forecast.state()["starts_per_s"]
    for i in range(20):
        forecast.stepped(1.0 + i)
    slow = forecast.state()["starts_per_s"]
    assert fast > 50
    assert slow < 2


def test_a_request_is_counted_once_and_an_abort_is_no_start() -> None:
    forecast = WaitForecast(memory_s=1e9)
    for name in ("a", "a", "b", "c"):
        forecast.entered(name, 7)
    forecast.stepped(0.0)
    assert forecast.left("b")
    assert not forecast.left("b")
    forecast.started("unknown")
    forecast.stepped(2.0)
    assert forecast.state() == {"waiting": 2, "tokens": 14, "starts_per_s": pytest.approx(1 / 2)}


def test_a_clock_that_stands_still_leaves_the_pace_unknown() -> None:
    forecast = WaitForecast()
    forecast.entered("a", 1)
    forecast.stepped(1.0)
    forecast.stepped(1.0)
    assert forecast.state()["starts_per_s"] is None


def test_the_memory_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_s=0: must be greater than 0"):
        WaitForecast(memory_s=0)


def test_the_wait_by_hand() -> None:
    """Four wait and two start per second: the fifth starts after 5 / 2 s; their 400 tokens take only 0.4 s."""
    assert queue().wait_s() == pytest.approx(2.5)
    assert queue().ttft_s(100) == pytest.approx(2.5 + 0.1)
    assert queue(pair_s=1e-5).ttft_s(100) == pytest.approx(2.5 + 0.1 + 1e-5 * 100 * 50)


def test_long_prompts_make_the_wait_longer_than_the_pace_says() -> None:
    assert queue(tokens=9000).wait_s() == pytest.approx(9.0)


def test_until_the_pace_is_known_the_prompts_alone_count() -> None:
    assert queue(starts_per_s=None).wait_s() == pytest.approx(0.4)


def test_what_was_sent_since_counts_and_time_since_is_taken_off() -> None:
    assert queue().wait_s(sent=2) == pytest.approx(3.5)
    assert queue().wait_s(age_s=1.0) == pytest.approx(1.5)
    assert queue().wait_s(age_s=1.0, sent=2) == pytest.approx(2.5)
    assert queue(waiting=10, tokens=9000).wait_s(sent_tokens=1000, age_s=3.0) == pytest.approx(7.0)


def test_a_queue_that_must_be_empty_by_now_has_no_forecast() -> None:
    assert queue().wait_s(age_s=2.0) is None


@given(
    waiting=st.integers(1, 1000),
    tokens=st.integers(0, 10**6),
    pace=st.floats(0.01, 1000),
    more=st.integers(0, 100),
    later=st.floats(0, 100),
)
def test_more_work_never_shortens_the_wait_and_time_never_prolongs_it(
    waiting: int, tokens: int, pace: float, more: int, later: float
) -> None:
    now = queue(waiting=waiting, tokens=tokens, starts_per_s=pace)
    base = now.wait_s()
    busier = now.wait_s(sent=more, sent_tokens=more * 10)
    older = now.wait_s(age_s=later)
    assert base is not None
    assert busier is not None
    assert 0 <= (older or 0.0) <= base <= busier
    assert math.isfinite(busier)


def test_the_state_survives_the_way_to_the_front_end() -> None:
    forecast = saturated(starts=1, steps=2, step_s=0.5)
    state = {"runtime": {"coefficients": [1.0, 2.0, 3.0, 4.0, 5.0]}, "wait_forecast": forecast.state()}
    parsed = QueueState.parse(json.loads(json.dumps(state)))
    assert parsed == QueueState(waiting=3, tokens=30, starts_per_s=2.0, prefill_token_s=3.0, pair_s=5.0)


def test_a_scheduler_without_a_forecast_is_understood() -> None:
    assert QueueState.parse({"runtime": {"coefficients": [0.0] * 5}}) is None
