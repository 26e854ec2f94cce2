"""The policies of `auto`: remaining time until an objective presses, and who joins past those that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from vllm_ext.policies.admission.backfill import Backfill
from vllm_ext.policies.contract import AGED, Pace, Rank, RequestView
from vllm_ext.policies.gates.peak_memory import PeakMemory
from vllm_ext.policies.ordering.pressing import PRESSING, RELEGATED, WILLING, PressingFirst
from vllm_ext.slo import NO_SLO, Slo

from .pool_step import PoolStep, select

PACE = Pace(step_s=0.05, longest_step_s=0.1, chunk_tokens=1000.0)


def waiting(name: str, prompt: int = 100, *, slo: Slo = NO_SLO, left_s: float = 1.0, **fields: Any) -> RequestView:
    values = {"waiting_since": 100.0, "pace": PACE, "slo": slo, "max_tokens": 20, **fields}
    return RequestView(name, 100.0, prompt, predicted_remaining_s=left_s, **values)


def order(*requests: RequestView, now: float = 100.0) -> list[str]:
    policy = PressingFirst()
    keys = {r.req_id: policy.rank(r, now).key for r in requests}
    return sorted(keys, key=keys.__getitem__)


def test_without_objectives_the_shortest_goes_first() -> None:
    assert order(waiting("long", left_s=9.0), waiting("short", left_s=0.1), waiting("middle", left_s=2.0)) == [
        "short",
        "middle",
        "long",
    ]
    first = waiting("low", left_s=0.1, priority=5)
    assert order(first, waiting("high", left_s=9.0)) == ["high", "low"]


def test_an_objective_counts_once_it_presses_and_no_more_when_it_is_lost() -> None:
    policy = PressingFirst(horizon_s=2.0)
    request = waiting("slo", slo=Slo(ttft_s=10.0), left_s=30.0, prefill_s=0.5)
    early = policy.rank(request, 100.0)
    assert early.level == WILLING
    assert early.until_s == pytest.approx(107.9)
    pressing = policy.rank(request, early.until_s)
    assert pressing.level == PRESSING
    assert pressing.until_s == pytest.approx(109.5)
    lost = policy.rank(request, pressing.until_s)
    assert lost.level == RELEGATED
    short = waiting("short", left_s=0.01)
    assert pressing.key < policy.rank(short, 108.0).key < lost.key


def test_who_runs_with_an_objective_gives_way_to_nobody_who_waits() -> None:
    policy = PressingFirst()
    runs = waiting("r", slo=Slo(tbt_s=0.5), num_output_tokens=3, num_computed_tokens=103, waiting_since=None)
    pressing = waiting("w", slo=Slo(ttft_s=0.2))
    assert policy.rank(runs, 105.0).key < policy.rank(pressing, 100.0).key
    looser = runs._replace(slo=Slo(tbt_s=5.0))
    assert policy.rank(runs, 105.0).key < policy.rank(looser, 105.0).key, "most time left is the last, and leaves"
    assert policy.rank(runs._replace(missed=True), 105.0).level == RELEGATED


def test_nobody_waits_longer_than_the_age_limit() -> None:
    policy = PressingFirst(age_limit_s=20.0)
    lost = waiting("lost", slo=Slo(ttft_s=0.1), prefill_s=1.0)
    assert policy.rank(lost, 110.0).until_s == pytest.approx(120.0)
    assert policy.rank(lost, 110.0).older_only_s == pytest.approx(120.0)
    assert policy.rank(lost, 120.0) == Rank((float(AGED),), older_only_s=-math.inf, level=AGED)


def test_a_running_rank_holds_until_it_has_generated_so_much() -> None:
    """A third of 60 tokens takes 3 s to 2 s, the next queue; with an objective only an outlived estimate counts."""
    policy = PressingFirst(num_levels=4)
    runs = waiting("r", left_s=3.0, num_output_tokens=10, predicted_output_tokens=70, max_tokens=100)
    runs = runs._replace(waiting_since=None, num_computed_tokens=109)
    assert policy.rank(runs, 100.0).until_tokens == pytest.approx(30)
    assert policy.rank(runs._replace(slo=Slo(tbt_s=0.5)), 100.0).until_tokens == 70
    assert policy.rank(runs, 100.0)[1:5] == (math.inf, policy.rank(runs, 100.0).until_tokens, math.inf, WILLING)


def pool(*queue: RequestView, blocks: int = 20, **fields: Any) -> PoolStep:
    return PoolStep(queue=queue, free=blocks, token_budget=500, pace=PACE, **fields)


RUNS = waiting("r", num_computed_tokens=100)._replace(waiting_since=None)
FORESEEN = PeakMemory(reserve=0.0)


def test_one_that_does_not_fit_holds_nobody_up() -> None:
    queue = waiting("a", 100), waiting("large", 400), waiting("b", 60), waiting("c", 200)
    step = pool(*queue, running=(RUNS,))
    room = select(Backfill(), step, FORESEEN)
    assert room.admit == ["a", "b"], "7 + 4 blocks; 25 and 13 are too many"
    assert room.why == {"large": "blocks", "c": "blocks"}
    aged = replace(step, aged=frozenset({"large"}))
    assert select(Backfill(), aged, FORESEEN).admit == ["a"], "nobody passes one that waited too long"
    assert select(Backfill(max_passed=1), step).admit == ["a"], "the first one that does not fit is the last looked at"
    assert select(Backfill(max_passed=2), step).admit == ["a", "b"]


def test_what_fits_now_but_not_at_the_peak_stays_out() -> None:
    runs = waiting("r", 800, num_computed_tokens=800, num_output_tokens=1, max_tokens=700)._replace(waiting_since=None)
    step = pool(waiting("w", 100, max_tokens=700), running=(runs,), blocks=49, finished=(650,) * 60, max_model_len=4096)
    assert select(Backfill(), step, FORESEEN).why == {"w": "peak_memory"}
    assert select(Backfill(), replace(step, finished=(30,) * 60, memo={}), FORESEEN).admit == ["w"]


def test_alone_a_request_joins_whatever_it_needs() -> None:
    assert select(Backfill(), pool(waiting("huge", 5000)), PeakMemory()).admit == ["huge"]
    assert select(Backfill(), pool(), PeakMemory()).admit == []


def test_others_leave_only_where_nobody_joins_and_not_if_they_outlived_their_estimate() -> None:
    """t = 9 s, gain 9 / 1 against 9 / 100 for the last one, which is long."""
    runs = tuple(RUNS._replace(req_id=f"r{i}", predicted_remaining_s=9.0 + i) for i in range(2))
    runs = tuple(r._replace(predicted_output_tokens=100) for r in runs)
    step = pool(waiting("large", 200), waiting("small", 60), running=runs, blocks=7)
    assert (select(Backfill(), step).admit, select(Backfill(), step).preempt) == (["small"], [])
    alone = replace(step, queue=step.queue[:1])
    room = select(Backfill(), alone)
    assert (room.admit, room.preempt) == (["large"], ["r1"])
    assert select(Backfill(preempt=False), alone).why == {"large": "blocks"}
    old = replace(alone, running=(runs[0], runs[1]._replace(num_demotions=1)))
    assert select(Backfill(), old).preempt == ["r0"]
    assert select(Backfill(spare_outlived=False), old).preempt == ["r1"]
