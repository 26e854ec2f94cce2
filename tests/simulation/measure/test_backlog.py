"""How full memory was, and would become, while somebody waited: worked by hand."""

from __future__ import annotations

import pytest

from tests.support.simulation_parts import SteadyCost, ask, simulate
from vllm_ext.simulation.measure.backlog import FUTURE_EVERY, Backlog
from vllm_ext.simulation.spec import RecordSpec


@pytest.mark.parametrize(("block_size", "peak"), [(1, 34), (5, 34 + 2 * 2)])
def test_future_peak_is_that_of_past_futures_equations(block_size: int, peak: int) -> None:
    """Two run: 10 tokens held and 6 to come, 20 held and 2 to come.

    When the second ends, after 2 steps, both hold 10 + 20 + 2 * 2 = 34; when the first ends it holds 16. Blocks are
    rounded up by half a block on average.
    """
    backlog = Backlog(num_tokens=100, block_size=block_size)
    backlog.step(0.30, 2, [(10, 6), (20, 2)])
    assert backlog.counters() == {
        "backlog_steps": 1.0,
        "backlog_decode_tokens": 2.0,
        "backlog_kv_used_fraction": pytest.approx(0.30),
        "backlog_future_kv_fraction": pytest.approx(peak / 100),
    }


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
    for record, counters in ((RecordSpec(backlog=True), {"backlog_steps", "backlog_decode_tokens"}), (None, set())):
        data, _ = simulate([ask("a")], record=record)
        assert {name for name in data.counters if name.startswith("backlog")} == counters
