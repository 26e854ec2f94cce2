"""The engine core's loop around a scheduler and a fabricated runner: one process, no threads, no clock.

Depth 1 is ``EngineCore.step``; depth 2 is ``EngineCore.step_with_batch_queue`` as async scheduling runs it: step
k + 1 is scheduled before the output of step k is processed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.fake_runner import FakeRunner
from vllm_ext.simulation.measure.run_data import Decision, Stalled


@dataclass
class Outcome:
    """What a client received of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_finishes: int = 0
    first_token_step: int | None = None
    finish_step: int | None = None


class _InFlight(NamedTuple):
    scheduler_output: SchedulerOutput
    model_output: ModelRunnerOutput


class EngineLoop:
    """Drives a scheduler the way an engine core does and collects what clients would receive.

    Args:
        depth: 1 for synchronous steps, 2 for async scheduling; must match the scheduler's configuration.
        on_schedule: Called after each ``schedule()`` with its output, before the runner executes it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: FakeRunner,
        *,
        depth: int = 1,
        on_schedule: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth={depth!r}: must be 1 (synchronous) or 2 (async scheduling)")
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.on_schedule = on_schedule
        self.outcomes: dict[str, Outcome] = {}
        self.decisions: list[Decision] = []
        self._in_flight: deque[_InFlight] = deque()
        self._pending_aborts: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether an engine core would step again now."""
        return self.scheduler.has_requests() or bool(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and whose output the scheduler has not seen yet."""
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        """Accept a request from a client.

        Raises:
            ValueError: The id was used before, or prefix caching is on and the request has no block hasher.
        """
        if request.request_id in self.outcomes:
            raise ValueError(f"request_id={request.request_id!r}: already used in this loop; ids must be unique")
        if self.scheduler.kv_cache_manager.enable_caching and request._block_hasher is None:
            raise ValueError(f"{request.request_id}: prefix caching is on, make_request needs hasher=block_hasher(...)")
        self.outcomes[request.request_id] = Outcome()
        self.scheduler.add_request(request)

    def abort(self, req_ids: Iterable[str], *, while_executing: bool = False) -> None:
        """Abort requests as a client that disconnects does; unknown and finished ids are ignored.

        Args:
            while_executing: Deliver the abort between the execution of the next step and the processing
                of its output instead of between two steps.
        """
        if while_executing:
            self._pending_aborts.extend(req_ids)
        else:
            self._abort_now(req_ids)

    def reset_prefix_cache(self) -> None:
        """Preempt everything and forget all KV, as a weight update does."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.runner.invalidate_kv()

    def step(self) -> Decision | None:
        """One call of the engine core's step function.

        Returns:
            What was scheduled in this call, or None if nothing was asked of the scheduler.
        """
        decision = None
        if self.scheduler.has_requests():
            scheduler_output = self.scheduler.schedule()
            decision = Decision.of(scheduler_output)
            self.decisions.append(decision)
            if self.on_schedule is not None:
                self.on_schedule(scheduler_output)
            # Executing at once is what a device does from the scheduler's side: steps run in order, and the
            # scheduler learns the result only in _process_oldest.
            self._in_flight.append(_InFlight(scheduler_output, self.runner.execute(scheduler_output)))
            if len(self._in_flight) < self.depth and (decision.scheduled or self.scheduler.has_requests()):
                return decision
        if self._in_flight:
            self._process_oldest()
        return decision

    def run_until_idle(self, *, max_steps: int = 10_000, before_step: Callable[[], None] | None = None) -> int:
        """Step until no work is left.

        Returns:
            The number of steps taken.

        Raises:
            Stalled: Work is left after ``max_steps``; names the requests.
        """
        for taken in range(max_steps):
            if not self.has_work:
                return taken
            if before_step is not None:
                before_step()
            self.step()
        if self.has_work:
            raise Stalled(f"{max_steps} steps taken, unfinished: {sorted(self.scheduler.requests)}")
        return max_steps

    def decision_log(self) -> bytes:
        """All decisions so far, one JSON line each; equal runs give equal bytes."""
        lines = (json.dumps(vars(decision), sort_keys=True) for decision in self.decisions)
        return "\n".join(lines).encode()

    def _process_oldest(self) -> None:
        scheduler_output, model_output = self._in_flight.popleft()
        if self._pending_aborts:
            self._abort_now(self._pending_aborts)
            self._pending_aborts = []
        by_client = self.scheduler.update_from_output(scheduler_output, model_output)
        for outputs in by_client.values():
            for output in outputs.outputs:
                self._deliver(output)

    def _deliver(self, output: EngineCoreOutput) -> None:
        outcome = self.outcomes[output.request_id]
        if outcome.finish_reason is not None:
            raise RuntimeError(f"{output.request_id}: output after it finished ({outcome.finish_reason})")
        outcome.token_ids.extend(output.new_token_ids)
        if output.new_token_ids and outcome.first_token_step is None:
            outcome.first_token_step = len(self.decisions)
        if output.finish_reason is not None:
            self._finish(outcome, str(output.finish_reason))

    def _abort_now(self, req_ids: Iterable[str]) -> None:
        for request in self.scheduler.finish_requests(list(req_ids), RequestStatus.FINISHED_ABORTED):
            self._finish(self.outcomes[request.request_id], "abort")

    def _finish(self, outcome: Outcome, reason: str) -> None:
        outcome.finish_reason = reason
        outcome.num_finishes += 1
        outcome.finish_step = len(self.decisions)
