"""Watches steps and requests: counters, records, and what the runtime model learns from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_ext.hints import HintError
from vllm_ext.scheduling.finished import OWN_ENDS, Counters, RecordBook, RequestRecord
from vllm_ext.scheduling.ledger import Job, Ledger
from vllm_ext.scheduling.load import Load
from vllm_ext.scheduling.wait_forecast import WaitForecast
from vllm_ext.step_time.timer import StepTimer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ext.step_time.runtime import RuntimeModel

logger = init_logger("vllm.vllm_ext.observer")


class Observer:
    """Keeps what is told to the outside. Does no I/O; the front end fetches it."""

    def __init__(self, ledger: Ledger, record_capacity: int) -> None:
        self.counters = Counters()
        self.book = RecordBook(record_capacity)
        self._ledger = ledger
        self.timer = StepTimer(ledger.runtime, ledger.pace)
        self.waits = WaitForecast()
        self.load = Load()
        self._awaiting_first_token: dict[str, Job] = {}
        self._hint_logged = False

    def scheduled(self, output: SchedulerOutput, running: list[Request], now: float) -> None:
        """Note a scheduled step and the requests that start in it: only these have waited to the end.

        One that vLLM takes from the queue may be passed over and come back, load KV first, or be aborted.
        """
        self.counters.steps += 1
        for new in output.scheduled_new_reqs:
            self.waits.started(new.req_id)
            job = self._ledger.get(new.req_id)
            if job is not None and job.first_scheduled is None:
                job.first_scheduled = now
                self._awaiting_first_token[new.req_id] = job
            if job is not None:
                self._ledger.end_wait(job, now)
        for req_id in output.scheduled_cached_reqs.resumed_req_ids:
            self.waits.started(req_id)
            if (job := self._ledger.get(req_id)) is not None:
                self._ledger.end_wait(job, now)
        self.waits.stepped(now)
        self.timer.scheduled(output, running, now)

    def start_from(self, runtime: RuntimeModel) -> None:
        """Replace the runtime model, before the first step: what views are made of and what learns from steps."""
        self._ledger.runtime = self.timer.sink = runtime

    def planned(self, duration_s: float) -> None:
        """Add the time policies took in one step."""
        self.counters.policy_steps += 1
        self.counters.policy_s += duration_s

    def finished_step(self, output: SchedulerOutput, now: float) -> None:
        """Note that the output of a step arrived."""
        self.timer.finished(output, now)

    def note_first_tokens(self, now: float) -> None:
        """Stamp requests whose first token came with the output just processed."""
        if not self._awaiting_first_token:
            return
        for req_id, job in list(self._awaiting_first_token.items()):
            if job.request.num_output_tokens:
                self._ledger.first_token(job, now)
                del self._awaiting_first_token[req_id]

    def preempted(self, reason: str) -> None:
        """Count a preemption."""
        self.counters.preemptions[reason] = self.counters.preemptions.get(reason, 0) + 1

    def refused(self, why: Mapping[str, str]) -> None:
        """Count those who were looked at in a step and did not join, by what was missing."""
        refusals = self.counters.refusals
        for reason in why.values():
            refusals[reason] = refusals.get(reason, 0) + 1

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
        job = self._ledger.close(request.request_id, learn=reason in OWN_ENDS)
        self._awaiting_first_token.pop(request.request_id, None)
        if job is None:
            return
        if job.first_token is None and request.num_output_tokens:
            job.first_token = now
        self.book.add(
            RequestRecord(
                seq=self.book.next_seq,
                req_id=request.request_id,
                arrival_unix_s=request.arrival_time,
                prompt_tokens=job.query.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                max_tokens=job.query.max_tokens,
                predicted_tokens=job.prediction.tokens,
                prediction_source=job.prediction.source,
                num_preemptions=request.num_preemptions,
                demotions=job.demotions,
                queue_s=_since(job, job.first_scheduled),
                ttft_s=_since(job, job.first_token),
                e2e_s=now - job.arrival_time,
                finish_reason=reason,
                priority=request.priority,
                conversation_id=job.hints.conversation_id,
            )
        )

    def state(self, since: int) -> dict[str, Any]:
        """Return counters, the runtime model and the records from ``since`` on, fit for JSON."""
        records, lost = self.book.since(since)
        runtime = self._ledger.runtime
        return {
            **asdict(self.counters),
            "runtime": {
                "coefficients": list(runtime.coefficients),
                "num_observations": runtime.num_observations,
                "mean_abs_relative_error": runtime.mean_abs_relative_error,
            },
            "wait_forecast": self.waits.state(),
            "load": self.load.state(),
            "records": records,
            "next_record": self.book.next_seq,
            "lost_records": lost,
        }


def _since(job: Job, moment: float | None) -> float | None:
    return None if moment is None else moment - job.arrival_time
