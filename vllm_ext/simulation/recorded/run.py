"""What a recorded run says: how long each step took, what lies between a client and the scheduler, who asked for what.

Times follow the simulator's convention: a step begins when it is scheduled and ends when its
output has been processed and the engine core turns to what comes next. Synchronous steps thus tile the busy time
without gaps, and everything the engine core does between two ``schedule()`` calls counts as part of the step.

    schedule k        output k     schedule k+1
    |--- executing ---|- update ---|                 duration of step k = schedule k+1 - schedule k
                                   |------------|    delivery = client's receipt - schedule k+1
          due |-----|<- intake: due to the moment from which a drain of the input queue would find the request

A request that comes while a step runs is found when the step has ended, so that a single intake is known only to lie in
an interval; the estimate is the value that lies in the most intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.recorded.recording import Add, RecordingError, Run, Step, Update
from vllm_ext.simulation.workloads.requests import SimRequest
from vllm_ext.simulation.workloads.token_ids import output_ids as simulated_ids

_IDLE_S = 2e-4
"""An engine core that waits for work takes a request at once; by how much a single wake-up may differ."""


class TimedStep(NamedTuple):
    """One step with tokens."""

    shape: StepShape
    start_s: float
    """When it was scheduled; for async scheduling, when the step before ended, if that was later."""
    end_s: float
    req_ids: frozenset[str]
    back_to_back: bool
    """Whether the engine core went on at once: only then is the end exact."""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Offsets:
    """What lies between a client and the scheduler, in seconds, as constants."""

    intake_s: float
    """From the moment a request is due to the moment the scheduler could see it."""
    delivery_s: float
    """From the end of a step to the client's receipt of its tokens."""


def timed_steps(run: Run) -> list[TimedStep]:
    """Return the steps of a run that computed tokens and whose output came, in order."""
    ends, _ = _moments(run)
    steps: dict[int, Step] = {step.step: step for step in run.of_type(Step)}
    found = []
    last_end = float("-inf")
    for update in run.of_type(Update):
        step = steps.get(update.step)
        if step is None or not step.scheduled:
            continue
        end = ends[update.step]
        start = max(step.at_s, last_end)
        last_end = end
        ids = frozenset(req_id for req_id, _ in step.scheduled)
        found.append(TimedStep(_shape(step, update), start, end, ids, update.busy))
    return found


def _shape(step: Step, update: Update) -> StepShape:
    rows = ((tokens, held) for (_, tokens), held in zip(step.scheduled, step.computed, strict=True))
    return StepShape.of_rows(rows)._replace(num_sampled=sum(1 for _, ids in update.tokens if ids))


def offsets(runs: Sequence[Run], requests: Sequence[frozenset[str]] | None = None) -> Offsets:
    """Return the offsets that fit the measured requests of these runs best.

    Args:
        requests: Per run, client ids of the requests to look at; None: all.

    Raises:
        RecordingError: no measured request is among them.
    """
    intervals: list[tuple[float, float]] = []
    delays: list[float] = []
    for index, run in enumerate(runs):
        ends, windows = _moments(run)
        start = run.header.client_start_s
        wanted = {r.req_id: r for r in run.requests if requests is None or r.req_id in requests[index]}
        for core_id, (low, high) in windows.items():
            if (request := wanted.get(run.client_id(core_id))) is not None:
                due = start + request.arrival_s
                intervals.append((low - due, high - due))
        given: dict[str, list[float]] = {}
        for update in run.of_type(Update):
            for core_id, ids in update.tokens:
                given.setdefault(run.client_id(core_id), []).extend([ends[update.step]] * len(ids))
        for req_id, request in wanted.items():
            moments = zip(request.token_times_s, given.get(req_id, ()), strict=False)
            delays += [start + received - ended for received, ended in moments]
    if not intervals or not delays:
        raise RecordingError("no measured request to take the offsets of the front end from; record more requests")
    return Offsets(intake_s=_most_common(intervals), delivery_s=median(delays))


def arrival_windows(run: Run) -> dict[str, tuple[float, float]]:
    """Return by vLLM's request id the earliest and the latest moment at which a request can have reached the core.

    The latest is when the scheduler got it; the earliest is when the input queue was drained before that. A core that
    waits for work takes the first request at once, and those it finds behind it have the window of the first.
    """
    return _moments(run)[1]


def _moments(run: Run) -> tuple[dict[int, float], dict[str, tuple[float, float]]]:
    """Return when the engine core had done with the output of each step, and the arrival window of each request."""
    ends: dict[int, float] = {}
    windows: dict[str, tuple[float, float]] = {}
    drained, idle = float("-inf"), True
    first: tuple[float, float] | None = None
    last: Update | None = None
    for entry in run.entries:
        if isinstance(entry, Step):
            if last is not None and last.busy:
                ends[last.step] = entry.at_s
            drained, idle, first, last = entry.at_s, False, None, None
        elif isinstance(entry, Update):
            ends[entry.step] = entry.end_s
            idle, last = not entry.busy, entry
        elif isinstance(entry, Add):
            if idle and first is None:
                first = (entry.at_s - _IDLE_S, entry.at_s)
            windows[entry.req_id] = first or (drained, entry.at_s)
    return ends, windows


