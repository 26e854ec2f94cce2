"""Repeats a recorded run in virtual time and compares every decision with the recorded one.

The scheduler is rebuilt from the recording's settings and gets the recorded requests, outputs and calls in the recorded
order, and for each reading of its clock the reading that was recorded. Everything else it decides anew: queues, ranks,
the run-time model it learns, block allocation, prefix hits, preemptions. Equal decisions show that nothing else has a
part in them: no wall clock, no thread, no state of the engine around the scheduler.

Differs from the engine in one point: a request that ended by itself is ended by a token that no vocabulary has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_ext.config import KEY
from vllm_ext.observability.step_record import settings
from vllm_ext.prediction.runtime import Pivot, RuntimeModel
from vllm_ext.simulation import harness
from vllm_ext.simulation.decision import Decision
from vllm_ext.simulation.recording import RecordingError, Run
from vllm_ext.simulation.recording_lines import Add, EngineSettings, Finish, OtherCall, Step, Update
from vllm_ext.simulation.steered import steered

END_TOKEN_ID = -1
_BY_ITSELF = {"stop", "repetition"}


class ReplayError(RecordingError):
    """The recording holds something that a replay does not model; nothing can be said of equality."""


class _Differs(Exception):
    def __init__(self, what: str, recorded: object, replayed: object) -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, recorded, replayed


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first thing in which a replay was not the recorded run."""

    source: str
    line: int
    """Of the recording."""
    step: int
    """Decisions that were equal before."""
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return (
            f"{self.source}, line {self.line}, after {self.step} equal decisions: {self.what}\n"
            f"  recorded: {self.recorded}\n  replayed: {self.replayed}"
        )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of a replay."""

    steps: int
    """Decisions compared and found equal."""
    total_steps: int
    """Decisions in the recording."""
    requests: int
    """Requests that were added."""
    divergence: Divergence | None
    """None if everything was equal."""
    scheduler: Scheduler
    """As it stands at the end, to be looked at."""


class PlaybackClock:
    """A clock that gives recorded readings, call by call of the scheduler."""

    def __init__(self) -> None:
        self._readings: deque[float] = deque()
        self._given = 0
        self._last = 0.0

    def __call__(self) -> float:
        """Return the next recorded reading; the scheduler differs from the recorded one if there is none left."""
        self._given += 1
        if not self._readings:
            raise _Differs("the clock is read more often", f"{self._given - 1} readings", f"{self._given} or more")
        self._last = self._readings.popleft()
        return self._last

    def play(self, readings: Iterable[float]) -> None:
        """Give these readings next."""
        self._readings = deque(readings)
        self._given = 0

    def check_used_up(self) -> None:
        """Insist that every reading was taken."""
        if self._readings:
            given = self._given
            raise _Differs("the clock is read less often", f"{given + len(self._readings)} readings", f"{given}")


def build_scheduler(recorded: EngineSettings) -> Scheduler:
    """Rebuild a recorded scheduler on a cache of the same size, without an engine.

    Raises:
        ReplayError: a setting can't be rebuilt; the message names it.
    """
    try:
        scheduler = harness.make_scheduler(
            recorded.scheduler_cls,
            num_blocks=recorded.num_blocks,
            block_size=recorded.block_size,
            max_num_seqs=recorded.max_num_seqs,
            max_num_batched_tokens=recorded.max_num_batched_tokens,
            max_model_len=recorded.max_model_len,
            async_scheduling=recorded.async_scheduling,
            enable_prefix_caching=recorded.prefix_caching,
            additional_config={KEY: dict(recorded.options)} if recorded.options else None,
            scheduling_policy=recorded.policy,
            watermark=recorded.watermark,
            v2_model_runner=recorded.v2_model_runner,
        )
    except (ImportError, ValueError) as error:
        raise ReplayError(f"scheduler_cls={recorded.scheduler_cls!r}: can't be rebuilt ({error})") from error
    rebuilt = EngineSettings(**settings(scheduler))
    for name in EngineSettings.model_fields:
        want, got = getattr(recorded, name), getattr(rebuilt, name)
        if want != got and not name.startswith("runtime_"):
            raise ReplayError(
                f"settings.{name}={want!r}: the rebuilt scheduler has {got!r}, so it would decide otherwise"
            )
    if recorded.runtime_coefficients is not None:
        pivot = None if recorded.runtime_pivot is None else Pivot(*recorded.runtime_pivot)
        if (ours := steered(scheduler)) is None:
            raise ReplayError("settings.runtime_coefficients: must be left out for vLLM alone, which has no such model")
        ours.observer.start_from(RuntimeModel(recorded.runtime_coefficients, pivot))
    return scheduler


def replay(run: Run) -> Replay:
    """Repeat a run up to the first difference.

    Raises:
        ReplayError: see `build_scheduler`; or a request uses a feature that is not modelled.
    """
    return _Replayer(run).run()


class _Replayer:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._scheduler = build_scheduler(run.header.settings)
        self._clock = PlaybackClock()
        ours = steered(self._scheduler)
        self._has_clock = ours is not None
        if ours is not None:
            ours.clock = self._clock
        recorded = run.header.settings
        self._hasher = harness.block_hasher(recorded.block_size) if recorded.prefix_caching else None
        self._in_flight: dict[int, SchedulerOutput] = {}
        self._steps = self._requests = 0

    def run(self) -> Replay:
        run, divergence = self._run, None
        for line, entry in zip(run.lines, run.entries, strict=True):
            self._clock.play(entry.clock)
            try:
                self._do(entry, f"{run.source}, line {line}")
                if self._has_clock:
                    self._clock.check_used_up()
            except _Differs as found:
                divergence = Divergence(
                    source=run.source,
                    line=line,
                    step=self._steps,
                    what=found.what,
                    recorded=found.recorded,
                    replayed=found.replayed,
                )
                break
        return Replay(
            steps=self._steps,
            total_steps=sum(1 for _ in run.of_type(Step)),
            requests=self._requests,
            divergence=divergence,
            scheduler=self._scheduler,
        )

    def _do(self, entry: Any, where: str) -> None:
        if isinstance(entry, Step):
            self._schedule(entry)
        elif isinstance(entry, Update):
            self._update(entry, where)
        elif isinstance(entry, Add):
            if entry.unsupported:
                raise ReplayError(f"{where}: field 'unsupported': {', '.join(entry.unsupported)} can't be replayed")
            self._scheduler.add_request(_request(entry, self._hasher))
            self._requests += 1
        elif isinstance(entry, Finish):
            self._scheduler.finish_requests(entry.req_ids, RequestStatus[entry.status])
        elif isinstance(entry, OtherCall):
            args = [PauseState[entry.args[0]]] if entry.name == "set_pause_state" else entry.args
            getattr(self._scheduler, entry.name)(*args)

    def _schedule(self, entry: Step) -> None:
        output = self._scheduler.schedule(entry.throttled)
        replayed = Decision.of(output)
        recorded = Decision(
            scheduled=entry.scheduled,
            new=entry.new,
            resumed=entry.resumed,
            preempted=entry.preempted,
            num_computed_tokens=entry.computed,
        )
        if replayed != recorded:
            name = next(n for n in vars(recorded) if getattr(recorded, n) != getattr(replayed, n))
            raise _Differs(
                f"step {entry.step} decides otherwise: {name}", getattr(recorded, name), getattr(replayed, name)
            )
        self._steps += 1
        self._in_flight[entry.step] = output

    def _update(self, entry: Update, where: str) -> None:
        output = self._in_flight.pop(entry.step, None)
        if output is None:
            raise ReplayError(f"{where}: field 'step': {entry.step} was not scheduled before, or is updated twice")
        ended = {req_id for req_id, reason in entry.finished if reason in _BY_ITSELF}
        req_ids = [req_id for req_id, _ in entry.tokens]
        sampled = [[*ids[:-1], END_TOKEN_ID] if req_id in ended and ids else list(ids) for req_id, ids in entry.tokens]
        model_output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )
        by_client = self._scheduler.update_from_output(output, model_output)
        replayed = {
            one.request_id: str(one.finish_reason)
            for outputs in by_client.values()
            for one in outputs.outputs
            if one.finish_reason is not None
        }
        recorded = {req_id: "stop" if reason in _BY_ITSELF else reason for req_id, reason in entry.finished}
        if replayed != recorded:
            raise _Differs(f"the output of step {entry.step} ends other requests", recorded, replayed)


def _request(entry: Add, hasher: harness.BlockHasher | None) -> Request:
    sampling = SamplingParams(
        max_tokens=entry.max_tokens,
        temperature=0.0,
        extra_args=dict(entry.extra_args) if entry.extra_args is not None else None,
    )
    sampling.update_from_generation_config({}, END_TOKEN_ID)
    return Request(
        request_id=entry.req_id,
        prompt_token_ids=list(entry.prompt),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=entry.arrival_time,
        priority=entry.priority,
        session_id=entry.session_id,
        cache_salt=entry.cache_salt,
        block_hasher=hasher,
    )
