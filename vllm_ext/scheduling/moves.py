"""Turns a plan into moves of vLLM's own knobs; nothing here decides.

Every knob was shown to leave the outputs of greedy requests as they are; what a step changes is put back after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_ext.scheduling.plan import StepPlan
from vllm_ext.scheduling.upstream import admission_cap, set_admission_cap

if TYPE_CHECKING:
    from vllm_ext.scheduling.scheduler import SteeredScheduler


@contextmanager
def applied(scheduler: SteeredScheduler, plan: StepPlan, now: float) -> Iterator[None]:
    """Apply ``plan`` for the step scheduled inside the context.

    Requests that are gone meanwhile are passed over. Caps never exceed what vLLM was configured with.
    """
    admission, budget = plan.admission, plan.budget
    for req_id in admission.preempt:
        scheduler.preempt_by_policy(req_id, now)
    for req_id in budget.skip:
        if (job := scheduler.ledger.get(req_id)) is not None:
            # schedule() counts the step first; only requests due at a later step are passed over in this one.
            request = job.request
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, scheduler.current_step + 2)
    hold = admission.hold
    if scheduler.connector is not None:
        # vLLM's offloading connector can't take a request that is preempted and loaded again in one step.
        hold = hold.union(admission.preempt)
    if hold:
        scheduler.ranked.hide(hold)
    tokens, active = scheduler.max_num_scheduled_tokens, admission_cap(scheduler)
    bound = scheduler.prefill_capacity_bound
    try:
        if budget.token_budget is not None:
            scheduler.max_num_scheduled_tokens = max(0, min(budget.token_budget, tokens))
        if admission.max_running is not None:
            cap = admission.max_running + scheduler.num_waiting_for_streaming_input  # paused sessions keep their seats
            set_admission_cap(scheduler, max(0, min(cap, active)))
        if budget.decode_only:
            scheduler.prefill_capacity_bound = False
        yield
    finally:
        scheduler.max_num_scheduled_tokens = tokens
        set_admission_cap(scheduler, active)
        if budget.decode_only:
            scheduler.prefill_capacity_bound = bound
