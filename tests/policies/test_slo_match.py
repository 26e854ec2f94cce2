"""AccelGen's selection: Algorithms 1 and 2 by hand, exclusive long prompts, urgent requests and whom they push out."""

from __future__ import annotations

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.slo_match import SloMatch
from vllm_ext.prediction.runtime import Pivot
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import Pace, RequestView
from vllm_ext.slo import Slo

from .pool_step import PoolStep

NOW = 100.0
PACE = Pace(step_s=0.1, longest_step_s=0.1, chunk_tokens=1000.0)


def waiting(name: str, prompt: int, *, left_s: float = 5.0, **fields: object) -> RequestView:
    """A request that must run within ``left_s``."""
    ttft = Slo(ttft_s=left_s + PACE.longest_step_s * -(-prompt // 1000))
    values = {"waiting_since": NOW, "pace": PACE, "slo": ttft, "num_blocks": -(-prompt // 16), "max_tokens": 100}
    return RequestView(name, NOW, prompt, **{**values, **fields})


def running(name: str, *, tbt_s: float = 0.2, blocks: int = 10, tokens: int = 50, **fields: object) -> RequestView:
    return RequestView(
        name, 0.0, 10, tokens, 10 + tokens, max_tokens=100, pace=PACE, slo=Slo(tbt_s=tbt_s), num_blocks=blocks, **fields
    )


def step_of(*queue: RequestView, compute: int = 1000, blocks: int = 100, seats: int = 8, **fields: object) -> PoolStep:
    """A step with so much room; the saturated step is the whole budget."""
    run: tuple[RequestView, ...] = fields.pop("running", ())  # type: ignore[assignment]
    return PoolStep(
        queue=queue,
        running=run,
        bounds=(100,) * len(run),
        num_total_blocks=1000,
        num_free_blocks=blocks,
        max_running=seats + len(run),
        token_budget=compute + len(run),
        pace=PACE,
        pivot=Pivot(compute + len(run), 0.1875),
        now=NOW,
        max_model_len=100_000,
        **fields,
    )


def joins(plan: AdmissionPlan, step: PoolStep) -> set[str]:
    assert plan.max_running is not None
    free = [r.req_id for r in step.queue if r.req_id not in plan.hold]
    seats = plan.max_running - step.num_running + len(plan.preempt)
    return set(free[:seats])  # vLLM takes them in the order of the queue


def test_of_four_requests_those_that_fill_both_resources_join() -> None:
    """1000 tokens to compute, 70 blocks (1120 tokens). Distances to what is left, by hand:

    a (300, 304), b (700, 704), c (250, 800), d (900, 912): d is nearest (100, 208), then nothing but a
    fits what is left (100, 208), cut to 100 tokens.
    """
    a, b, d = waiting("a", 300), waiting("b", 700), waiting("d", 900)
    c = waiting("c", 250, num_blocks=50)
    step = step_of(a, b, c, d, blocks=70)
    assert joins(SloMatch().plan(step), step) == {"d"}, "a's 304 tokens of memory do not fit into 208"
    more = step_of(a, b, c, d, blocks=80)
    # 1280 tokens of memory: d first (100, 368); of the rest a (304 of memory) alone fits.
    assert joins(SloMatch().plan(more), more) == {"d", "a"}
    in_order = SloMatch(match=False)
    assert joins(in_order.plan(step), step) == {"a", "b"}, "the queue's order leaves 0 and 112"


def test_only_requests_close_to_the_first_compete() -> None:
    step = step_of(waiting("a", 100), waiting("late", 1000, left_s=5.8), compute=1000, blocks=66)
    assert joins(SloMatch(gamma_s=0.75, gamma_steps=0).plan(step), step) == {"a"}
    assert joins(SloMatch(gamma_s=1.0, gamma_steps=0).plan(step), step) == {"late"}


def test_close_is_a_matter_of_steps_where_they_are_short() -> None:
    """0.8 s are eight steps of 0.1 s."""
    step = step_of(waiting("a", 100), waiting("late", 1000, left_s=5.8), compute=1000, blocks=66)
    assert joins(SloMatch(gamma_s=1.0, gamma_steps=7).plan(step), step) == {"a"}
    assert joins(SloMatch(gamma_s=1.0, gamma_steps=9).plan(step), step) == {"late"}
    assert joins(SloMatch(gamma_s=0.75, gamma_steps=9).plan(step), step) == {"a"}, "never more than gamma_s"


def test_who_could_be_met_only_by_a_step_of_its_own_is_lost() -> None:
    """Its prompt takes 0.15 s alone, and 0.18 s are left; a mean step takes 0.1 s."""
    late = waiting("late", 100, left_s=0.08, prefill_s=0.15)
    begun = waiting("r", 100, left_s=50.0)._replace(waiting_since=None)
    step = step_of(late, waiting("a", 100), seats=0, running=(begun,))
    assert SloMatch().plan(step).preempt == ()
    assert SloMatch(lost_steps=0).plan(step).preempt == ("r",), "urgent, and not lost for certain"


def test_a_long_prompt_is_cut_to_what_is_left() -> None:
    step = step_of(waiting("long", 900), compute=500, blocks=60)
    assert joins(SloMatch().plan(step), step) == {"long"}
    busy = step_of(waiting("long", 900), compute=500, blocks=60, running=(running("r"),))
    assert joins(SloMatch(whole_prompts=True).plan(busy), busy) == set()
    assert joins(SloMatch(whole_prompts=True).plan(step), step) == {"long"}, "alone it is admitted whatever it needs"


def test_one_long_prompt_at_a_time() -> None:
    half_done = RequestView("r", 0.0, 600, 0, 200, max_tokens=100, pace=PACE, num_blocks=38)
    queue = waiting("long", 600), waiting("short", 90)
    policy = SloMatch(long_prompt_tokens=500)
    busy = step_of(*queue, running=(half_done,), unfinished=(400,))
    assert joins(policy.plan(busy), busy) == {"short"}
    free = step_of(*queue, waiting("long too", 600), compute=3000)
    assert len(joins(policy.plan(free), free) & {"long", "long too"}) == 1
    assert joins(SloMatch(long_prompt_tokens=500, exclusive=False).plan(free), free) == {"long", "short", "long too"}
    urgent = step_of(waiting("long", 600, left_s=0.05), running=(half_done,), unfinished=(400,))
    assert joins(policy.plan(urgent), urgent) == {"long"}


AS_PUBLISHED = SloMatch(spare=False)
"""Pushes out whoever has most time left, even in the middle of an answer."""


def test_an_urgent_request_pushes_out_who_has_most_time_left() -> None:
    run = running("fast", tbt_s=0.15), running("slow", tbt_s=0.9)
    step = step_of(waiting("now", 160, left_s=0.05), waiting("later", 160), seats=0, running=run)
    plan = AS_PUBLISHED.plan(step)
    assert (plan.preempt, joins(plan, step)) == (("slow",), {"now"})
    memory = step_of(waiting("now", 160, left_s=0.05), blocks=0, running=run)
    assert AS_PUBLISHED.plan(memory).preempt == ("slow",)
    assert SloMatch(spare=False, preempt=False).plan(memory).preempt == ()


def test_nobody_is_pushed_out_in_vain_or_again_before_it_got_on() -> None:
    run = running("fast", tbt_s=0.15), running("slow", tbt_s=0.9, blocks=3)
    large = step_of(waiting("now", 1600, left_s=0.05), blocks=0, running=run)
    assert AS_PUBLISHED.plan(large).preempt == (), "13 blocks are less than the 100 it needs"
    again = step_of(
        waiting("now", 160, left_s=0.05),
        seats=0,
        running=(running("slow", tbt_s=0.9, num_preemptions=1, progress_tokens=3),),
    )
    assert AS_PUBLISHED.plan(again).preempt == ()
    assert SloMatch(spare=False, min_progress_tokens=3).plan(again).preempt == ("slow",)


def test_without_room_and_urgency_nothing_is_decided() -> None:
    step = step_of(waiting("w", 160), seats=0, running=(running("r"),))
    assert SloMatch().plan(step) == AdmissionPlan()
    assert SloMatch().plan(step_of(running=(running("r"),))) == AdmissionPlan()


def test_a_lost_request_pushes_nobody_out_however_old_it_is() -> None:
    lost = waiting("lost", 160, left_s=0.05, prefill_s=60.0)
    step = step_of(lost, seats=0, running=(running("slow", tbt_s=0.9),))
    assert SloMatch().plan(step) == AdmissionPlan()
    step.aged = frozenset({"lost"})
    assert SloMatch().plan(step).preempt == ()


def test_who_has_begun_to_answer_is_left_alone() -> None:
    answers = running("answers", tbt_s=0.9)
    prefills = RequestView(
        "prefills", 0.0, 600, 0, 200, max_tokens=100, pace=PACE, num_blocks=38, slo=Slo(ttft_s=900.0)
    )
    step = step_of(waiting("now", 160, left_s=0.05), seats=0, running=(prefills, answers), unfinished=(400,))
    assert SloMatch().plan(step).preempt == ("prefills",)
    assert AS_PUBLISHED.plan(step).preempt == ("answers",), "the last of those who run"


def test_nobody_passes_an_aged_request_that_finds_no_room() -> None:
    step = step_of(waiting("old", 1600), waiting("small", 16), blocks=5, running=(running("r", blocks=3),))
    step.aged = frozenset({"old"})
    assert joins(SloMatch().plan(step), step) == set()
    step.aged = frozenset()
    assert joins(SloMatch().plan(step), step) == {"small"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma_s", -1.0), ("gamma_steps", -1.0), ("lost_steps", -1.0), ("long_prompt_tokens", -1),
        ("min_progress_tokens", 0), ("max_victims", 0),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"admission.{field}"):
        SloMatch(**{field: value})
