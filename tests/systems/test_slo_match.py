"""AccelGen's selection: Algorithms 1 and 2 by hand, exclusive long prompts, urgent requests and whom they push out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.pool_step import PoolStep, half_done, select
from vllm_ext.contract import GatePolicy, RequestView, StepStats
from vllm_ext.contract.objective import Slo
from vllm_ext.step_time.runtime import Pivot, RuntimeModel
from vllm_ext.systems.accelgen import SloMatch
from vllm_ext.systems.baselines import WholePrompts

NOW = 100.0
STEP_STATS = StepStats(step_s=0.1, longest_step_s=0.1, chunk_tokens=1000.0)


def waiting(name: str, prompt: int, *, left_s: float = 5.0, **fields: Any) -> RequestView:
    """A request that must run within ``left_s``."""
    ttft = Slo(ttft_s=left_s + STEP_STATS.longest_step_s * -(-prompt // 1000))
    return RequestView(name, NOW, prompt, waiting_since=NOW, step_stats=STEP_STATS, slo=ttft, max_tokens=100, **fields)


def running(name: str, *, tbt_s: float = 0.2, **fields: Any) -> RequestView:
    return RequestView(name, 0.0, 10, 50, 60, max_tokens=100, step_stats=STEP_STATS, slo=Slo(tbt_s=tbt_s), **fields)


def step_of(*queue: RequestView, compute: int = 1000, free: int = 100, seats: int = 8, **fields: Any) -> PoolStep:
    """A step with so much room; the saturated step is the whole budget, and who decodes holds 10 blocks."""
    run: tuple[RequestView, ...] = fields.get("running", ())
    blocks = {r.req_id: 10 for r in run if r.num_output_tokens} | fields.pop("blocks", {})
    return PoolStep(
        queue=queue,
        total=1000,
        free=free,
        blocks=blocks,
        max_running=seats + len(run),
        token_budget=compute + len(run),
        step_stats=STEP_STATS,
        runtime=RuntimeModel(pivot=Pivot(compute + len(run), 0.1875)),
        now=NOW,
        max_model_len=100_000,
        **fields,
    )


def joins(policy: SloMatch, step: PoolStep, *gates: GatePolicy) -> set[str]:
    return set(select(policy, step, *gates).admit)


def pushes_out(policy: SloMatch, step: PoolStep) -> list[str]:
    return select(policy, step).preempt


def test_of_four_requests_those_that_fill_both_resources_join() -> None:
    """1000 tokens to compute, 70 blocks (1120 tokens). Distances to what is left, by hand:

    a (300, 304), b (700, 704), c (250, 800), d (900, 912): d is nearest (100, 208), then nothing but a
    fits what is left (100, 208), cut to 100 tokens.
    """
    a, b, c, d = waiting("a", 300), waiting("b", 700), waiting("c", 250), waiting("d", 900)
    step = step_of(a, b, c, d, free=70, blocks={"c": 50})
    assert joins(SloMatch(), step) == {"d"}, "a's 304 tokens of memory do not fit into 208"
    # 1280 tokens of memory: d first (100, 368); of the rest a (304 of memory) alone fits.
    assert joins(SloMatch(), replace(step, free=80)) == {"d", "a"}
    assert joins(SloMatch(match=False), step) == {"a", "b"}, "the queue's order leaves 0 and 112"


def test_what_shares_a_prefix_with_who_was_taken_is_priced_again() -> None:
    """12 blocks are free; each needs 10, of which 9 are the same."""
    step = step_of(*[waiting(f"w{i}", 160) for i in range(4)], free=12, running=(running("r"),), common_blocks=9)
    assert joins(SloMatch(), step) == {"w0", "w1", "w2"}
    assert len(joins(SloMatch(), replace(step, common_blocks=0))) == 1


def test_where_nothing_runs_one_that_fits_is_taken_before_one_that_does_not() -> None:
    """b takes all tokens and 63 of 60 blocks: vLLM can't start it, and nobody else was offered."""
    assert joins(SloMatch(), step_of(waiting("a", 300), waiting("b", 1000), free=60)) == {"a"}


