"""The scheduler's state as policies see it before a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request, RequestStatus

from vllm_ext.prediction.runtime import Pivot
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.upstream import admission_cap, parked
from vllm_ext.scheduling.views import Batch, RequestView

if TYPE_CHECKING:
    from vllm_ext.scheduling.scheduler import SteeredScheduler

LOOK_AHEAD = 32
"""Waiting requests shown to a policy at most: a step must not cost more because the queue is longer."""


_computed_tokens = attrgetter("num_computed_tokens")
_LENGTHS = (_computed_tokens, attrgetter("num_prompt_tokens"), attrgetter("max_tokens"))


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
        self.number: int = scheduler.current_step
        self.admission = AdmissionPlan()
        self.runtime = scheduler.ledger.runtime
        self.pace = scheduler.ledger.pace.pace
        self.rng = scheduler.rng
        self.notes = scheduler.policy_notes
        self.membership = scheduler.running_order.changes
        self.queue_changes = scheduler.ranked.changes

    @property
    def num_free_tokens(self) -> int:
        """Tokens of the budget that running requests will leave for admissions; may be negative."""
        scheduler = self._scheduler
        free: int = self.token_budget - self.decode_tokens
        cap = scheduler.scheduler_config.long_prefill_token_threshold or self.token_budget
        for request in scheduler._inflight_prefills:
            if request.status == RequestStatus.RUNNING:
                free -= min(cap, request.num_tokens - request.num_computed_tokens)
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

    @property
    def pivot(self) -> Pivot:
        """The step at which throughput saturates."""
        return self.runtime.pivot

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompt is computed."""
        return self.num_running - self.num_prefilling

    @property
    def decode_tokens(self) -> int:
        """Tokens that the step takes for those who decode, drafts included."""
        return self.num_decoding * (1 + int(self._scheduler.num_spec_tokens))

    @property
    def context_tokens(self) -> int:
        """Sum of the KV tokens held by running requests."""
        return sum(map(_computed_tokens, self._scheduler.running))

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; of the smallest, where a model has several sizes."""
        return self._scheduler.kv_space.block_size

    @property
    def num_unused_blocks(self) -> int:
        """KV blocks that nobody holds, the watermark not taken off."""
        return self._scheduler.kv_space.unused_blocks()

    def tbt_s(self, default_s: float) -> float:
        """Return the smallest TBT objective of the running requests, where one that names none has ``default_s``."""
        return self._scheduler.running_order.tbt_s(default_s)

    def finished_lengths(self) -> npt.NDArray[np.int64]:
        """Output lengths of the requests that finished last, ascending."""
        return self._scheduler.ledger.finished_lengths.ascending()

    def batch(self) -> Batch:
        """The running requests as columns."""
        running, prefilling = self._scheduler.running, self._scheduler._inflight_prefills
        computed, prompt, max_tokens = (
            np.fromiter(map(read, running), dtype=np.int64, count=len(running)) for read in _LENGTHS
        )
        # Who decodes has computed all but its last token; of the others, a few, the request itself is asked.
        generated = np.maximum(computed - prompt, 0)
        tokens = np.maximum(computed, prompt)
        if prefilling:
            for place, request in enumerate(running):
                if request in prefilling:
                    generated[place], tokens[place] = request.num_output_tokens, request.num_tokens
        return Batch(tokens, computed, generated, max_tokens)

    def predicted_lengths(self) -> npt.NDArray[np.int64]:
        """Current estimates of the running requests' total output, in the order of `batch`."""
        jobs = self._scheduler.ledger.jobs
        return np.array([jobs[request.request_id].estimate for request in self._scheduler.running], dtype=np.int64)

    def cached_blocks_in_use(self, request: RequestView) -> int:
        """KV blocks of a waiting request that others hold already: it would share them."""
        return self._scheduler.kv_space.cached_blocks_in_use(self._scheduler.ledger[request.req_id].request)

    def prefilling(self) -> Sequence[RequestView]:
        """Running requests with a part of their prompt still to compute, best rank first."""
        scheduler = self._scheduler
        found = [r for r in scheduler._inflight_prefills if r.status == RequestStatus.RUNNING]
        found.sort(key=scheduler.running_order.keys.__getitem__)
        return [scheduler.ledger.view(scheduler.ledger[r.request_id]) for r in found]

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
            view = scheduler.ledger.view(scheduler.ledger[request.request_id], blocks)
            yield view if scheduler.residence is None else scheduler.residence.priced(view)

    def running_best(self) -> RequestView | None:
        """The running request of the best rank."""
        request = self._scheduler.running_order.best()
        return None if request is None else self._scheduler.ledger.view(self._scheduler.ledger[request.request_id])

    def level_of(self, request: RequestView) -> int:
        """The level of a waiting request's rank."""
        return self._scheduler.ranked.level(self._scheduler.ledger[request.req_id].request)

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
