"""The engine core in virtual time: the real scheduler, arrivals and aborts, and steps that take what a model says.

The loop is that of vLLM's engine core. Depth 1 is ``EngineCore.step``: schedule, execute, process. Depth 2 is
``step_with_batch_queue`` as async scheduling runs it: the next step is scheduled while the device works on the one
before, so that the host's time is hidden as long as it is the shorter of the two. The engine core is one thread; what
happens while it waits for the device is delivered when it looks next, in the order of `events.EventKind`:

    device     | step 1      | step 2      |            (depth 2)
    host    s1 s2            u1 s3         u2 s4        s: schedule, u: process the output

Nothing of the scheduler is modelled: `schedule`, `update_from_output`, `add_request` and `finish_requests` of the class
that serves are called, with a clock that stands still in between.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_ext.kv.int8.step import step_of
from vllm_ext.kv.partial_prefix.layout import layouts_of
from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.cost.step_shape import CostModel
from vllm_ext.simulation.engine.cohort import Cohort
from vllm_ext.simulation.engine.events import EventKind, EventQueue, VirtualClock
from vllm_ext.simulation.engine.request_factory import RequestFactory, TooLong
from vllm_ext.simulation.engine.token_runner import TokenRunner, output_ids
from vllm_ext.simulation.measure.collector import Collector, Live
from vllm_ext.simulation.measure.run_data import Decision, Stalled
from vllm_ext.simulation.workloads.requests import SimRequest, Workload

IDLE_STEP_S = 1e-3
"""How long the engine core sleeps after a step without tokens, before it looks again, if requests are left."""
_MAX_EMPTY_STEPS = 20_000
_PROGRESS_EVERY = 256


class _InFlight(NamedTuple):
    scheduler_output: SchedulerOutput
    model_output: ModelRunnerOutput
    end_s: float


class SimulatedEngine:
    """Runs a workload through a scheduler in virtual time.

    Args:
        scheduler: Any scheduler of vLLM's interface; its ``clock``, if it has one, becomes the virtual one.
        workload: Who asks for what.
        cost: How long steps take.
        collector: Keeps the books; its tier, if it has one, copies KV to the host and back.
        make_request: Turns a workload's request into the scheduler's.
        on_progress: Called now and then with the virtual time and the number of requests that ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workload: Workload,
        cost: CostModel,
        collector: Collector,
        *,
        make_request: RequestFactory,
        on_progress: Callable[[float, int], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.decisions: list[Decision] | None = None
        """Set to a list to keep what every step decided."""
        self.num_rejected = 0
        self.horizon_s = math.inf
        """When the next request may be delivered, at the soonest: nobody sleeps for longer."""
        self._workload = workload
        self._cost = cost
        self.collector = collector
        self._depth = 2 if scheduler.scheduler_config.async_scheduling else 1
        self._make_request = make_request
        self._on_progress = on_progress
        self._tier = tier = collector.tier
        self._lengths: dict[str, int] = {}
        self._runner = TokenRunner(self._lengths)
        self._cohort = scheduler if isinstance(scheduler, Cohort) else None
        if self._cohort is not None:
            self._cohort.attend(self._lengths, collector.caught_up)
        self._events = EventQueue()
        self._aborts = EventQueue()
        self._in_flight: deque[_InFlight] = deque()
        self._device_free_s = 0.0
        self._empty_in_a_row = 0
        self._arrivals: Iterator[SimRequest] = iter(())
        self._last_arrival_s = 0.0
        self._ours = scheduler if isinstance(scheduler, SteeredScheduler) else None
        if self._ours is not None:
            self._ours.clock = self.clock
        if tier is not None:
            tier.use_clock(self.clock)
        _report_preemptions(scheduler, collector, self.clock)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self, max_time_s: float | None = None) -> None:
        """Serve the workload to its end, or until a moment in virtual time.

        Raises:
            Stalled: requests are left, nothing is planned, and the scheduler schedules none of them.
            ValueError: the workload yields a request out of order, twice, or with lengths that can't be.
        """
        self._arrivals = self._workload.start()
        self._plan_next_arrival()
        ends_s = math.inf if max_time_s is None else max_time_s
        steps = 0
        while True:
            now = self.clock()
            self._receive(now)
            if now >= ends_s:
                self._cut_off(now)
                return
            if self._step_if_wanted():
                steps += 1
                if self._on_progress is not None and steps % _PROGRESS_EVERY == 0:
                    self._on_progress(self.clock(), len(self.collector.table))
            elif not self._sleep(ends_s):
                return

    def _step_if_wanted(self) -> bool:
        """Take a step, where there are requests or one is under way; return whether."""
        wanted = self.scheduler.has_requests()
        if found := wanted or bool(self._in_flight):
            self._step(wanted)
        return found

    def _sleep(self, until_s: float = math.inf) -> bool:
        """Go on to the next arrival, but no further than a moment; return whether there is one."""
        upcoming = self._events.next_time_s()
        if upcoming is not None:
            self._advance_to(min(upcoming, until_s))
        return upcoming is not None

    # --- one of several under one clock, which hands it its requests ------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is left to do: requests, or arrivals."""
        return bool(self._in_flight or self._events) or self.scheduler.has_requests()

    def deliver(self, request: SimRequest) -> None:
        """Let a request come at its arrival time; an engine without any sleeps until then.

        Raises:
            ValueError: that is no moment.
        """
        if not self.busy and self.clock() < request.arrival_s:
            self._advance_to(request.arrival_s)
        self._plan(request, 0.0, "where time begins", from_start=False)

    def advance(self) -> None:
        """Receive what has come by now, and take one step; without requests go on to the next arrival.

        Raises:
            Stalled: as `run`.
        """
        self._receive(self.clock())
        if not self._step_if_wanted():
            self._sleep()

    def stop(self, at_s: float) -> None:
        """End at a moment that is reached, or at which nothing is left to do; who is served is unfinished."""
        if self.clock() < at_s:
            self._advance_to(at_s)
        self._receive(self.clock())
        self._cut_off(self.clock())

    def _cut_off(self, now: float) -> None:
        if self._cohort is not None:
            self._cohort.show_all()
        self.collector.cut_off(now)

    def _step(self, wanted: bool) -> None:
        """One call of the engine core's step function; ``wanted`` is what the scheduler's `has_requests` said."""
        scheduler = self.scheduler
        executed = False
        if wanted:
            executed = self._launch()
            if len(self._in_flight) >= self._depth or not (executed or scheduler.has_requests()):
                self._process_oldest()
        else:
            self._process_oldest()
        if not executed and scheduler.has_requests():
            self._advance_to(self._wake_s())

    def _launch(self) -> bool:
        """Schedule a step and hand it to the device; return whether it has tokens."""
        now = self.clock()
        output = self.scheduler.schedule()
        cohort = self._cohort
        if cohort is not None:
            model_output, shape = cohort.execute(output, self._runner)
        else:
            scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
            model_output, shape = self._runner.execute(scheduled, requests, layouts_of(output))
        self.collector.scheduled(output, shape, now)
        if self.decisions is not None:
            self.decisions.append(Decision.of(output) if cohort is None else cohort.decision(output))
        ready = end = now + self._cost.host_s(shape) if shape.num_requests else now
        if self._tier is not None:
            ready = end = self._tier.before_forward(output, ready, self._device_free_s)
        if shape.num_requests:
            self._empty_in_a_row = 0
            start = max(ready, self._device_free_s)
            device_s = self._cost.device_s(shape) + self._records_s(output)
            end = start + device_s if self._tier is None else self._tier.forward_end_s(start, device_s)
            self._device_free_s = end
            self.collector.executed(shape, start, end)
        else:
            self._empty_step()
        if self._tier is not None:
            model_output = self._tier.after_forward(output, model_output, self._device_free_s)
        self._in_flight.append(_InFlight(output, model_output, end))
        self._advance_to(ready)  # the host's thread is busy until then, whatever the device finishes meanwhile
        return shape.num_requests > 0

    def _records_s(self, output: SchedulerOutput) -> float:
        """Return by how much a step takes longer for KV that is in 8 bits, or comes to be."""
        step, ours = step_of(output), self._ours
        return 0.0 if step is None or ours is None or ours.holding is None else ours.holding.place.prices.step_s(step)

    def _process_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        self._advance_to(max(self.clock(), oldest.end_s))
        now = self.clock()
        self._abort_due(now)
        hidden = 0
        if self._cohort is not None:
            hidden = self._cohort.num_hidden
            self.collector.processed(now)
        by_client = self.scheduler.update_from_output(oldest.scheduler_output, oldest.model_output)
        outputs = next(iter(by_client.values())).outputs if by_client else ()  # of the only client there is
        if by_client or hidden:
            for live, reason in self.collector.delivered(outputs, now, hidden):
                self._ended(live, reason, now)

    def _wake_s(self) -> float:
        """When the engine core looks again after a step without tokens; if it waits for copies alone, at their end."""
        soon = self.clock() + IDLE_STEP_S
        copied = None if self._tier is None or self.scheduler.running else self._tier.wake_s()
        if copied is None:
            return soon
        others = (self._events.next_time_s(), self._aborts.next_time_s(), self.horizon_s)
        return max(soon, min([copied, *(moment for moment in others if moment is not None)]))

    def _empty_step(self) -> None:
        if self._events or self._aborts or self.horizon_s < math.inf or not self.scheduler.requests:
            self._empty_in_a_row = 0
            return
        self._empty_in_a_row += 1
        if self._empty_in_a_row > _MAX_EMPTY_STEPS:
            raise Stalled(
                f"at {self.clock():.3f} s nothing was scheduled in {_MAX_EMPTY_STEPS} steps, unfinished: "
                f"{sorted(self.scheduler.requests)[:10]}"
            )

    def _advance_to(self, moment_s: float) -> None:
        self.collector.passed(moment_s)
        self.clock.advance_to(moment_s)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _plan_next_arrival(self) -> None:
        """Look one request ahead in the workload: it may be longer than memory."""
        request = next(self._arrivals, None)
        if request is not None:
            why = "because a workload starts at 0 and yields requests by arrival time"
            self._plan(request, self._last_arrival_s, why, from_start=True)
            self._last_arrival_s = request.arrival_s

    def _plan_follow_ups(self, request: SimRequest, now: float, generated: list[int]) -> None:
        for follow_up in self._workload.after(request, now, generated):
            self._plan(follow_up, now, f"when {request.req_id} ended, which it follows", from_start=False)

    def _plan(self, request: SimRequest, earliest_s: float, why: str, *, from_start: bool) -> None:
        if not earliest_s <= request.arrival_s < math.inf:
            named = f"arrival_s={request.arrival_s!r} of {request.req_id}"
            raise ValueError(f"{named}: must be a number, and not below {earliest_s}, {why}")
        self._events.push(request.arrival_s, EventKind.ARRIVAL, (request, from_start))

    def _receive(self, now: float) -> None:
        """Deliver what has happened by now, in the order in which it happened."""
        arrivals, aborts = self._events, self._aborts
        while True:
            if aborts.due(now, EventKind.STEP_START) and aborts.goes_before(arrivals):
                self._abort_next(now)
            elif arrivals.due(now, EventKind.STEP_START):
                request, from_start = arrivals.pop().payload
                if from_start:
                    self._plan_next_arrival()
                self._add(request, now)
            else:
                return

    def _add(self, request: SimRequest, now: float) -> None:
        if request.req_id in self.collector.live:
            raise ValueError(f"req_id={request.req_id!r}: a request of that id has not ended yet; ids must be unique")
        try:
            built = self._make_request(request)
        except TooLong:
            self.num_rejected += 1  # the front end answers 400, and the client goes on with its next request
            self.collector.rejected(request)
            self._plan_follow_ups(request, now, [])
            return
        self._lengths[request.req_id] = request.output_tokens
        self.scheduler.add_request(built)
        if request.predicted is not None and self._ours is not None:
            self._ours.update_predictions([(request.req_id, request.predicted, "retrieval")])
        predicted = 0
        if self._ours is not None and (tracked := self._ours.tracked.get(request.req_id)) is not None:
            predicted = tracked.prediction.tokens
        self.collector.arrived(request, predicted, now)
        for after_s, only_unanswered in ((request.abort_after_s, False), (request.patience_s, True)):
            if after_s is not None:
                self._aborts.push(request.arrival_s + after_s, EventKind.ABORT, (request.req_id, only_unanswered))

    def _abort_due(self, now: float) -> None:
        """Abort the requests whose clients are gone by now."""
        while self._aborts.due(now, EventKind.STEP_END):
            self._abort_next(now)

    def _abort_next(self, now: float) -> None:
        req_id, only_unanswered = self._aborts.pop().payload
        live = self.collector.live.get(req_id)
        if live is not None and not (only_unanswered and live.output_tokens):
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self._ended(live, "abort", now)

    def _ended(self, live: Live, reason: str, now: float) -> None:
        self.collector.ended(live, reason, now)
        request = live.request
        self._lengths.pop(request.req_id, None)
        self._plan_follow_ups(request, now, output_ids(live.output_tokens, ended=reason == "stop"))


def _report_preemptions(scheduler: Scheduler, collector: Collector, clock: VirtualClock) -> None:
    """Tell the collector of every preemption: a scheduler's output does not name those that resume at once."""
    original = scheduler._preempt_request

    def preempt(request: Request, *args: Any, **kwargs: Any) -> None:
        original(request, *args, **kwargs)
        collector.preempted(request.request_id, clock())

    scheduler._preempt_request = preempt
