"""Notices a plan that lets nothing run: a policy's mistake must not stall the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ext.scheduling.step import LOOK_AHEAD, could_be_admitted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ext.scheduling.plan import StepPlan
    from vllm_ext.scheduling.scheduler import SteeredScheduler


def stalled(scheduler: SteeredScheduler, plan: StepPlan, output: SchedulerOutput) -> bool:
    """Return whether the step just scheduled is empty although without its plan something might have run.

    Steps of async scheduling in which every request merely awaits its last output are empty by nature and don't count.
    """
    if output.num_scheduled_tokens or not plan.restricts:
        return False
    if scheduler.running:
        return any(_has_work(request) for request in scheduler.running)
    scheduler.ranked.hide(frozenset())
    return any(could_be_admitted(request) for request in scheduler.ranked.best(LOOK_AHEAD))


def _has_work(request: Request) -> bool:
    """Whether tokens of a running request are left to schedule; vLLM takes no step beyond the client's bound."""
    in_flight: int = request.num_output_placeholders
    computed: int = request.num_computed_tokens
    if in_flight and computed + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens:
        return False
    return bool(request.num_tokens_with_spec + in_flight > computed)
