"""How full memory was, and would become, while somebody waited: worked by hand."""

from __future__ import annotations

import pytest

from vllm_ext.simulation.backlog import FUTURE_EVERY, Backlog
from vllm_ext.simulation.spec import RecordSpec

from .parts import SteadyCost, ask, simulate


def test_future_peak_is_that_of_past_futures_equations() -> None:
    """Two run: 10 tokens held and 6 to come, 20 held and 2 to come.

    When the second ends, after 2 steps, both hold 10 + 20 + 2 * 2 = 34; when the first ends it holds 16.
    """
    backlog = Backlog(num_tokens=100, block_size=1)
    backlog.step(0.30, 2, [(10, 6), (20, 2)])
    assert backlog.counters() == {
        "backlog_steps": 1.0,
        "backlog_decode_tokens": 2.0,
        "backlog_kv_used_fraction": pytest.approx(0.30),
        "backlog_future_kv_fraction": pytest.approx(0.34),
    }


def test_blocks_are_rounded_up_by_half_a_block_on_average() -> None:
    backlog = Backlog(num_tokens=100, block_size=5)
    backlog.step(0.0, 2, [(10, 6), (20, 2)])
    assert backlog.counters()["backlog_future_kv_fraction"] == pytest.approx((34 + 2 * 2) / 100)


def test_memory_is_averaged_over_steps_and_the_future_over_every_tenth() -> None:
    backlog = Backlog(num_tokens=10, block_size=1)
    for step in range(FUTURE_EVERY + 1):
        backlog.step(step / 10, 1, [(step + 1, 1)])
    found = backlog.counters()
    assert found["backlog_steps"] == found["backlog_decode_tokens"] == FUTURE_EVERY + 1
    assert found["backlog_kv_used_fraction"] == pytest.approx(0.5)
    assert found["backlog_future_kv_fraction"] == pytest.approx((0.2 + 1.2) / 2)


def test_run_counts_the_steps_that_left_somebody_waiting() -> None:
    """One seat: while a generates its 4 tokens, b waits; when b runs, nobody does."""
    record = RecordSpec(backlog=True)
    asked = [ask("a", prompt=5, output=4), ask("b", prompt=5, output=7)]
    data, _ = simulate(asked, SteadyCost(), record=record, max_num_seqs=1, async_scheduling=False)
    assert data.counters["backlog_steps"] == 4
    assert data.counters["backlog_decode_tokens"] == 3  # the first of the four computes the prompt
    assert 0 < data.counters["backlog_kv_used_fraction"] <= data.counters["backlog_future_kv_fraction"] < 1


def test_without_a_queue_there_are_no_means_and_unasked_no_counters() -> None:
    data, _ = simulate([ask("a")], record=RecordSpec(backlog=True))
    assert data.counters["backlog_steps"] == 0
    assert "backlog_kv_used_fraction" not in data.counters
    plain, _ = simulate([ask("a")])
    assert not [name for name in plain.counters if name.startswith("backlog")]
