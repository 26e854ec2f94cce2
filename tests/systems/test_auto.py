"""The policies of `auto`: those of `alise` until an objective presses, and who leaves for whom then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool_step import PoolStep, select
from vllm_ext.contract import AgeLimit, RequestView, Server, StepStats
from vllm_ext.contract.aging import AGED_RANK
from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.contract.objective import NO_SLO, Slo
from vllm_ext.contract.slack import at_stake
from vllm_ext.systems.alise import BoundedBypass, CostOverWait
from vllm_ext.systems.auto import BypassOrPreempt, UrgentFirst
from vllm_ext.systems.past_future import PeakMemory

STEP_STATS = StepStats(step_s=0.05, longest_step_s=0.1, chunk_tokens=1000.0)
SERVER = Server(max_num_seqs=10, kv_tokens=1000, prefill_steps=0.02)
CHAT = Slo(ttft_s=10.0, tbt_s=0.5)


def waiting(name: str = "w", prompt: int = 100, *, length: int = 50, slo: Slo = NO_SLO, **fields: Any) -> RequestView:
    values = {
        "waiting_since": 100.0,
        "step_stats": STEP_STATS,
        "max_tokens": 500,
        "predicted_output_tokens": length,
        **fields,
    }
    return RequestView(
        name, 100.0, prompt, slo=slo, distribution=LengthDistribution.point(length), server=SERVER, **values
    )


def running(name: str = "r", computed: int = 100, *, prompt: int = 100, **fields: Any) -> RequestView:
    values = {"num_computed_tokens": computed, "num_output_tokens": max(0, computed - prompt + 1), **fields}
    return waiting(name, prompt, waiting_since=None, **values)


def step_of(*queue: RequestView, running: tuple[RequestView, ...] = (), now: float = 100.0, **fields: Any) -> PoolStep:
    """A step in which `UrgentFirst` has ranked everybody."""
    policy = UrgentFirst()
    ranks = {r.req_id: (policy.running_rank if r in running else policy.rank)(r, now) for r in (*queue, *running)}
    ordered = sorted(ranks, key=lambda name: (ranks[name].key, policy.ageing.score(ranks[name].cost, now - 100.0)))
    place = {name: float(number) for number, name in enumerate(ordered)}
    first, best = (sorted(group, key=lambda r: place[r.req_id]) for group in (queue, running))
    pressing = frozenset(name for name, rank in ranks.items() if rank.presses)
    aged = frozenset(name for name, rank in ranks.items() if rank.older_only_s <= now)
    values = {
        "token_budget": 500,
        "step_stats": STEP_STATS,
        "keys": place,
        "pressing": pressing,
        "aged": aged,
        "now": now,
        **fields,
    }
    return PoolStep(queue=tuple(first), running=tuple(best), **values)


def order(*requests: RequestView, now: float = 100.0) -> list[str]:
    return [r.req_id for r in step_of(*requests, now=now).queue]


@given(
    prompt=st.integers(1, 4000),
    length=st.integers(1, 2000),
    preempted=st.integers(0, 2),
    computed=st.integers(0, 5000),
    now=st.floats(100.0, 3000.0),
)
def test_without_objectives_it_ranks_exactly_as_alise(
    prompt: int, length: int, preempted: int, computed: int, now: float
) -> None:
    auto, alise = UrgentFirst(), CostOverWait()
    assert auto.ageing == alise.ageing
    waits = waiting(prompt=prompt, length=length, num_preemptions=preempted)
    ours, theirs = auto.rank(waits, now), alise.rank(waits, now)
    assert (ours.key[1:], ours.cost, ours.presses) == (theirs.key, theirs.cost, False)
    runs = running(computed=computed, prompt=prompt)
    ours_running, theirs_running = auto.running_rank(runs, now), alise.running_rank(runs, now)
    assert ours_running.key[1:] == theirs_running.key
    assert ours_running[1:4] == theirs_running[1:4]
    assert ours_running.key < ours.key, "nobody who runs leaves for one who does not press"
    others = auto.rank(waiting(), now), auto.running_rank(running(), now)
    assert (ours.key[0], ours_running.key[0]) == (others[0].key[0], others[1].key[0])


def test_an_objective_counts_once_it_presses_and_no_more_when_it_is_lost() -> None:
    policy = UrgentFirst(horizon_s=2.0)
    request = waiting("slo", slo=CHAT, length=400, prefill_s=0.5)
    early = policy.rank(request, 100.0)
    assert not early.presses
    assert early.until_s == pytest.approx(107.9)
    pressing = policy.rank(request, early.until_s)
    assert pressing.presses
    assert pressing.until_s == pytest.approx(109.5)
    lost = policy.rank(request, pressing.until_s)
    assert (lost.presses, lost.key, lost.cost) == (False, early.key, early.cost)
    short = waiting("short", 1, length=1)
    assert order(request, short, now=100.0) == ["short", "slo"]
    assert order(request, short, now=108.0) == ["slo", "short"]
    assert order(request, short, now=110.0) == ["short", "slo"]


def test_those_who_press_go_by_the_time_left() -> None:
    tight, loose = waiting("tight", slo=Slo(ttft_s=3.0)), waiting("loose", 1, length=1, slo=Slo(ttft_s=4.0))
    assert order(loose, waiting("other"), tight) == ["tight", "loose", "other"]


def test_only_an_objective_that_can_still_be_missed_is_at_stake() -> None:
    """A gap between tokens can't be too long before the first token, and the first token comes once."""
    tbt, ttft = waiting(slo=Slo(tbt_s=0.5), prefill_s=0.1), waiting(slo=Slo(ttft_s=10.0))
    assert at_stake(tbt, 100.0) is None
    back = tbt._replace(num_output_tokens=3)
    assert at_stake(back, 100.0) == pytest.approx((100.4, 100.4))
    assert at_stake(back, 100.4) is None, "the gap is too long already"
    assert at_stake(ttft, 100.0) == pytest.approx((109.9, 110.0))
    assert at_stake(ttft._replace(num_output_tokens=3), 100.0) is None
    assert at_stake(ttft._replace(missed=True), 100.0) is None
    job = waiting(slo=Slo(e2e_s=60.0, tbt_s=0.5), length=9, predicted_remaining_s=1.0)
    left = at_stake(job, 100.0)
    assert left is not None
    assert left.lost_at == pytest.approx(159.0)
    assert left.start_by > 105.0, "no TTFT stands in"


