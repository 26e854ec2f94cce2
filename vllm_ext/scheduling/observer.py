"""Watches steps and requests: counters, records, and what the runtime model learns from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_ext.hints import HintError
from vllm_ext.scheduling.finished import OWN_ENDS, Counters, LogDetails, RecordBook, RequestRecord
from vllm_ext.scheduling.load import Load
from vllm_ext.scheduling.tracked_requests import TrackedRequest, TrackedRequests
from vllm_ext.scheduling.wait_forecast import WaitForecast
from vllm_ext.scheduling.wait_reasons import TRACE_HEADER, WaitReasons
from vllm_ext.step_time.timer import StepTimer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ext.config import ExtConfig
    from vllm_ext.scheduling.shadow.shadow import Shadow
    from vllm_ext.step_time.runtime import RuntimeModel
    from vllm_ext.step_time.samples import StepSamples

logger = init_logger("vllm.vllm_ext.observer")


class Observer:
    """Keeps what is told to the outside. Does no I/O; the front end fetches it."""

    def __init__(
        self,
        tracked: TrackedRequests,
        record_capacity: int,
        samples: StepSamples | None = None,
        *,
        details: LogDetails | None = None,
        reasons: WaitReasons | None = None,
        traces: bool = False,
    ) -> None:
        """Take what to watch, and what is wanted of it.

        Args:
            tracked: All requests.
            record_capacity: Records kept for the front end to fetch.
            samples: Of steps.
            details: What the request log has of each request; None: there is none.
            reasons: Why requests waited; None: nobody wants to know.
            traces: Whether the front end makes a span of each request, which is to say so.
        """
        self.counters = Counters()
        self.book = RecordBook(record_capacity)
        self._tracked = tracked
        self._samples = samples
        sinks = [tracked.step_stats] if samples is None else [tracked.step_stats, samples]
        self.reasons, self._details, self._traces = reasons, details, traces
        self.timer = StepTimer(tracked.runtime, *sinks)
        self.waits = WaitForecast()
        self.load = Load()
        self.shadow: Shadow | None = None
        self._awaiting_first_token: dict[str, TrackedRequest] = {}
        self._hint_logged = False

    @classmethod
    def from_config(
        cls,
        config: ExtConfig,
        tracked: TrackedRequests,
        samples: StepSamples | None,
        *,
        block_tokens: int,
        traces: bool,
    ) -> Observer:
        """Return one that keeps what the options ask for.

        Args:
            config: The options.
            tracked: All requests.
            samples: Of steps.
            block_tokens: Tokens of a block of vLLM's prefix hashes.
            traces: Whether the front end makes a span of each request.
        """
        details, reasons = None, None
        if config.request_log is not None:
            details = LogDetails(
                sample=config.request_log_sample, prompts=config.request_log_prompts, block_tokens=block_tokens
            )
        if details is not None or traces:
            reasons = WaitReasons(tracked)
        return cls(tracked, config.record_capacity, samples, details=details, reasons=reasons, traces=traces)

    def scheduled(self, output: SchedulerOutput, running: list[Request], now: float) -> None:
        """Note a scheduled step and the requests that start in it: only these have waited to the end.

        One that vLLM takes from the queue may be passed over and come back, load KV first, or be aborted.
        """
        self.counters.steps += 1
        for new in output.scheduled_new_reqs:
            self.waits.started(new.req_id)
            tracked = self._tracked.get(new.req_id)
            if tracked is not None and tracked.first_scheduled is None:
                tracked.first_scheduled = now
                self._awaiting_first_token[new.req_id] = tracked
                if self.shadow is not None:
                    self.shadow.started(new.req_id, now)
            if tracked is not None:
                self._end_wait(tracked, now)
        for req_id in output.scheduled_cached_reqs.resumed_req_ids:
            self.waits.started(req_id)
            if (tracked := self._tracked.get(req_id)) is not None:
                self._end_wait(tracked, now)
        self.waits.stepped(now)
        if self.shadow is not None:
            self.shadow.stepped(now, len(running))
        self.timer.scheduled(output, running, now)

    def came(self, request: Request, queued: int, ahead: int | None) -> None:
        """Note a new request, see `WaitReasons.came`; an update of a streaming session is none."""
        tracked = self._tracked[request.request_id]
        if self.reasons is not None and tracked.wait is None:
            self.reasons.came(tracked, self.counters.steps, queued, ahead)

    def _end_wait(self, tracked: TrackedRequest, now: float) -> None:
        self._tracked.end_wait(tracked, now)
        if self.reasons is None:
            return
        self.reasons.joined(tracked, self.counters.steps)
        if self._traces and (told := self.reasons.told(tracked)) is not None:
            request = tracked.request
            request.trace_headers = {**(request.trace_headers or {}), TRACE_HEADER: json.dumps(told)}

    def start_from(self, runtime: RuntimeModel) -> None:
        """Replace the runtime model, before the first step: what views are made of and what learns from steps."""
        self._tracked.runtime = self.timer.sink = runtime

    def planned(self, duration_s: float) -> None:
        """Add the time policies took in one step."""
        self.counters.policy_steps += 1
        self.counters.policy_s += duration_s

    def finished_step(self, output: SchedulerOutput, now: float) -> None:
        """Note that the output of a step arrived."""
        self.timer.finished(output, now)

    def processed(self, running: list[Request], now: float) -> None:
        """Note that vLLM has processed a step's output: who still runs, and which requests got their first token."""
        self.timer.goes_on(bool(running))
        if not self._awaiting_first_token:
            return
        for req_id, tracked in list(self._awaiting_first_token.items()):
            if tracked.request.num_output_tokens:
                self._tracked.first_token(tracked, now)
                del self._awaiting_first_token[req_id]

    def preempted(self, req_id: str, reason: str) -> None:
        """Count a preemption."""
        self.counters.preemptions[reason] = self.counters.preemptions.get(reason, 0) + 1
        if self.reasons is not None and (tracked := self._tracked.get(req_id)) is not None:
            self.reasons.preempted(tracked, reason, self.counters.steps)

    def refused(self, why: Mapping[str, str]) -> None:
        """Count those who were looked at in a step and did not join, by what was missing."""
        refusals = self.counters.refusals
        for reason in why.values():
            refusals[reason] = refusals.get(reason, 0) + 1
        if self.reasons is not None:
            self.reasons.refused(why)

    def parted(self, disposition: str) -> None:
        """Count what becomes of a preempted request's KV."""
        self.counters.dispositions[disposition] = self.counters.dispositions.get(disposition, 0) + 1

    def resumed(self, expected_s: float, waited_s: float) -> None:
        """Compare how long a preempted request waited with what was estimated when it was preempted."""
        self.counters.waits_compared += 1
        self.counters.wait_expected_s += expected_s
        self.counters.wait_actual_s += waited_s
        self.counters.wait_error_s += abs(expected_s - waited_s)

    def bad_hint(self, req_id: str, problem: HintError) -> None:
        """Count hints that were left out; the front end refuses them, so this is logged once."""
        self.counters.bad_hints += 1
        if not self._hint_logged:
            self._hint_logged = True
            logger.warning("a malformed hint of request %s reached the scheduler and is ignored: %s", req_id, problem)

    def closed(self, request: Request, now: float) -> None:
        """Write the record of a finished request and let the predictor learn from it."""
        self.waits.left(request.request_id)
        reason = str(request.get_finished_reason())
        tracked = self._tracked.close(request.request_id, learn=reason in OWN_ENDS)
        self._awaiting_first_token.pop(request.request_id, None)
        if self.shadow is not None:
            self.shadow.left(request.request_id, now, ended=reason in OWN_ENDS)
        if tracked is None:
            return
        if tracked.first_token is None and request.num_output_tokens:
            tracked.first_token = now
        wait = None
        if self.reasons is not None:
            self.reasons.left(tracked, self.counters.steps)
            if tracked.waiting_since is not None:
                tracked.waited_s += now - tracked.waiting_since
            wait = self.reasons.told(tracked)
        conversation_id = tracked.hints.conversation_id
        details = {} if self._details is None else self._details.of(request, conversation_id)
        self.book.add(
            RequestRecord(
                seq=self.book.next_seq,
                req_id=request.request_id,
                arrival_unix_s=request.arrival_time,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                max_tokens=tracked.query.max_tokens,
                predicted_tokens=tracked.prediction.tokens,
                prediction_source=tracked.prediction.source,
                num_preemptions=request.num_preemptions,
                demotions=tracked.demotions,
                queue_s=_since(tracked, tracked.first_scheduled),
                ttft_s=_since(tracked, tracked.first_token),
                e2e_s=now - tracked.arrival_time,
                finish_reason=reason,
                priority=request.priority,
                conversation_id=conversation_id,
                wait=wait,
                **details,
            )
        )

    def state(self, since: int) -> dict[str, Any]:
        """Return counters, the runtime model and the records from ``since`` on, fit for JSON.

        Measured steps are handed out once: who asks for no records, beyond the last one, gets none of them either.
        """
        records, lost = self.book.since(since)
        runtime = self._tracked.runtime
        return {
            **asdict(self.counters),
            "runtime": {
                "coefficients": list(runtime.coefficients),
                "num_observations": runtime.num_observations,
                "mean_abs_relative_error": runtime.mean_abs_relative_error,
            },
            "wait_forecast": self.waits.state(),
            "load": self.load.state(),
            **({} if self.shadow is None else {"shadow": self.shadow.state()}),
            "records": records,
            "next_record": self.book.next_seq,
            "lost_records": lost,
            **({"steps_measured": self._samples.take()} if self._samples and since <= self.book.next_seq else {}),
        }


def _since(tracked: TrackedRequest, moment: float | None) -> float | None:
    return None if moment is None else moment - tracked.arrival_time
