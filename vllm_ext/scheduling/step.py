"""The scheduler's state as policies see it before a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.upstream import admission_cap, parked
from vllm_ext.scheduling.views import RequestView

if TYPE_CHECKING:
    from vllm_ext.scheduling.scheduler import SteeredScheduler

LOOK_AHEAD = 32
"""Waiting requests shown to a policy at most: a step must not cost more because the queue is longer."""


class SchedulerStep:
    """The StepView of one moment; makes the views of requests only when they are asked for."""

    def __init__(self, scheduler: SteeredScheduler, now: float) -> None:
        self._scheduler = scheduler
        self.now = now
        self.num_running = len(scheduler.running)
        self.num_waiting = len(scheduler.waiting)
        held_seats: int = scheduler.num_waiting_for_streaming_input
        self.max_running = admission_cap(scheduler) - held_seats
        self.token_budget = scheduler.max_num_scheduled_tokens
        self.admission = AdmissionPlan()

    @property
    def num_free_tokens(self) -> int:
        """Tokens of the budget that running requests will leave for admissions; may be negative."""
        scheduler = self._scheduler
        free = self.token_budget - self.num_running
        cap = scheduler.scheduler_config.long_prefill_token_threshold or self.token_budget
        for request in scheduler._inflight_prefills:
            if request.status == RequestStatus.RUNNING:
                free += 1 - min(cap, request.num_tokens - request.num_computed_tokens)
        return free

    @property
    def num_free_blocks(self) -> int:
        """KV blocks free for admissions, the watermark already taken off."""
        return self._scheduler.kv_space.free_blocks()

    @property
    def num_total_blocks(self) -> int:
        """KV blocks of the whole pool, those in use included."""
        return self._scheduler.kv_space.total_blocks()

    @property
    def num_prefilling(self) -> int:
        """Running requests with a part of their prompt still to compute."""
        return sum(request.status == RequestStatus.RUNNING for request in self._scheduler._inflight_prefills)

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that a sequence of so many tokens takes, nothing of it shared."""
        return self._scheduler.kv_space.blocks_for(num_tokens)

    def blocks_at_bound(self, min_tokens: int = 0) -> int:
        """KV blocks of all requests that hold KV, once each is as long as its bound, and at least ``min_tokens``."""
        scheduler = self._scheduler
        holders = chain(scheduler.running, getattr(scheduler, parked(scheduler)))
        return scheduler.kv_space.blocks_at_bound(holders, min_tokens)

    def decoding(self) -> tuple[str, ...]:
        """Ids of the running requests whose prompt is computed."""
        scheduler = self._scheduler
        prefilling = scheduler._inflight_prefills
        return tuple(request.request_id for request in scheduler.running if request not in prefilling)

    def waiting(self) -> Iterator[RequestView]:
        """Waiting requests that could be admitted now, best rank first."""
        scheduler = self._scheduler
        for request in scheduler.ranked.best(LOOK_AHEAD):
            if not could_be_admitted(request):
                continue
            blocks = scheduler.kv_space.blocks_to_admit(request)
            yield scheduler.ledger.view(scheduler.ledger[request.request_id], blocks)

    def running_worst_first(self) -> Iterator[RequestView]:
        """Running requests, worst rank first."""
        scheduler = self._scheduler
        for request in scheduler.running_order.worst_first():
            blocks = scheduler.kv_space.blocks_freed_by(request)
            yield scheduler.ledger.view(scheduler.ledger[request.request_id], blocks)

    def running_best(self) -> RequestView | None:
        """The running request of the best rank."""
        request = self._scheduler.running_order.best()
        return None if request is None else self._scheduler.ledger.view(self._scheduler.ledger[request.request_id])

    def goes_before(self, first: RequestView, second: RequestView) -> bool:
        """Whether the ordering puts ``first`` before ``second``."""
        return self._scheduler.key_of(first.req_id) < self._scheduler.key_of(second.req_id)


def could_be_admitted(request: Request) -> bool:
    """Whether vLLM will take the request if it fits, or pass over it: its output, grammar or KV is still on its way."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        # vLLM looks whether the grammar is there only when a seat is free, which may be what we are to see to.
        structured = request.structured_output_request
        return structured is not None and structured.is_grammar_ready and not isinstance(structured.grammar, Exception)
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
