"""What a step shows to policies of the running batch as a whole."""

from __future__ import annotations

import math

from vllm.v1.request import RequestStatus

from tests.support.steering import SCRIPT, Rig
from vllm_ext.contract import Candidate, Rank, RequestView, Split, Step


def seen(rig: Rig) -> Step:
    """What the budget policy is shown before the next step."""
    steps: list[Step] = []

    def look(step: Step) -> Split:
        steps.append(step)
        return Split()

    SCRIPT.split = look
    rig.scheduler.running_order.update(rig.clock())
    rig.scheduler.planner.plan(rig.clock(), len(rig.scheduler.waiting))
    SCRIPT.split = lambda step: Split()
    return steps[0]


def test_the_tightest_objective_is_that_of_all_who_run() -> None:
    """One client that names 5 s must not loosen what holds for those who name none."""
    rig = Rig("scripted")
    assert seen(rig).tbt_s(0.2) == 0.2, "nobody runs"
    rig.add("patient", length=20, tbt_slo_ms=5000)
    rig.step(2)
    assert seen(rig).tbt_s(0.2) == 5.0
    rig.add("silent", length=20)
    rig.step(2)
    assert seen(rig).tbt_s(0.2) == 0.2
    assert seen(rig).tbt_s(math.inf) == 5.0
    rig.add("hasty", length=20, tbt_slo_ms=50)
    rig.step(2)
    assert seen(rig).tbt_s(0.2) == 0.05


def test_free_tokens_are_what_decodes_their_drafts_and_prompts_leave() -> None:
    rig = Rig("scripted", max_num_batched_tokens=64, max_num_seqs=8)
    for name in "abc":
        rig.add(name, 10, length=30)
    rig.step(2)
    assert seen(rig).free_tokens == 64 - 3
    rig.add("long", 200, length=30)
    rig.step()
    assert seen(rig).free_tokens < 0, "the rest of a long prompt takes all"
    rig.step(8)
    rig.scheduler.num_spec_tokens = 3
    assert seen(rig).free_tokens == 64 - 4, "nobody drafted"
    rig.scheduler.running[0].spec_token_ids = [1, 2, 3]
    assert seen(rig).free_tokens == 64 - 4 - 3
    rig.scheduler.scheduler_config.long_prefill_token_threshold = 2
    assert seen(rig).free_tokens == 64 - 4 - 1, "vLLM cuts drafts at its bound on chunks as well"


def test_whoever_runs_either_decodes_or_has_a_half_done_prompt() -> None:
    rig = Rig("scripted", max_num_batched_tokens=64, max_num_seqs=8)
    for name, prompt in {"a": 10, "b": 10, "long": 200}.items():
        rig.add(name, prompt, length=30)
    rig.step()
    step = seen(rig)
    assert [r.req_id for r in step.decoding()] == ["a", "b"]
    assert [r.req_id for r in step.prefilling()] == ["long"]


def test_who_is_left_out_hides_nobody_behind_the_first_32() -> None:
    rig = Rig("scripted", max_num_seqs=1, num_blocks=512)
    rig.add("runs", 10, length=30)
    rig.step(2)
    for number in range(40):
        rig.add(f"long{number:02}", 20, length=30)
        rig.add(f"short{number:02}", 10, length=30)
    step = seen(rig)
    assert [one.req_id for one in step.waiting()][-1] == "short15"
    looked_at: list[str] = []

    def is_long(candidate: Candidate) -> bool:
        looked_at.append(candidate.req_id)
        return candidate.request.missing_tokens > 10

    assert next(step.waiting(is_long)).req_id == "short00"
    assert looked_at == ["long00", "short00"], "it looks no further than it is asked to"
    assert [one.req_id for one in step.waiting(is_long)] == [f"short{number:02}" for number in range(32)]


def test_a_refusal_does_not_answer_for_another_head() -> None:
    """A small request waited for 16 steps because a large one, aborted since, had not fitted in its place."""
    rig = Rig(
        "past-future",
        max_num_seqs=8,
        num_blocks=64,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        options={"admission": {"redraw_steps": 16}},
    )
    rig.add("x", 40, length=400, max_tokens=500)
    rig.step()
    rig.add("large", 300, length=5, max_tokens=600)
    rig.step()
    assert rig.running == ["x"]
    rig.scheduler.finish_requests("large", RequestStatus.FINISHED_ABORTED)
    rig.add("small", 16, length=5, max_tokens=16)
    rig.step()
    assert rig.running == ["x", "small"]


def test_a_running_request_is_ranked_again_when_its_rank_ends_and_not_before() -> None:
    rig, asked = Rig("scripted"), []

    def rank(request: RequestView, now: float) -> Rank:
        asked.append((request.req_id, request.num_output_tokens))
        return Rank((0.0,), until_tokens=request.num_output_tokens + 5 if request.req_id == "ends" else math.inf)

    SCRIPT.rank = rank
    rig.add("ends", length=14)
    rig.add("holds", length=14)
    rig.step(13, seconds=0.01)
    assert [tokens for req_id, tokens in asked if req_id == "ends"] == [0, 1, 6, 11]
    assert [tokens for req_id, tokens in asked if req_id == "holds"] == [0, 1]
    assert len(rig.scheduler.running_order._by_step) == 1, "one that holds is not looked at"