def test_those_without_an_objective_leave_first_least_computed_first_and_then_whoever_has_most_time() -> None:
    runs = (
        running("little", 120),
        running("much", 900),
        running("lost", 300, slo=CHAT, missed=True),
        running("answered", 500, slo=Slo(ttft_s=1.0)),
        running("slow", 110, slo=Slo(tbt_s=2.0)),
        running("fast", 110, slo=Slo(tbt_s=0.2)),
    )
    step = step_of(running=runs)
    left = [victim.request.req_id for victim in step.victims()]
    assert left == ["little", "lost", "answered", "much", "slow", "fast"]


def test_a_running_rank_is_asked_for_again_at_the_first_token_and_after_a_quarter_octave() -> None:
    policy = UrgentFirst()
    prefills = running("r", 50, slo=Slo(ttft_s=10.0))
    assert policy.running_rank(prefills, 100.0).until_tokens == 1
    decodes = policy.running_rank(running("r", 128), 100.0)
    octave = 2 ** (29 / 4)
    assert decodes.until_tokens == pytest.approx(29 + octave - 128, abs=1)


def test_one_that_waits_for_its_turn_as_the_oldest_is_not_passed() -> None:
    assert UrgentFirst(age_limit_s=20.0, aged_share=0.5).age_limit == AgeLimit(20.0, 0.5)
    request, presses = waiting("old", 400), waiting("presses", 10, slo=Slo(ttft_s=20.5))
    assert UrgentFirst().rank(presses, 119.0).key > AGED_RANK.key
    step = step_of(presses, request, running=(running(),), free=20)
    assert select(BypassOrPreempt(preempt=False), step).admit == ["presses"]
    aged = replace(step, queue=(request, presses), aged=frozenset({"old"}))
    assert select(BypassOrPreempt(preempt=False), aged).admit == []


