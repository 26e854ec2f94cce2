"""Turns a plan into moves of vLLM's own knobs; nothing here decides.

Every knob was shown to leave the outputs of greedy requests as they are; what a step changes is put back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_ext.scheduling.engine_state import EngineState, loading, prefilling, tokens_left
from vllm_ext.scheduling.step import LOOK_AHEAD, could_join

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import StepPlan
    from vllm_ext.scheduling.waiting_table import WaitingTable


@contextmanager
def applied(
    engine: EngineState,
    queue: WaitingTable,
    plan: StepPlan,
    preempt: Callable[[Request], None],
    *,
    throttled: bool = False,
) -> Iterator[None]:
    """Apply ``plan`` for the step scheduled inside the context.

    Requests that are gone meanwhile are passed over. The budget never exceeds what vLLM was configured with.

    Args:
        engine: vLLM's scheduler.
        queue: Its waiting queue.
        plan: What to do.
        preempt: Preempts a running request.
        throttled: Whether vLLM puts prompts off in this step, to balance engines: then decodes must not wait for them.
    """
    split = plan.split
    for req_id in plan.preempt:
        request = engine.requests.get(req_id)
        if request is not None and request in engine.running:
            preempt(request)
    if plan.admit is not None:
        admitted, asked = ([engine.requests[i] for i in ids if i in engine.requests] for ids in (plan.admit, plan.ask))
        queue.offer(admitted, asked)
    prompts_wait = throttled and not engine.prefill_capacity_bound
    if split.apart and not prompts_wait and (plan.admit or prefilling(engine)):
        _sit_out(engine)
    tokens, bound = engine.max_num_scheduled_tokens, engine.prefill_capacity_bound
    try:
        if split.tokens is not None:
            engine.max_num_scheduled_tokens = split.budget(tokens)
        if not split.prefill:
            engine.prefill_capacity_bound = False
        if split.chunk is not None:
            engine.cap_chunks(split.chunk)
        yield
    finally:
        if split.chunk is not None:
            engine.cap_chunks(None)
        engine.max_num_scheduled_tokens = tokens
        if not split.prefill:
            engine.prefill_capacity_bound = bound
        queue.end_step()


def _sit_out(engine: EngineState) -> None:
    """Pass over those who decode in the step that is scheduled next; they keep their KV."""
    for request in engine.running:
        if request not in engine._inflight_prefills:
            # schedule() counts the step first; only requests due at a later step are passed over in this one.
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, engine.current_step + 2)


def stalled(engine: EngineState, queue: WaitingTable, plan: StepPlan) -> bool:
    """Return whether a step that was scheduled empty might have had something to run without its plan.

    Steps of async scheduling in which every request merely awaits its last output are empty by nature and don't count,
    nor do those in which KV is being loaded.
    """
    if not plan.restricts or loading(engine):
        return False
    if engine.running:
        return any(map(tokens_left, engine.running))
    return any(could_join(request) for request in queue.best(LOOK_AHEAD))