def test_only_requests_close_to_the_first_compete() -> None:
    step = step_of(waiting("a", 100), waiting("late", 1000, left_s=5.8), compute=1000, free=66)
    assert joins(SloMatch(gamma_s=0.75, gamma_steps=0), step) == {"a"}
    assert joins(SloMatch(gamma_s=1.0, gamma_steps=0), step) == {"late"}


def test_close_is_a_matter_of_steps_where_they_are_short() -> None:
    """0.8 s are eight steps of 0.1 s."""
    step = step_of(waiting("a", 100), waiting("late", 1000, left_s=5.8), compute=1000, free=66)
    assert joins(SloMatch(gamma_s=1.0, gamma_steps=7), step) == {"a"}
    assert joins(SloMatch(gamma_s=1.0, gamma_steps=9), step) == {"late"}
    assert joins(SloMatch(gamma_s=0.75, gamma_steps=9), step) == {"a"}, "never more than gamma_s"


def test_who_could_be_met_only_by_a_step_of_its_own_is_lost() -> None:
    """Its prompt takes 0.15 s alone, and 0.18 s are left; a mean step takes 0.1 s."""
    late = waiting("late", 100, left_s=0.08, prefill_s=0.15)
    begun = waiting("r", 100, left_s=50.0)._replace(waiting_since=None)
    step = step_of(late, waiting("a", 100), seats=0, running=(begun,))
    assert pushes_out(SloMatch(), step) == []
    assert pushes_out(SloMatch(lost_steps=0), step) == ["r"], "urgent, and not lost for certain"


def test_a_long_prompt_is_cut_to_what_is_left_unless_a_gate_wants_it_whole() -> None:
    step = step_of(waiting("long", 501), compute=500, free=60)
    busy = replace(step, running=(running("r"),), token_budget=501)
    assert joins(SloMatch(), step) == joins(SloMatch(), busy) == {"long"}
    assert select(SloMatch(), busy, WholePrompts()).why == {"long": "whole_prompts"}
    assert joins(SloMatch(), step, WholePrompts()) == {"long"}, "alone it is admitted whatever it needs"


def test_a_long_prompt_may_wait_until_the_request_before_is_completed() -> None:
    answers = RequestView("answers", 0.0, 600, 50, 601, max_tokens=100, step_stats=STEP_STATS)
    queue = waiting("long", 600), waiting("short", 90)
    step = step_of(*queue, running=(answers,), compute=3000)
    assert joins(SloMatch(long_prompt_tokens=500), step) == {"long", "short"}
    assert joins(SloMatch(long_prompt_tokens=500, exclusive_to_end=True), step) == {"short"}
    assert joins(SloMatch(long_prompt_tokens=600, exclusive_to_end=True), step) == {"long", "short"}


def test_one_long_prompt_at_a_time() -> None:
    prefills = half_done(600, 200, step_stats=STEP_STATS)
    queue = waiting("long", 600), waiting("short", 90)
    policy = SloMatch(long_prompt_tokens=500)
    busy = step_of(*queue, running=(prefills,))
    assert joins(policy, busy) == {"short"}
    free = step_of(*queue, waiting("long too", 600), compute=3000)
    assert len(joins(policy, free) & {"long", "long too"}) == 1
    assert joins(SloMatch(long_prompt_tokens=500, exclusive=False), free) == {"long", "short", "long too"}


