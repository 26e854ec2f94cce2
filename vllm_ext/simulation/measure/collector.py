"""Turns what a scheduler decides and returns into the data of a run, as a client of the server would see it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput

from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.measure.backlog import Backlog
from vllm_ext.simulation.measure.run_data import (
    REJECTED,
    UNFINISHED,
    Events,
    GapHistogram,
    RequestEvent,
    RequestRow,
    RequestTable,
    StepEvent,
    TimeSeries,
)
from vllm_ext.simulation.workloads.requests import SimRequest

if TYPE_CHECKING:
    from vllm_ext.simulation.engine.tier import Tier
    from vllm_ext.simulation.spec import RecordSpec

_STEPS_FORGOTTEN = 4096
"""At a time."""


@dataclass(kw_only=True, eq=False, slots=True)
class Live(RequestRow):
    """A request that has not ended yet: its row as far as it is known."""

    request: SimRequest
    token_times: array[float] | None = None
    last_token_s: float = math.nan
    waiting_since_s: float | None = None

    @classmethod
    def of(cls, request: SimRequest, predicted_tokens: int = 0, token_times: array[float] | None = None) -> Live:
        """Return a request that has just arrived."""
        slo = request.slo
        ttft_s, tbt_s, e2e_s = (math.nan if s is None else s for s in (slo.ttft_s, slo.tbt_s, slo.e2e_s))
        return cls(
            request=request,
            token_times=token_times,
            req_id=request.req_id,
            session_id=request.session_id or "",
            tier=request.tier,
            prompt_tokens=request.prompt_tokens,
            true_output_tokens=request.output_tokens,
            predicted_tokens=predicted_tokens,
            priority=request.priority,
            arrival_s=request.arrival_s,
            waiting_since_s=request.arrival_s,
            slo_ttft_s=ttft_s,
            slo_tbt_s=tbt_s,
            slo_e2e_s=e2e_s,
        )


class Collector:
    """Keeps the books of one run."""

    def __init__(self, scheduler: Scheduler, record: RecordSpec) -> None:
        self._scheduler = scheduler
        self._queues = scheduler.waiting, scheduler.kv_holding_waiting
        self._pool = scheduler.kv_cache_manager.block_pool
        self._keep_times = record.token_times
        self.tier: Tier | None = None
        """Where KV is kept beside the device, for the time series."""
        self.live: dict[str, Live] = {}
        self.table, self.unserved = RequestTable(), RequestTable()
        self.gaps = GapHistogram()
        self.series = TimeSeries()
        self.events = Events(limit=record.events) if record.events else None
        self.backlog: Backlog | None = None
        if record.backlog:
            block_size = scheduler.block_size
            self.backlog = Backlog((self._pool.num_gpu_blocks - 1) * block_size, block_size)
        self._token_budget = scheduler.max_num_scheduled_tokens
        self.contended_steps = 0
        """Steps that left somebody waiting, or used up the token budget: the order of requests mattered."""
        self.steps = self.empty_steps = self.prefill_tokens = self.decode_tokens = self.preemptions = 0
        self.device_busy_s = self.running_area = self.waiting_area = self.kv_area = 0.0
        self.max_kv_used = 0.0
        self._preempted: list[str] = []
        self._resumed: set[str] = set()
        """Back from a preemption and without a token since; kept for events only."""
        self._since_s = 0.0
        self._last_end_s = -1.0
        self._processed_s = array("d")
        self._processed_gaps_s = array("d")
        self._processed_from = 0
        self._remembered = 2 * scheduler.block_size
        """Steps looked back at: a hidden request is caught up with when it fills a block, or the step after."""

    # --- from the scheduler's side ----------------------------------------------------------------------------------

    def arrived(self, request: SimRequest, predicted_tokens: int, now_s: float) -> None:
        """A request was handed to the scheduler, which it reached at its arrival or when the engine core looked."""
        times = array("d") if self._keep_times else None
        self.live[request.req_id] = Live.of(request, predicted_tokens, times)
        self.waiting_area += now_s - request.arrival_s  # it waited where the scheduler does not see it
        self._note(request.arrival_s, request.req_id, "waiting")

    def preempted(self, req_id: str, now_s: float) -> None:
        """A running request lost its KV; it may get it back in the same step."""
        self.preemptions += 1
        live = self.live.get(req_id)
        if live is None:
            return
        live.preemptions += 1
        live.waiting_since_s = now_s
        if self.events is not None:
            self._preempted.append(req_id)
            self._resumed.discard(req_id)
        self._note(now_s, req_id, "preempted")

    def scheduled(self, output: SchedulerOutput, shape: StepShape, now_s: float) -> None:
        """A step was scheduled."""
        self.steps += 1
        if not shape.num_requests:
            self.empty_steps += 1
        for new in output.scheduled_new_reqs:  # the V2 runner's resumed requests would come here too
            self._starts(new.req_id, now_s, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:  # a set: its own order changes with the process
            for req_id in cached.req_ids:
                if req_id in cached.resumed_req_ids:
                    self._starts(req_id, now_s, 0)
        self.prefill_tokens += shape.num_prefill_tokens
        self.decode_tokens += shape.num_decodes
        full = shape.num_prefill_tokens + shape.num_decodes >= self._token_budget
        self.contended_steps += bool(full or self._queues[0] or self._queues[1])
        if self.backlog is not None and shape.num_requests and (self._queues[0] or self._queues[1]):
            self.backlog.step(self._pool.get_usage(), shape.num_decodes, self._running_lengths())

    def executed(self, shape: StepShape, start_s: float, end_s: float) -> None:
        """The device was given a step; ``start_s`` and ``end_s`` are when it will begin and end."""
        self.device_busy_s += end_s - start_s
        if self.events is not None:
            preempted, self._preempted = tuple(self._preempted), []
            computed = shape.num_requests, shape.num_prefill_tokens, shape.num_decodes
            self.events.keep(self.events.steps, StepEvent(start_s, end_s, *computed, preempted))

    def delivered(self, outputs: Sequence[EngineCoreOutput], now_s: float, hidden: int = 0) -> list[tuple[Live, str]]:
        """Tokens reached their clients; return the requests that ended with them, and why.

        Args:
            outputs: Of those whose requests are shown.
            now_s: The moment.
            hidden: Requests that got one beside them, as with the last call (`caught_up`).
        """
        ended = []
        live_of, common = self.live, self._last_end_s
        common_gap = now_s - common
        if self._resumed:
            self._note_resumed(outputs, now_s)
        same = hidden  # most tokens follow one of the step before: their gap is one number
        for output in outputs:
            live = live_of.get(output.request_id)
            if live is None:
                continue
            if output.new_token_ids:
                if live.output_tokens:
                    if live.last_token_s == common:
                        gap = common_gap
                        same += 1
                    else:
                        gap = now_s - live.last_token_s
                        self.gaps.add(gap)
                    if not gap <= live.max_gap_s:
                        live.max_gap_s = gap
                else:
                    live.first_token_s = now_s
                    self._note(now_s, output.request_id, "decode")
                live.output_tokens += len(output.new_token_ids)
                live.last_token_s = now_s
                if live.token_times is not None:
                    live.token_times.append(now_s)
            if output.finish_reason is not None:
                ended.append((live, str(output.finish_reason)))
        if same:
            self.gaps.add(common_gap, same)
        self._last_end_s = now_s
        return ended

    def processed(self, now_s: float) -> None:
        """A step's output is processed; told before `delivered`, where some may be hidden."""
        self._processed_s.append(now_s)
        self._processed_gaps_s.append(now_s - self._last_end_s)
        if len(self._processed_s) > self._remembered + _STEPS_FORGOTTEN:
            del self._processed_s[:_STEPS_FORGOTTEN], self._processed_gaps_s[:_STEPS_FORGOTTEN]
            self._processed_from += _STEPS_FORGOTTEN

    def caught_up(self, req_id: str, first: int, end: int) -> None:
        """A request that was hidden got a token with the output of each of these steps, and with that before them.

        Args:
            req_id: Whose.
            first: The first step, as `processed` counts them from 0.
            end: The one after the last.
        """
        live = self.live[req_id]
        steps = slice(first - self._processed_from, end - self._processed_from)
        times = self._processed_s[steps]
        live.output_tokens += len(times)
        live.last_token_s = times[-1]
        gap = max(self._processed_gaps_s[steps])
        if not gap <= live.max_gap_s:
            live.max_gap_s = gap
        if live.token_times is not None:
            live.token_times.extend(times)

    def ended(self, live: Live, reason: str, now_s: float) -> None:
        """A request left the server; write its row."""
        del self.live[live.req_id]
        self._resumed.discard(live.req_id)
        if live.waiting_since_s is not None:
            live.waited_s += now_s - live.waiting_since_s
        self._note(now_s, live.req_id, reason)
        live.finish_reason, live.finish_s = reason, now_s
        self.table.append(live, live.token_times)

    def rejected(self, request: SimRequest) -> None:
        """The front end refused a request."""
        self._leave(Live.of(request), REJECTED)

    def cut_off(self, now_s: float) -> None:
        """The run ends, whoever is still there."""
        for live in self.live.values():
            if live.output_tokens:
                live.max_gap_s = max(now_s - live.last_token_s, 0.0 if math.isnan(live.max_gap_s) else live.max_gap_s)
            self._leave(live, UNFINISHED)

    def _leave(self, live: Live, reason: str) -> None:
        live.finish_reason = reason
        self.unserved.append(live, live.token_times)

    def passed(self, now_s: float) -> None:
        """Time went by until ``now_s`` with the scheduler's state as it is now."""
        elapsed = now_s - self._since_s
        self._since_s = now_s
        scheduler = self._scheduler
        running, kv_used = len(scheduler.running), self._pool.get_usage()
        first, second = self._queues
        waiting = len(first) + len(second)
        if elapsed > 0:
            self.running_area += elapsed * running
            self.waiting_area += elapsed * waiting
            self.kv_area += elapsed * kv_used
        if kv_used > self.max_kv_used:
            self.max_kv_used = kv_used
        if now_s >= self.series.next_s:
            tier = self.tier
            self.series.add(
                now_s,
                running,
                waiting,
                kv_used,
                0.0 if tier is None else tier.used_fraction,
                0.0 if tier is None else tier.transfer_bytes,
                self.preemptions,
                self.prefill_tokens,
                self.decode_tokens,
                self.steps,
            )

    def _running_lengths(self) -> Iterator[tuple[int, int]]:
        """Per running request: tokens of its sequence so far, and tokens it will truly still generate."""
        for running in self._scheduler.running:
            asked = self.live[running.request_id].request
            generated: int = running.num_output_tokens
            whole = min(asked.output_tokens, asked.max_tokens)
            yield asked.prompt_tokens + generated, whole - generated

    def _starts(self, req_id: str, now_s: float, num_computed_tokens: int) -> None:
        live = self.live.get(req_id)
        if live is None:
            return
        if live.first_scheduled_s != live.first_scheduled_s:
            live.first_scheduled_s = now_s
            live.cached_prompt_tokens = min(num_computed_tokens, live.prompt_tokens)
        if live.waiting_since_s is not None:
            live.waited_s += now_s - live.waiting_since_s
            live.waiting_since_s = None
            self._note(now_s, req_id, "prefill")
            if self.events is not None and live.output_tokens:
                self._resumed.add(req_id)

    def _note_resumed(self, outputs: Sequence[EngineCoreOutput], now_s: float) -> None:
        for output in outputs:
            if output.new_token_ids and output.request_id in self._resumed:
                self._resumed.discard(output.request_id)
                self._note(now_s, output.request_id, "decode")

    def _note(self, time_s: float, req_id: str, state: str) -> None:
        if self.events is not None:
            self.events.keep(self.events.requests, RequestEvent(time_s, req_id, state))
