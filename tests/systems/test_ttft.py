"""`alise-ttft`: who goes before whom, running or not, and that nobody leaves twice."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.pool_step import PoolStep, room_of
from vllm_ext.contract import Rank, RequestView, Server
from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.systems.alise import RETURNING, GittinsOverWait, PreemptOnce, gittins_cost

_SERVER = Server(max_num_seqs=10, kv_tokens=1000, prefill_steps=0.02)
_TWO_KINDS = LengthDistribution.of([4] * 9 + [400])


def view(name: str = "a", distribution: LengthDistribution = _TWO_KINDS, **more: object) -> RequestView:
    return RequestView(name, 0.0, 10, distribution=distribution, server=_SERVER, max_tokens=500, **more)  # type: ignore[arg-type]


def running(name: str, generated: int, distribution: LengthDistribution = _TWO_KINDS, **more: object) -> RequestView:
    return view(name, distribution, num_output_tokens=generated, num_computed_tokens=10 + generated - 1, **more)


def key(order: GittinsOverWait, request: RequestView, now: float) -> tuple[float, ...]:
    """As the queue makes it of a waiting request's rank."""
    rank = order.rank(request, now)
    return (*rank.key, order.ageing.score(rank.cost, now - request.arrival_time))


def test_of_known_length_the_cost_is_the_share_of_a_step_over_all_steps_left() -> None:
    distribution = LengthDistribution.point(50)
    assert gittins_cost(running("a", 20, distribution), 0.0) == pytest.approx(
        (1 / 10 + 30 / 1000) * 30 + 0.02, rel=0.05
    )


def test_a_newcomer_goes_before_one_that_turned_out_long_but_not_before_one_about_to_end() -> None:
    order = GittinsOverWait()
    new, long, young = view("new"), running("long", 40), running("young", 2)
    assert key(order, new, 1.0) < order.running_rank(long, 1.0).key
    assert key(order, new, 1.0) > order.running_rank(young, 1.0).key


def test_equals_do_not_push_each_other_out() -> None:
    order, distribution = GittinsOverWait(), LengthDistribution.point(50)
    waits, runs = view("waits", distribution), running("runs", 1, distribution)
    assert key(order, waits, 1.0) > order.running_rank(runs, 1.0).key
    assert key(dataclasses.replace(order, hysteresis=1.0), waits, 1.0) > order.running_rank(runs, 1.0).key


def test_a_running_rank_is_asked_for_again_as_it_ages_and_generates() -> None:
    rank = GittinsOverWait().running_rank(running("a", 80), 7.0)
    assert (rank.until_tokens, rank.until_s) == (90, 8.0)


def test_who_was_preempted_competes_for_15_s_and_then_goes_before_all_others() -> None:
    order = GittinsOverWait()
    out = view("out", num_output_tokens=40, num_preemptions=1, waiting_since=100.0)
    rank = order.rank(out, 101.0)
    assert rank.cost > 0
    assert rank.until_s == 115.0
    assert order.rank(out, 115.0) == Rank((RETURNING,), level=0)
    assert order.rank(out, 115.0).key < order.rank(view(), 115.0).key


def test_who_was_preempted_once_is_no_victim_any_more() -> None:
    step = PoolStep(
        queue=(view("new"),),
        running=(running("once", 60, num_preemptions=1, progress_tokens=50), running("never", 50)),
        keys={"new": 1.0, "never": 2.0, "once": 3.0},
        free=0,
        max_running=2,
    )
    room = room_of(step)
    PreemptOnce().select(step, room)
    assert (room.admit, room.preempt) == (["new"], ["never"])
    room = room_of(dataclasses.replace(step, running=step.running[:1]))
    PreemptOnce().select(dataclasses.replace(step, running=step.running[:1]), room)
    assert room.preempt == []


@pytest.mark.parametrize(("field", "value"), [("hysteresis", 0.9), ("back_after_s", -1.0)])
def test_bad_parameters_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"ordering\.{field}={value}"):
        GittinsOverWait(**{field: value})