def test_an_urgent_long_prompt_starts_beside_another_only_as_published() -> None:
    """Two of them in a step make each other late: goodput of a 70B model under overload was 0.4 of what it is now."""
    prefills, policy = half_done(600, 200, step_stats=STEP_STATS), SloMatch(long_prompt_tokens=500)
    urgent = step_of(waiting("long", 600, left_s=0.05), running=(prefills,))
    assert joins(policy, urgent) == set()
    full = step_of(waiting("long", 600, left_s=0.05), running=(prefills, running("r", tbt_s=0.9)), seats=0)
    assert pushes_out(replace(policy, spare=False), full) == []
    assert pushes_out(replace(policy, spare=False, exclusive_urgent=False), full) == ["r"]
    assert joins(SloMatch(long_prompt_tokens=500, exclusive_urgent=False), urgent) == {"long"}
    aged = replace(urgent, queue=(*urgent.queue, waiting("short", 90)), aged=frozenset({"long"}))
    assert joins(policy, aged) == {"short"}, "an aged one waits for the gap too, or a crowd of them left none to others"
    assert joins(policy, replace(aged, running=())) == {"long", "short"}


def test_long_prompts_that_stay_out_hold_up_nobody_of_their_priority() -> None:
    """Who is due seconds later would not compete with the first one, which can't start."""
    prefills, policy = half_done(600, 200, step_stats=STEP_STATS), SloMatch(long_prompt_tokens=500)
    longs = [waiting(f"long {number}", 600, left_s=1.0) for number in range(3)]
    step = step_of(*longs, waiting("short", 90, left_s=30.0), running=(prefills,))
    assert joins(policy, step) == joins(replace(policy, match=False), step) == {"short"}
    assert joins(policy, replace(step, running=())) == {"long 0"}
    later = waiting("batch", 90, left_s=30.0, priority=1)
    assert joins(policy, replace(step, queue=(*longs, later))) == set(), "a higher priority waits"
    assert joins(policy, replace(step, queue=(later, waiting("long", 600, priority=2)))) == {"batch"}
    first = waiting("first", 600, priority=-1)
    assert joins(policy, replace(step, queue=(first,))) == {"first"}, "it does not wait for one of a lower priority"


def test_several_urgent_long_prompts_start_one_at_a_time() -> None:
    longs = [waiting(f"long {number}", 600, left_s=0.05) for number in range(3)]
    policy, step = SloMatch(long_prompt_tokens=500), step_of(*longs, compute=3000, free=200)
    assert joins(policy, step) == {"long 0"}
    assert joins(replace(policy, exclusive_urgent=False), step) == {"long 0", "long 1", "long 2"}
    mixed = replace(step, queue=(longs[0], waiting("patient", 600), waiting("short", 90)))
    assert joins(policy, mixed) == {"long 0", "short"}
    ranks = replace(step, queue=(waiting("first", 600), waiting("second", 600, priority=1)))
    assert joins(policy, ranks) == {"first"}, "nor two of different priorities"


def test_of_long_prompts_that_are_computed_that_of_the_best_priority_decides() -> None:
    prefills = (half_done(600, 200, step_stats=STEP_STATS, priority=3), half_done(600, 100, step_stats=STEP_STATS))
    step = step_of(waiting("long", 600, priority=1), running=prefills, compute=3000)
    assert joins(SloMatch(long_prompt_tokens=500), step) == set()


def test_who_had_begun_to_answer_comes_back_beside_a_long_prompt() -> None:
    """It has all its tokens to compute again, but is no new long prompt: it waited for the rest of a stranger's."""
    prefills = half_done(600, 200, step_stats=STEP_STATS)
    back = waiting("back", 20)._replace(num_output_tokens=600, num_preemptions=1)
    assert joins(SloMatch(long_prompt_tokens=500), step_of(back, running=(prefills,))) == {"back"}


def test_who_is_long_is_remembered_until_it_joins_or_for_64_steps() -> None:
    prefills, policy = half_done(600, 200, step_stats=STEP_STATS), SloMatch(long_prompt_tokens=500)
    long = waiting("long", 600)
    memo: dict[str, Any] = {}
    busy = step_of(long, running=(prefills,), memo=memo)
    assert joins(policy, busy) == set()
    cached = replace(busy, queue=(long._replace(cached_tokens=300),))
    assert joins(policy, replace(cached, number=63)) == set()
    assert joins(policy, replace(cached, number=64)) == {"long"}, "it is not long any more: a prefix has come"


