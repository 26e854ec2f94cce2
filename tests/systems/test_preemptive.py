"""Preemptive admission: the formula worked by hand, seats and blocks, no thrashing, parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool_step import PoolStep, select
from vllm_ext.contract import RequestView, Split
from vllm_ext.systems.alise import Preemptive
from vllm_ext.systems.upstream import InOrder, StaticBudget


def waiting(name: str, tokens: int, *, remaining: float | None = None) -> RequestView:
    left_s = tokens * 0.01 if remaining is None else remaining
    return RequestView(
        name, 0.0, 10, predicted_output_tokens=tokens, predicted_remaining_s=left_s, waiting_since=0.0, max_tokens=1000
    )


def running(name: str, tokens: int, remaining: float, *, price: float = 0.0, **fields: Any) -> RequestView:
    values = {"num_computed_tokens": 10, "recompute_s": price, "progress_tokens": 99, **fields}
    return RequestView(name, 0.0, 10, predicted_output_tokens=tokens, predicted_remaining_s=remaining, **values)


def step_of(queue: list[RequestView], run: list[RequestView], **fields: Any) -> PoolStep:
    """Both best rank first, two seats, room for all, 5 blocks for each that runs."""
    blocks = {r.req_id: 5 for r in run} | fields.pop("blocks", {})
    defaults = {"max_running": 2, "total": 1000, "free": 1000, "token_budget": 10_000}
    return PoolStep(queue=tuple(queue), running=tuple(run), blocks=blocks, **{**defaults, **fields})


def preempted(policy: Preemptive, step: PoolStep) -> list[str]:
    return select(policy, step).preempt


def example(price: float, **fields: Any) -> PoolStep:
    """Two seats, two long jobs: t = 1 s until the better one ends; a job of 10 tokens waits.

    gain = 1 / 10 = 0.1
    loss = (1 + c) / 200 + c * 2 * (1/100 + 1/200) / 2 = 0.005 + c * (0.005 + 0.015)
    They are equal at c = 0.095 / 0.02 = 4.75 s.
    """
    run = [running("long", 100, 1.0), running("longer", 200, 2.0, price=price, **fields)]
    return step_of([waiting("short", 10)], run)


@pytest.mark.parametrize(("price", "victims"), [(0.0, ["longer"]), (4.74, ["longer"]), (4.76, []), (100.0, [])])
def test_worked_example_preempts_while_the_gain_exceeds_the_loss(price: float, victims: list[str]) -> None:
    room = select(Preemptive(), example(price))
    assert (room.preempt, room.admit) == (victims, ["short"] if victims else [])
    assert room.why == ({} if victims else {"short": "seats"})


def test_gain_ratio_asks_for_more() -> None:
    """At c = 0 the gain is 20 times the loss."""
    assert preempted(Preemptive(gain_ratio=19.9), example(0.0)) == ["longer"]
    assert preempted(Preemptive(gain_ratio=20.1), example(0.0)) == []


def test_where_swaps_are_free_rank_alone_decides() -> None:
    assert preempted(Preemptive(priced=False), example(100.0)) == ["longer"]
    assert preempted(Preemptive(priced=False), replace(example(100.0), keys={"short": 2.0})) == [], "ties stay"
    assert (Preemptive().uses_predictions, Preemptive(priced=False).uses_predictions) == (True, False)


def test_who_outlived_its_estimate_is_spared_where_that_is_asked_for() -> None:
    step = example(0.0, num_demotions=1)
    assert preempted(Preemptive(), step) == ["longer"]
    assert preempted(Preemptive(spare_outlived=True), step) == ["long"], "the next one leaves instead"
    step = replace(step, running=tuple(request._replace(num_demotions=1) for request in step.running))
    assert preempted(Preemptive(spare_outlived=True), step) == []


def test_nobody_leaves_where_a_seat_is_free() -> None:
    room = select(Preemptive(), replace(example(0.0), max_running=3))
    assert (room.admit, room.preempt) == (["short"], [])


def test_blocks_are_gathered_from_the_worst_until_they_suffice() -> None:
    """12 blocks needed, 3 free, 5 per victim: two victims of the worst rank.

    gain = 1 / 2; loss = 1/400 + 1/300.
    """
    step = step_of(
        [waiting("short", 2)],
        [running("a", 100, 1.0), running("b", 300, 3.0), running("c", 400, 4.0)],
        max_running=10,
        free=3,
        blocks={"short": 12},
    )
    assert preempted(Preemptive(), step) == ["c", "b"]
    assert preempted(Preemptive(max_victims=1), step) == [], "all or nothing"
    assert preempted(Preemptive(), replace(step, free=7)) == ["c"]
    assert preempted(Preemptive(), replace(step, free=12)) == []


def test_a_request_that_no_set_of_victims_can_fit_preempts_nobody() -> None:
    run = [running("a", 300, 3.0), running("b", 400, 4.0)]
    assert preempted(Preemptive(), step_of([waiting("huge", 2)], run, free=0, blocks={"huge": 500})) == []


def test_a_victim_ranks_after_the_request_it_makes_room_for() -> None:
    step = step_of([waiting("w", 50, remaining=5.0)], [running("a", 100, 1.0), running("b", 1000, 4.9)])
    assert preempted(Preemptive(), step) == []


def test_a_victim_of_before_is_spared_until_it_made_progress() -> None:
    step = example(0.0, num_preemptions=1, progress_tokens=15)
    assert preempted(Preemptive(), step) == ["long"], "the next worst one is taken"
    assert preempted(Preemptive(), example(0.0, num_preemptions=1, progress_tokens=16)) == ["longer"]


def test_several_waiting_requests_take_a_victim_each_and_no_victim_twice() -> None:
    step = step_of(
        [waiting("s1", 2), waiting("s2", 2), waiting("s3", 2)],
        [running("a", 100, 1.0), running("b", 300, 3.0), running("c", 400, 4.0)],
        max_running=3,
    )
    room = select(Preemptive(max_preempting=2), step)
    assert (room.admit, room.preempt) == (["s1", "s2"], ["c", "b"])
    assert len(preempted(Preemptive(), step)) == 3


def test_the_first_request_that_is_not_worth_it_ends_the_step() -> None:
    step = example(100.0)
    assert preempted(Preemptive(), replace(step, queue=(*step.queue, waiting("shorter", 1)))) == []


@pytest.mark.parametrize(
    "step",
    [
        step_of([], [running("a", 100, 1.0)], max_running=1),
        step_of([waiting("w", 1)], [], max_running=1),
        step_of([], []),
        step_of([waiting("w", 1)], [], free=0),
        replace(example(0.0), token_budget=2),
        replace(example(0.0), max_running=0),
    ],
    ids=["nothing waits", "nothing runs", "empty", "no blocks", "decodes take the whole budget", "no seats at all"],
)
def test_nobody_is_preempted_without_need_or_use(step: PoolStep) -> None:
    assert preempted(Preemptive(), step) == []


def test_nobody_is_preempted_for_a_request_that_would_get_no_token() -> None:
    """Two wait; the first one's prompt takes what is left of the budget, so the second has no use for a seat."""
    step = step_of([waiting("w", 1), waiting("x", 1)], [running("r", 50, 50.0), running("s", 60, 60.0)])
    assert len(preempted(Preemptive(), step)) == 2
    assert len(preempted(Preemptive(), replace(step, token_budget=step.num_running + 1))) == 1


