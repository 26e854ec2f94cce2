"""Past-Future's peak memory: the equations by hand, the draws, and what the gate makes of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool_step import PoolStep, prompts, select
from vllm_ext.contract import Candidate, Demand, GatePolicy, RequestView
from vllm_ext.systems.alise import Preemptive
from vllm_ext.systems.baselines import ReserveMaximum, Watermark
from vllm_ext.systems.past_future import Forecast, Peak, PeakMemory
from vllm_ext.systems.upstream import InOrder

REQUESTS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=12)
SWAPPING = Preemptive(priced=False)


def by_simulation(requests: list[tuple[int, int]]) -> int:
    """Let everybody generate a token per step until all have ended; return the most that was held."""
    peak, step = 0, 0
    while any(left > step for _, left in requests):
        step += 1  # a request holds its last token until its step is over
        peak = max(peak, sum(held + step for held, left in requests if left >= step))
    return peak


@given(REQUESTS)
def test_the_peak_is_what_a_simulation_finds(requests: list[tuple[int, int]]) -> None:
    held, left = [h for h, _ in requests], [r for _, r in requests]
    assert Peak(held, left).tokens == by_simulation(requests)


@given(REQUESTS, st.integers(1, 200), st.integers(1, 200))
def test_one_more_is_as_if_it_had_been_there(requests: list[tuple[int, int]], tokens: int, remaining: int) -> None:
    peak = Peak([h for h, _ in requests], [r for _, r in requests])
    together = by_simulation([*requests, (tokens, remaining)])
    assert peak.with_one_more(tokens, remaining) == pytest.approx(together)
    peak.add(tokens, remaining)
    assert peak.tokens == pytest.approx(together)
    assert peak.with_one_more(3, 5) == pytest.approx(by_simulation([*requests, (tokens, remaining), (3, 5)]))


def test_what_is_shared_counts_once_and_less_as_sharers_end() -> None:
    """Three requests of 10 tokens share 6: 18 held instead of 30. One that ends takes 4, its part of 6 stays."""
    peak = Peak([10, 10, 10], [1, 2, 3], extra=-12)
    # Ends of the third, the second, the first: 3*10 - 12 + 3, 2*10 - 6 + 4, 10 + 3.
    assert peak.tokens == 21
    assert Peak([10], [1], extra=-12).tokens == 11
    assert Peak([10], [1], extra=5).tokens == 16, "what others hold stays"


def admitted(step: PoolStep, *gates: GatePolicy) -> int:
    """How many join in order."""
    return len(select(InOrder(), step, *gates).admit)


def pool(total: int, free: int | None = None, **fields: Any) -> PoolStep:
    """Blocks of one token, and tokens for everybody."""
    defaults = {"block_size": 1, "token_budget": 10_000, "max_running": 200}
    return PoolStep(total=total, free=total if free is None else free, **{**defaults, **fields})


def running(*rows: tuple[int, int, int], bound: int = 100) -> tuple[RequestView, ...]:
    """From (prompt, generated, predicted output)."""
    return tuple(
        RequestView(
            f"r{i}", float(i), p, g, p + g, max_tokens=bound, predicted_output_tokens=n, predicted_remaining_s=1.0
        )
        for i, (p, g, n) in enumerate(rows)
    )


def worked(after: int) -> PoolStep:
    """The situation of the paper's Figures 5 and 6, ``after`` steps on: 21 tokens, two running, one in the queue.

    The figures' numbers are not in the text. These have its outcome: admitted at once the peak is 22, one step later
    21, and only after two steps, when the first has ended, do the maximum lengths fit.
    """
    rows = [(3, 1 + after, 3), (5, 2 + after, 6)]
    batch = tuple(r._replace(max_tokens=r.predicted_output_tokens) for r in running(*(r for r in rows if r[1] < r[2])))
    queued = RequestView("q", 9.0, 5, max_tokens=3, predicted_output_tokens=3, waiting_since=9.0)
    return pool(21, 21 - sum(r.num_tokens for r in batch), running=batch, queue=(queued,))


EXACT = PeakMemory(forecast="predicted", reserve=0.0)


def test_the_papers_example_of_21_tokens() -> None:
    assert [admitted(worked(t), EXACT) for t in range(3)] == [0, 1, 1]
    assert admitted(worked(0), Watermark(watermark=1.0)) == 1, "and a request is evicted two steps later"
    assert [admitted(worked(t), ReserveMaximum()) for t in range(3)] == [0, 0, 1]
    assert [admitted(worked(t), EXACT, ReserveMaximum(), Watermark()) for t in range(3)] == [0, 0, 1], "all must agree"


def test_who_leaves_is_not_in_the_forecast() -> None:
    """They have 4 and 7 tokens, and 2 and 4 to go: the second alone holds 11 at its end, both 11 + 2 * 2 before.

    Without the second a request of 5 tokens with 3 to go fits, and so does another: the peak is 14 + 2 * 3 = 20. One
    more that adds 2 tokens makes it 16 + 2 * 4, and without the first one 12 + 3 * 3 = 21.
    """
    step = worked(0)
    victim, demand = step.victim(step.running[1]), Demand(5, 5, 5)
    assert (Forecast(EXACT, step).tokens, Forecast(EXACT, step, (victim,)).tokens) == (15, 6)
    gate, (first,) = EXACT.gate(step), step.waiting()
    second, third = (
        Candidate(name, first.key, functools.partial(first.request._replace, req_id=name)) for name in ("q2", "q3")
    )
    assert [gate.fits(first, demand, leaving) for leaving in ((), (victim,))] == [False, True]
    gate.take(first, demand, (victim,))
    assert gate.fits(second, demand, ())
    gate.take(second, demand, ())
    also = step.victim(step.running[0])
    assert [gate.fits(third, Demand(2, 2, 2), leaving) for leaving in ((), (also,))] == [False, True]
    assert not gate.fits(third, demand, (also,)), "three times 5 + 3: those who joined are still there"


def waiting(count: int, prompt: int = 10, bound: int = 90) -> tuple[RequestView, ...]:
    return prompts(*[(prompt, bound)] * count)


def test_before_history_everybody_is_as_long_as_allowed() -> None:
    assert admitted(pool(250, queue=waiting(5)), PeakMemory(reserve=0.0)) == 2


def test_history_lets_more_in_and_outlived_history_less() -> None:
    step = pool(250, queue=waiting(8), finished=(20,) * 100)
    assert admitted(step, PeakMemory(reserve=0.0)) == 8
    # It has outlived all history: 80 tokens are expected. At its end it holds 90; seven others of 30 end before.
    assert admitted(replace(step, free=200, running=running((10, 40, 1))), PeakMemory(reserve=0.0)) == 6


@pytest.mark.parametrize("reserve", [0.03, 0.05, 0.10])
def test_the_reserve_stays_free(reserve: float) -> None:
    step = pool(3000, queue=waiting(100), finished=(20,) * 100)
    assert admitted(step, PeakMemory(reserve=reserve)) == int((1 - reserve) * 3000) // 30


def test_a_shared_prefix_costs_nothing() -> None:
    step = PoolStep(total=9, free=9, queue=waiting(4, prompt=64), finished=(16,) * 100, token_budget=999)
    policy = PeakMemory(reserve=0.0)
    assert admitted(step, policy) == 1
    assert admitted(replace(step, common_blocks=4, common_held=True), policy) == 4


@given(
    history=st.lists(st.integers(1, 300), max_size=60),
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), max_size=6),
    free=st.integers(1, 800),
    more=st.integers(0, 400),
    stratify=st.booleans(),
)
def test_more_memory_never_admits_less(
    history: list[int], rows: list[tuple[int, int]], free: int, more: int, stratify: bool
) -> None:
    batch = running(*((p, g, 1) for p, g in rows), bound=300)
    held = sum(r.num_tokens for r in batch)

    def joined(unused: int) -> int:
        step = pool(held + unused, unused, running=batch, queue=waiting(6), finished=tuple(history))
        return admitted(step, PeakMemory(stratify=stratify))

    assert joined(free) <= joined(free + more)


def test_draws_follow_the_history_given_what_was_generated() -> None:
    """A request that generated 50 can only become one of the longer ones; the mean peak follows their mean."""
    policy = PeakMemory(cold_requests=0, most_repeats=1, stratify=False)
    steps = [
        pool(500, 440, running=running((10, 50, 1)), finished=(10, 20, 60, 80), seed=seed, queue=waiting(1))
        for seed in range(400)
    ]
    peaks = [Forecast(policy, step).tokens for step in steps]
    assert set(peaks) == {70.0, 90.0}
    assert np.mean(peaks) == pytest.approx(80.0, abs=2.0)


CROWDED = PoolStep(
    total=8, free=2, running=running((60, 30, 1)), queue=waiting(3), finished=(60,) * 100, number=10, token_budget=999
)
"""At the end of the one that runs 120 of 128 tokens are held, and half a block."""


def refused_then(policy: PeakMemory, steps_on: int, **fields: Any) -> int:
    """Let nobody fit in step 10; then, so many steps later, let two fit. Return how many join."""
    crowded = replace(CROWDED, memo={})
    assert select(InOrder(), crowded, policy).why == {"w0": "peak_memory"}
    roomy = {"total": 100, "free": 60, "max_running": 3, "number": 10 + steps_on}
    return admitted(replace(crowded, **{**roomy, **fields}), policy)


@pytest.mark.parametrize(
    ("steps_on", "fields", "joined"),
    [(3, {}, 0), (4, {}, 2), (1, {"changes": 1}, 2), (1, {"changes": -1, "queue": waiting(2)}, 2)],
    ids=["soon", "asked again", "somebody came or left", "another took its place"],
)
def test_that_nobody_fits_stands_for_some_steps_of_an_unchanged_batch(
    steps_on: int, fields: dict[str, Any], joined: int
) -> None:
    assert refused_then(PeakMemory(redraw_steps=4), steps_on, **fields) == joined
    assert refused_then(PeakMemory(redraw_steps=1), steps_on, **fields) == 2


def test_a_refusal_closes_the_room_and_is_asked_afresh_when_somebody_leaves() -> None:
    policy = PeakMemory()
    crowded = replace(CROWDED, memo={})
    assert not policy.gate(crowded).closed
    assert admitted(crowded, policy) == 0
    later = replace(crowded, number=11)
    assert policy.gate(later).closed
    room = select(SWAPPING, later, policy)
    assert (room.admit, room.preempt) == (["w0"], ["r0"])
    assert later.memo == {}, "who joined changes the forecast"
    assert not policy.gate(replace(later, number=12)).closed


def test_a_refusal_is_over_once_somebody_left_for_another() -> None:
    """As soon as the long one has left, both fit."""
    step = replace(CROWDED, total=9, running=running((5, 1, 1), (60, 30, 1)), queue=waiting(2, bound=6), memo={})
    assert select(SWAPPING, step, PeakMemory()).preempt == ["r1"]
    step = replace(step, memo={})
    assert admitted(step, PeakMemory()) == 0
    room = select(SWAPPING, replace(step, number=11), PeakMemory())
    assert (room.admit, room.preempt) == (["w0", "w1"], ["r1"])


def test_a_refusal_is_noted_only_where_nobody_joined() -> None:
    step = replace(CROWDED, total=16, free=10, queue=waiting(9), memo={})
    assert 0 < admitted(step, PeakMemory()) < 9
    assert step.memo == {}