def test_no_more_than_so_many_are_passed() -> None:
    prefills = half_done(600, 200, step_stats=STEP_STATS)
    longs = [waiting(f"long {number}", 600) for number in range(5)]
    step = step_of(*longs, waiting("short", 90), running=(prefills,))
    assert joins(SloMatch(long_prompt_tokens=500, look_past=5), step) == set()
    assert joins(SloMatch(long_prompt_tokens=500, look_past=6), step) == {"short"}


AS_PUBLISHED = SloMatch(spare=False)
"""Pushes out whoever has most time left, even in the middle of an answer."""


def test_an_urgent_request_pushes_out_who_has_most_time_left() -> None:
    run = running("fast", tbt_s=0.15), running("slow", tbt_s=0.9)
    step = step_of(waiting("now", 160, left_s=0.05), waiting("later", 160), seats=0, running=run)
    room = select(AS_PUBLISHED, step)
    assert (room.preempt, room.admit) == (["slow"], ["now"])
    memory = step_of(waiting("now", 160, left_s=0.05), free=0, running=run)
    assert pushes_out(AS_PUBLISHED, memory) == ["slow"]
    assert pushes_out(SloMatch(spare=False, preempt=False), memory) == []


def test_nobody_is_pushed_out_in_vain_or_again_before_it_got_on() -> None:
    run = running("fast", tbt_s=0.15), running("slow", tbt_s=0.9)
    large = step_of(waiting("now", 1600, left_s=0.05), free=0, running=run, blocks={"slow": 3})
    assert pushes_out(AS_PUBLISHED, large) == [], "13 blocks are less than the 100 it needs"
    two = step_of(waiting("now", 320, left_s=0.01), free=0, running=run)
    assert pushes_out(AS_PUBLISHED, two) == ["slow", "fast"]
    assert pushes_out(SloMatch(spare=False, max_victims=1), two) == []
    again = step_of(
        waiting("now", 160, left_s=0.05),
        seats=0,
        running=(running("slow", tbt_s=0.9, num_preemptions=1, progress_tokens=3),),
    )
    assert pushes_out(AS_PUBLISHED, again) == []
    assert pushes_out(SloMatch(spare=False, min_progress_tokens=3), again) == ["slow"]


def nobody_moves(policy: SloMatch, step: PoolStep) -> bool:
    room = select(policy, step)
    return not room.admit and not room.preempt


def test_without_room_and_urgency_nothing_is_decided() -> None:
    assert nobody_moves(SloMatch(), step_of(waiting("w", 160), seats=0, running=(running("r"),)))
    assert nobody_moves(SloMatch(), step_of(running=(running("r"),)))


def test_a_lost_request_pushes_nobody_out_however_old_it_is() -> None:
    lost = waiting("lost", 160, left_s=0.05, prefill_s=60.0)
    step = step_of(lost, seats=0, running=(running("slow", tbt_s=0.9),))
    assert nobody_moves(AS_PUBLISHED, step)
    assert nobody_moves(AS_PUBLISHED, replace(step, aged=frozenset({"lost"})))
    assert select(SloMatch(spare=False, lost_urgent=True), step).preempt == ["slow"], "as published"


def test_who_has_begun_to_answer_is_left_alone() -> None:
    answers = running("answers", tbt_s=0.9)
    prefills = half_done(600, 200, step_stats=STEP_STATS, slo=Slo(ttft_s=900.0))
    step = step_of(waiting("now", 160, left_s=0.05), seats=0, running=(prefills, answers))
    assert pushes_out(SloMatch(), step) == ["p"]
    assert pushes_out(AS_PUBLISHED, step) == ["answers"], "the last of those who run"


def test_nobody_passes_an_aged_request_that_finds_no_room() -> None:
    step = step_of(waiting("old", 1600), waiting("small", 16), free=5, running=(running("r"),), blocks={"r": 3})
    assert joins(SloMatch(), replace(step, aged=frozenset({"old"}))) == set()
    assert joins(SloMatch(), step) == {"small"}