def test_switched_off_it_preempts_nobody() -> None:
    assert preempted(Preemptive(preempt=False), example(0.0)) == []
    assert (Preemptive().preempts, Preemptive(preempt=False).preempts) == (True, False)


WAITING = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8)), max_size=6)
RUNNING = st.lists(st.tuples(st.integers(50, 500), st.integers(1, 8), st.floats(0, 1), st.integers(0, 2)), max_size=6)


def _build(waits: list[tuple[int, int]], runs: list[tuple[int, int, float, int]], seats: int, free: int) -> PoolStep:
    waits, runs = sorted(waits), sorted(runs)
    return step_of(
        [waiting(f"w{i}", tokens) for i, (tokens, _) in enumerate(waits)],
        [
            running(f"r{i}", tokens, tokens * 0.01, price=price, num_preemptions=count, progress_tokens=5)
            for i, (tokens, _, price, count) in enumerate(runs)
        ],
        blocks={f"w{i}": row[1] for i, row in enumerate(waits)} | {f"r{i}": row[1] for i, row in enumerate(runs)},
        max_running=max(seats, len(runs)),
        free=free,
    )


@given(waits=WAITING, runs=RUNNING, seats=st.integers(1, 8), free=st.integers(0, 20))
def test_every_preemption_makes_room_that_somebody_takes(
    waits: list[tuple[int, int]], runs: list[tuple[int, int, float, int]], seats: int, free: int
) -> None:
    step = _build(waits, runs, seats, free)
    room = select(Preemptive(), step)  # checks that no victim is named twice, and none for nobody
    if runs:
        freed = sum(step.blocks[name] for name in room.preempt)
        assert room.blocks == free + freed - sum(step.blocks[name] for name in room.admit)
        assert room.admit == [request.req_id for request in step.queue][: len(room.admit)]


@given(waits=WAITING, runs=RUNNING, seats=st.integers(1, 8), free=st.integers(0, 20), more=st.integers(1, 10))
def test_more_memory_never_admits_less(
    waits: list[tuple[int, int]], runs: list[tuple[int, int, float, int]], seats: int, free: int, more: int
) -> None:
    policy = Preemptive(max_preempting=10, max_victims=10)
    less, richer = (select(policy, _build(waits, runs, seats, f)).admit for f in (free, free + more))
    assert len(richer) >= len(less)


def test_vllms_own_rules_preempt_nobody_and_split_nothing() -> None:
    step = example(0.0)
    step = replace(step, max_running=3, queue=(*step.queue, waiting("next", 10)))
    room = select(InOrder(), step)
    assert (room.admit, room.preempt, room.why) == (["short"], [], {"next": "seats"})
    assert StaticBudget().split(step) == Split()
    assert (InOrder().is_vllms, Preemptive().is_vllms) == (True, False)


def test_those_who_share_a_prefix_join_in_one_pass() -> None:
    """80 shared blocks and 2 of their own each, of 100: as vLLM lets them share what is cached in the same step."""
    queue = [waiting(f"w{i}", 10) for i in range(12)]
    step = step_of(
        queue,
        [running("r", 100, 0.0)],
        blocks={r.req_id: 82 for r in queue},
        free=100,
        common_blocks=80,
        max_running=20,
    )
    assert len(select(InOrder(), step).admit) == 10
    assert len(select(InOrder(), replace(step, common_blocks=0)).admit) == 1
