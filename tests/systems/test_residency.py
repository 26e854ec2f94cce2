"""What becomes of the KV of a preempted request, worked by hand."""

from __future__ import annotations

import pytest

from tests.support.pool_step import PoolStep, room_of
from vllm_ext.contract import Candidate, Demand, KvDisposition, PreemptionCost, RequestView
from vllm_ext.systems.alise import EstimatedWait, Preemptive
from vllm_ext.systems.pensieve import Retention
from vllm_ext.systems.upstream import InOrder, Recompute


def victim(recompute_s: float) -> RequestView:
    return RequestView("victim", 0.0, 100, recompute_s=recompute_s)


@pytest.mark.parametrize(
    ("wait_s", "reuse_s", "recompute_s", "disposition"),
    [
        (1.0, 2.0, 9.0, KvDisposition.KEEP),  # back before its blocks are taken
        (2.0, 2.0, 9.0, KvDisposition.SWAP),  # 0.3 + 0.2 s of copies against 9 s
        (2.0, 2.0, 0.51, KvDisposition.SWAP),
        (2.0, 2.0, 0.5, KvDisposition.RECOMPUTE),
    ],
)
def test_the_cheapest_way_is_chosen(
    wait_s: float, reuse_s: float, recompute_s: float, disposition: KvDisposition
) -> None:
    cost = PreemptionCost(wait_s=wait_s, reuse_s=reuse_s, out_s=0.3, back_s=0.2)
    assert EstimatedWait().on_preempt(victim(recompute_s), cost) is disposition


def test_a_copy_hidden_behind_computation_costs_nothing() -> None:
    cost = PreemptionCost(wait_s=2.0, out_s=0.3, back_s=0.2)
    assert EstimatedWait(exposed=0.0).on_preempt(victim(0.21), cost) is KvDisposition.SWAP
    assert EstimatedWait(exposed=0.0).on_preempt(victim(0.2), cost) is KvDisposition.RECOMPUTE


def test_strategies_that_do_not_weigh_costs() -> None:
    dear, soon = PreemptionCost(wait_s=2.0, out_s=9.0, back_s=9.0), PreemptionCost(wait_s=1.0, reuse_s=2.0)
    assert EstimatedWait(choose="swap").on_preempt(victim(0.1), dear) is KvDisposition.SWAP
    assert EstimatedWait(choose="swap").on_preempt(victim(0.1), soon) is KvDisposition.KEEP
    assert EstimatedWait(choose="recompute").on_preempt(victim(9.0), soon) is KvDisposition.RECOMPUTE


def test_without_a_tier_everything_is_recomputed() -> None:
    assert EstimatedWait().on_preempt(victim(1e6), PreemptionCost(wait_s=0.0)) is KvDisposition.RECOMPUTE


@pytest.mark.parametrize(
    ("copies", "disposition", "load"),
    [("paying", KvDisposition.KEEP, "auto"), ("all", KvDisposition.SWAP, "in-step")],
    ids=["ours", "paper"],
)
def test_a_suspended_request_s_kv_stays_until_its_blocks_are_needed_or_is_copied_at_once(
    copies: str, disposition: KvDisposition, load: str
) -> None:
    policy = Retention(copies=copies)
    assert policy.on_preempt(victim(1e-9), PreemptionCost(wait_s=9.0, out_s=9.0, back_s=9.0)) is disposition
    assert (policy.tier_options["copies"], policy.tier_options["load"]) == (copies, load)


def test_vllms_own_rule_leaves_it_to_the_tier() -> None:
    assert Recompute().on_preempt(victim(1e-9), PreemptionCost(wait_s=9.0, out_s=9.0, back_s=9.0)) is KvDisposition.SWAP


def step_of(waiting: dict[str, int], running: dict[str, int], free: int) -> PoolStep:
    """By the blocks of each; requests rank by their numbers: w1 before r2."""
    blocks = waiting | running
    keys = {name: float(name[1:]) for name in blocks}
    queue, run = (
        tuple(RequestView(name, 0.0, 1, 0, computed) for name in sorted(names, key=keys.__getitem__))
        for names, computed in ((waiting, 0), (running, 1))
    )
    return PoolStep(queue=queue, running=run, blocks=blocks, keys=keys, free=free)


@pytest.mark.parametrize(
    ("waiting", "free", "leaving"),
    [
        ({"w1": 3}, 3, ()),  # there is room
        ({"w1": 3}, 2, ("r9",)),
        ({"w1": 9}, 2, ("r9", "r8")),  # 4 blocks each
        ({"w1": 3, "w2": 4}, 2, ("r9", "r8")),
        ({"w8": 3}, 0, ("r9",)),  # r8 is older, and stays
        ({"w10": 3}, 0, ()),  # everybody who runs goes before it
        ({"w1": 30}, 0, ("r9", "r8", "r7", "r6")),  # no more than four at a time
        ({}, 0, ()),
    ],
)
def test_who_will_be_pushed_out_is_seen_before(waiting: dict[str, int], free: int, leaving: tuple[str, ...]) -> None:
    running = dict.fromkeys(("r3", "r4", "r5", "r6", "r7", "r8", "r9"), 4)
    step = step_of(waiting, running, free)
    assert EstimatedWait().leaving_soon(step, room_of(step)) == leaving
    assert step.num_victims_shown <= 1 + len(leaving)


@pytest.mark.parametrize("policy", [EstimatedWait(ahead=False), EstimatedWait(choose="recompute"), Recompute()])
def test_nobody_is_copied_ahead_where_that_is_not_wanted(policy: EstimatedWait | Recompute) -> None:
    step = step_of({"w1": 9}, {"r2": 4}, 0)
    assert policy.leaving_soon(step, room_of(step)) == ()


def test_who_joined_in_this_step_is_counted_and_who_leaves_in_it_is_not_named() -> None:
    """w1 takes 9 of 10 blocks, so that w2 lacks 4; where w2 has r9's place already, nobody has to leave."""
    step = step_of({"w1": 9, "w2": 5}, {"r8": 4, "r9": 4}, 10)
    room = room_of(step)
    price = room.price

    def priced(each: Candidate, tokens: int) -> Demand:
        """As the scheduler does: what a request that joined has cached is held, by itself."""
        demand = price(each, tokens)
        return demand._replace(blocks=1) if each.request.req_id in room.admit else demand

    room.price = priced
    InOrder().select(step, room)
    assert (room.admit, EstimatedWait().leaving_soon(step, room)) == (["w1"], ("r9",))
    room = room_of(step)
    Preemptive(priced=False).select(step, room)
    assert (room.preempt, EstimatedWait().leaving_soon(step, room)) == (["r9"], ())
