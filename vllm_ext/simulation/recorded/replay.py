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
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_ext.config import KEY
from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.engine.harness import SAME_NAMES, block_hasher, make_request, make_scheduler
from vllm_ext.simulation.measure.run_data import Decision
from vllm_ext.simulation.recorded.recorder import settings
from vllm_ext.simulation.recorded.recording import (
    Add,
    EngineSettings,
    Finish,
    OtherCall,
    RecordingError,
    Run,
    Step,
    Update,
)
from vllm_ext.step_time.runtime import Pivot, RuntimeModel

END_TOKEN_ID = -1
_BY_ITSELF = {"stop", "repetition"}
_OF_A_REQUEST = {"max_tokens", "arrival_time", "extra_args", "priority", "session_id", "cache_salt"}


class ReplayError(RecordingError):
    """The recording holds something that a replay does not model; nothing can be said of equality."""


@dataclass(eq=False)
class Divergence(Exception):
    """The first thing in which a replay was not the recorded run."""

    what: str
    recorded: object
    replayed: object
    source: str = ""
    line: int = 0
    """Of the recording."""
    step: int = 0
    """Decisions that were equal before."""

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

    def __call__(self) -> float:
        """Return the next recorded reading; the scheduler differs from the recorded one if there is none left."""
        if not self._readings:
            raise Divergence("the clock is read more often", f"{self._given} readings", f"{self._given + 1} or more")
        self._given += 1
        return self._readings.popleft()

    def play(self, readings: Iterable[float]) -> None:
        """Give these readings next."""
        self._readings = deque(readings)
        self._given = 0

    def check_used_up(self) -> None:
        """Insist that every reading was taken."""
        if self._readings:
            given = self._given
            raise Divergence("the clock is read less often", f"{given + len(self._readings)} readings", f"{given}")


def build_scheduler(recorded: EngineSettings) -> Scheduler:
    """Rebuild a recorded scheduler on a cache of the same size, without an engine.

    Raises:
        ReplayError: a setting can't be rebuilt; the message names it.
    """
    try:
        scheduler = make_scheduler(
            recorded.scheduler_cls,
            enable_prefix_caching=recorded.prefix_caching,
            additional_config={KEY: dict(recorded.options)} if recorded.options else None,
            scheduling_policy=recorded.policy,
            **recorded.model_dump(include={*SAME_NAMES, "num_blocks", "v2_model_runner"}),
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
        if not isinstance(scheduler, SteeredScheduler):
            raise ReplayError("settings.runtime_coefficients: must be left out for vLLM alone, which has no such model")
        scheduler.observer.start_from(RuntimeModel(recorded.runtime_coefficients, pivot))
    return scheduler


def replay(run: Run) -> Replay:
    """Repeat a run up to the first difference.

    Raises:
        ReplayError: see `build_scheduler`; or a request uses a feature that is not modelled.
    """
    player = _Player(run.header.settings)
    divergence: Divergence | None = None
    for line, entry in zip(run.lines, run.entries, strict=True):
        try:
            player.repeat(entry, f"{run.source}, line {line}")
        except Divergence as found:
            divergence = replace(found, source=run.source, line=line, step=player.steps)
            break
    return Replay(
        steps=player.steps,
        total_steps=sum(1 for _ in run.of_type(Step)),
        requests=player.requests,
        divergence=divergence,
        scheduler=player.scheduler,
    )


class _Player:
    """A rebuilt scheduler, and the entries of a run it was given so far."""

    def __init__(self, recorded: EngineSettings) -> None:
        self.scheduler = build_scheduler(recorded)
        self.steps = self.requests = 0
        self._clock = PlaybackClock()
        self._reads_clock = isinstance(self.scheduler, SteeredScheduler)
        if self._reads_clock:
            self.scheduler.clock = self._clock
        self._hasher = block_hasher(recorded.block_size) if recorded.prefix_caching else None
        self._in_flight: dict[int, SchedulerOutput] = {}

    def repeat(self, entry: Any, where: str) -> None:
        """Raise `Divergence` where the scheduler does not do what was recorded."""
        self._clock.play(entry.clock)
        match entry:
            case Step():
                self._schedule(entry)
            case Update():
                self._update(entry, where)
            case Add(unsupported=unsupported):
                if unsupported:
                    raise ReplayError(f"{where}: field 'unsupported': {', '.join(unsupported)} can't be replayed")
                options = entry.model_dump(include=_OF_A_REQUEST)
                self.scheduler.add_request(
                    make_request(entry.req_id, entry.prompt, hasher=self._hasher, end_token_id=END_TOKEN_ID, **options)
                )
                self.requests += 1
            case Finish():
                self.scheduler.finish_requests(entry.req_ids, RequestStatus[entry.status])
            case OtherCall():
                args = [PauseState[entry.args[0]]] if entry.name == "set_pause_state" else entry.args
                getattr(self.scheduler, entry.name)(*args)
        if self._reads_clock:
            self._clock.check_used_up()

    def _schedule(self, entry: Step) -> None:
        output = self.scheduler.schedule(entry.throttled)
        replayed = vars(Decision.of(output))
        for name, found in replayed.items():
            recorded = entry.computed if name == "num_computed_tokens" else getattr(entry, name)
            if found != recorded:
                raise Divergence(f"step {entry.step} decides otherwise: {name}", recorded, found)
        self.steps += 1
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
        by_client = self.scheduler.update_from_output(output, model_output)
        replayed = {
            one.request_id: str(one.finish_reason)
            for outputs in by_client.values()
            for one in outputs.outputs
            if one.finish_reason is not None
        }
        recorded = {req_id: "stop" if reason in _BY_ITSELF else reason for req_id, reason in entry.finished}
        if replayed != recorded:
            raise Divergence(f"the output of step {entry.step} ends other requests", recorded, replayed)
