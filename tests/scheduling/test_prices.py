"""When steps take longer than thought: whose ranks are asked for again."""

from __future__ import annotations

import pytest

from tests.support.steering import unwatched
from vllm_ext.step_time.runtime import Coefficients


def _asked(system: str, *, prefill: float, decode: float, waiting: int = 50, steps: int = 70) -> int:
    """Return how many ranks were asked for in some steps, before which prices changed by these factors."""
    rig = unwatched(system, max_num_seqs=2, max_num_batched_tokens=64)
    for i in range(2 + waiting):
        rig.add(f"r{i}", 16, length=400, osl=400)
    rig.step(3)
    scheduler = rig.scheduler
    ranked, asked = scheduler.ranked._rank, []

    def rank(request: object) -> object:
        asked.append(request)
        return ranked(request)

    scheduler.ranked._rank = rank
    runtime = scheduler.tracked.runtime
    old: Coefficients = runtime.coefficients
    runtime._use(
        old._replace(
            base_s=old.base_s * decode,
            decode_s=old.decode_s * decode,
            context_token_s=old.context_token_s * decode,
            prefill_token_s=old.prefill_token_s * prefill,
            pair_s=old.pair_s * prefill,
        )
    )
    runtime.observe = lambda *_: None
    for _ in range(steps):
        scheduler._plan(rig.clock())
        scheduler.current_step += 1
    return len(asked)


@pytest.mark.parametrize("system", ["alise", "fair+alise", "fcfs-tuned", "past-future"])
def test_prices_that_rise_together_change_no_order_of_costs_and_nobody_is_asked(system: str) -> None:
    assert _asked(system, prefill=1.5, decode=1.5) == 0


def test_a_change_of_the_ratio_has_all_asked_in_the_end() -> None:
    assert _asked("alise", prefill=3.0, decode=1.0, steps=64 + 4 * 50) == 50


def test_orders_by_time_follow_every_price() -> None:
    assert _asked("accelgen", prefill=1.5, decode=1.5, steps=64 + 4 * 50) >= 50


def test_a_step_asks_for_three_at_most() -> None:
    assert _asked("alise", prefill=3.0, decode=1.0, steps=65) <= 3 * 64