def _most_common(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the middle of where the most intervals overlap, not below 0."""
    marks = sorted([(low, 0) for low, _ in intervals] + [(high, 1) for _, high in intervals])
    depth = deepest = 0
    best = (0.0, 0.0)
    for index, (value, closes) in enumerate(marks):
        depth += -1 if closes else 1
        if not closes and depth > deepest:
            deepest, best = depth, (value, marks[index + 1][0])
    return max(0.0, sum(best) / 2)


class RecordedWorkload:
    """All requests of a run under their clients' ids, those before the measured part included.

    Time starts with the first request. Measured requests arrive when they were due, later by the intake; the others,
    which no client timed, in the middle of when they can have. Lengths are those that came out. Where a prompt repeats
    an earlier request's answer, it repeats what the simulation answers: else no turn would find its history cached.

    Args:
        run: A whole run.
        offsets: Of the front end.

    Raises:
        RecordingError: entries of the run are missing, a request did not end by itself or at its bound, or one
            uses what a simulation does not model.
    """

    def __init__(self, run: Run, offsets: Offsets) -> None:
        if run.dropped:
            raise RecordingError(f"{run.source}: {run.dropped} entries of the run of line {run.line} are missing")
        self.name = run.source
        self.sha256 = ""
        adds: list[Add] = list(run.of_type(Add))
        if not adds:
            raise RecordingError(f"{run.source}: the run of line {run.line} has no request")
        self.start_s = adds[0].at_s
        """The run's time 0 on the recording's clock."""
        answers = _answers(run)
        prompts = _simulated_prompts(adds, answers)
        windows = arrival_windows(run)
        measured = {r.req_id: r for r in run.requests}
        self._requests = []
        for add, line in zip(run.entries, run.lines, strict=True):
            if not isinstance(add, Add):
                continue
            where, req_id = f"{run.source}, line {line}", run.client_id(add.req_id)
            if add.unsupported:
                raise RecordingError(f"{where}: field 'unsupported': {', '.join(add.unsupported)} can't be simulated")
            if add.req_id not in answers:
                raise RecordingError(f"{where}: {add.req_id} did not end by itself or at its bound")
            at_s = sum(windows[add.req_id]) / 2
            if req_id in measured:
                at_s = run.header.client_start_s + measured[req_id].arrival_s + offsets.intake_s
            self._requests.append(
                SimRequest(
                    req_id=req_id,
                    arrival_s=max(0.0, at_s - self.start_s),
                    prompt_tokens=len(add.prompt),
                    output_tokens=len(answers[add.req_id]),
                    max_tokens=add.max_tokens,
                    token_ids=prompts[add.req_id],
                    extra_args=add.extra_args,
                    priority=add.priority,
                    session_id=add.session_id,
                )
            )
        self._requests.sort(key=lambda request: request.arrival_s)  # stable: equal moments keep the recorded order
        self.rows = len(self._requests)

    def start(self) -> Iterator[SimRequest]:
        """Yield the requests by arrival."""
        return iter(self._requests)

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:  # noqa: ARG002 - as any workload's
        """Nobody waits for an answer to ask again: the recorded moments say it all."""
        return ()


def _answers(run: Run) -> dict[str, tuple[int, ...]]:
    """Output tokens by vLLM's request id, of the requests that ended by themselves or at their bound."""
    given: dict[str, list[int]] = {}
    ended: dict[str, tuple[int, ...]] = {}
    for update in run.of_type(Update):
        for req_id, ids in update.tokens:
            if req_id not in ended:
                given.setdefault(req_id, []).extend(ids)
        for req_id, reason in update.finished:
            if reason in ("stop", "length"):
                ended[req_id] = tuple(given.get(req_id, ()))
    return ended


def _simulated_prompts(adds: Iterable[Add], answers: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the prompts by vLLM's request id, with simulated answers in the place of recorded ones."""
    found: dict[str, tuple[int, ...]] = {}
    said: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for add in adds:
        most, simulated = 0, add.prompt
        for asked, recorded, repeated in said:
            answered = add.prompt[asked : asked + 1] == recorded[asked : asked + 1]  # of most pairs this is enough
            if answered and add.prompt[:asked] == recorded[:asked]:
                pairs = zip(add.prompt, recorded, strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if same > most:
                    most, simulated = same, repeated[:same] + add.prompt[same:]
        found[add.req_id] = simulated
        if answer := answers.get(add.req_id):
            said.append((len(add.prompt), add.prompt + answer, (*simulated, *simulated_ids(len(answer), ended=False))))
    return found