def test_for_who_presses_the_least_computed_without_an_objective_leave() -> None:
    runs = tuple(running(f"r{n}", 200 + 100 * n, length=400, predicted_remaining_s=9.0) for n in range(3))
    chat = waiting("chat", 300, length=1, slo=Slo(ttft_s=1.0))
    step = step_of(chat, running=runs, free=0)
    room = select(BypassOrPreempt(), step)
    assert (room.admit, room.preempt) == (["chat"], ["r0", "r1"]), "13 and 19 blocks for 19"
    for policy in (BypassOrPreempt(preempt=False), BoundedBypass()):
        assert select(policy, step).admit == []


@pytest.mark.parametrize(
    ("why", "slo", "fields", "now"),
    [
        ("no objective", NO_SLO, {}, 100.0),
        ("does not press yet", Slo(ttft_s=30.0), {}, 100.0),
        ("lost", Slo(ttft_s=1.0), {"prefill_s": 0.5}, 101.0),
        ("missed before", Slo(ttft_s=1.0), {"missed": True}, 100.0),
        ("waited too long", NO_SLO, {"waited_s": 4000.0}, 100.0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nobody_leaves_for_one_whose_objective_does_not_press(
    why: str, slo: Slo, fields: dict[str, Any], now: float
) -> None:
    runs = (running(computed=300, length=400, predicted_remaining_s=9.0),)
    request = waiting("w", 100, length=1, slo=slo, **fields)
    assert select(BypassOrPreempt(), step_of(request, running=runs, free=0, now=now)).admit == [], why
    pressing = waiting("w", 100, length=1, slo=Slo(ttft_s=1.0))
    assert select(BypassOrPreempt(), step_of(pressing, running=runs, free=0)).preempt == ["r"], "or nothing is shown"


def test_nobody_leaves_whose_own_objective_can_be_kept_nor_who_outlived_its_estimate() -> None:
    chat = waiting("chat", 100, length=1, slo=Slo(ttft_s=0.2))
    runs = running("r", 300, length=400, predicted_remaining_s=9.0, slo=Slo(tbt_s=5.0))
    assert select(BypassOrPreempt(), step_of(chat, running=(runs,), free=0)).preempt == []
    lost = runs._replace(missed=True)
    assert select(BypassOrPreempt(), step_of(chat, running=(lost,), free=0)).preempt == ["r"]
    old = lost._replace(num_demotions=1)
    assert select(BypassOrPreempt(), step_of(chat, running=(old,), free=0)).preempt == []
    assert select(BypassOrPreempt(spare_outlived=False), step_of(chat, running=(old,), free=0)).preempt == ["r"]


def test_whom_others_leave_for_must_pass_the_gates_of_a_composition() -> None:
    runs = (running(computed=300, length=400, max_tokens=400, predicted_remaining_s=9.0),)
    chat = waiting("chat", 100, length=1, slo=Slo(ttft_s=1.0), max_tokens=1400)
    step = step_of(chat, running=runs, total=80, free=0, max_model_len=4096)
    assert select(BypassOrPreempt(), step, PeakMemory()).why == {"chat": "peak_memory"}
    assert select(BypassOrPreempt(), step).preempt == ["r"]


def test_one_who_presses_holds_nobody_up_and_others_do_after_a_while() -> None:
    small = waiting("small", 16)
    for large, admitted in (
        (waiting("large", 400, length=1, slo=Slo(ttft_s=5.0)), ["small"]),
        (waiting("large", 400, length=1), []),
    ):
        step = step_of(large, small, running=(running(),), free=10)
        step = replace(step, queue=(large, small), memo={"passing.since": {"large": 90.0}})
        assert select(BypassOrPreempt(preempt=False), step).admit == admitted
