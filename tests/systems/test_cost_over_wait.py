"""Cost over waiting, who may be passed, and who leaves when memory runs out."""

from __future__ import annotations

import math

import pytest

from tests.support.pool_step import PoolStep, room_of
from vllm_ext.contract import RequestView, Server
from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.systems.alise import BoundedBypass, CostOverWait, cost
from vllm_ext.systems.fcfs import ArrivalLeastComputedLeaves

_SERVER = Server(max_num_seqs=10, kv_tokens=1000, prefill_steps=0.02)


def view(name: str = "a", *, prompt: int = 100, length: int = 50, **more: object) -> RequestView:
    return RequestView(
        name, 0.0, prompt, distribution=LengthDistribution.point(length), server=_SERVER, max_tokens=500, **more
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("theta", [0.0, 0.5, 1.0])
def test_cost_is_the_share_of_seats_and_kv_over_all_steps_and_the_prompt(theta: float) -> None:
    shares = sum(1 / 10 + (100 + generated + 0.5) / 1000 for generated in range(50))
    assert cost(view(), theta) == pytest.approx((shares + 0.02 * 100) * 50**theta, rel=1e-6)


def test_what_is_cached_costs_no_prefill() -> None:
    assert cost(view(), 0.0) - cost(view(cached_tokens=64), 0.0) == pytest.approx(0.02 * 64)


def test_who_was_preempted_comes_back_before_all_others() -> None:
    order = CostOverWait()
    fresh, back = order.rank(view(length=1), 9.0), order.rank(view(length=500, num_preemptions=1), 9.0)
    assert back.key < fresh.key
    assert (back.cost, fresh.cost > 0, fresh.until_s) == (0.0, True, math.inf)


@pytest.mark.parametrize("order", [CostOverWait(), ArrivalLeastComputedLeaves()], ids=["cost", "arrival"])
def test_whoever_computed_least_leaves_first_and_a_rank_holds_for_a_quarter_octave(order: CostOverWait) -> None:
    ranks = [
        order.running_rank(view(num_computed_tokens=computed, num_output_tokens=computed - 99), 1.0)
        for computed in (100, 200, 400)
    ]
    assert ranks[0].key > ranks[1].key > ranks[2].key
    held = ranks[0].until_tokens
    later = view(num_computed_tokens=99 + int(held) + 1, num_output_tokens=int(held) + 1)
    assert order.running_rank(later, 1.0).key < ranks[0].key


def select(step: PoolStep, policy: BoundedBypass) -> list[str]:
    room = room_of(step)
    policy.select(step, room)
    return room.admit


def test_one_that_does_not_fit_is_passed_for_two_seconds_and_then_holds_the_others_up() -> None:
    waiting = tuple(view(name, prompt=16) for name in ("large", "small"))
    step = PoolStep(
        queue=waiting, running=(view("runs", num_computed_tokens=100),), blocks={"large": 60, "small": 1}, free=50
    )
    policy = BoundedBypass()
    assert select(step, policy) == ["small"]
    step.now = 1.9
    assert select(step, policy) == ["small"]
    step.now = 2.1
    assert select(step, policy) == []


def test_clocks_of_who_still_waits_go_on_however_many_were_passed_and_left() -> None:
    """Of others nobody knows: a queue that turned over in the meantime must not start them anew."""
    runs = (view("runs", num_computed_tokens=100),)
    step = PoolStep(queue=(view("large", prompt=16),), running=runs, blocks={"large": 60}, free=50)
    policy = BoundedBypass()
    select(step, policy)
    for turn in range(100):
        crowd = tuple(view(f"p{turn}-{n}", prompt=16) for n in range(20))
        blocks = {each.req_id: 60 for each in crowd} | {"large": 60}
        # The large one is behind so many that none of these steps gets to it.
        select(PoolStep(queue=(*crowd, *step.queue), running=runs, blocks=blocks, free=50, memo=step.memo), policy)
    assert len(step.memo["passing.since"]) < 2 * 256
    step.now, step.queue = 2.1, (*step.queue, view("small", prompt=16))
    assert select(step, policy) == [], "it was passed for two seconds"


def test_no_more_than_so_many_are_passed_in_a_step() -> None:
    waiting = tuple(view(f"r{number}", prompt=16) for number in range(5))
    blocks = {f"r{number}": 60 for number in range(4)} | {"r4": 1}
    step = PoolStep(queue=waiting, running=(view("runs", num_computed_tokens=100),), blocks=blocks, free=50)
    assert select(step, BoundedBypass(max_passed=4)) == ["r4"]
    assert select(step, BoundedBypass(max_passed=3)) == []


def test_blocks_are_kept_for_those_who_run() -> None:
    assert BoundedBypass().device_reserve == 0.05
    assert BoundedBypass(kv_reserve=0.02).device_reserve == 0.02
