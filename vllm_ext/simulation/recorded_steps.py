"""What a recorded run says of time: how long each step took, and what lies between a client and the scheduler.

One convention holds for all three, and it is the simulator's: a step begins when it is scheduled and ends when its
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from vllm_ext.simulation.recording import RecordingError, Run
from vllm_ext.simulation.recording_lines import Add, Step, Update
from vllm_ext.simulation.step_shape import StepShape

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
    ends = dict(_ends(run))
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
        wanted = None if requests is None else requests[index]
        intervals += _intake_intervals(run, wanted)
        delays += _deliveries(run, wanted)
    if not intervals or not delays:
        raise RecordingError("no measured request to take the offsets of the front end from; record more requests")
    return Offsets(intake_s=_most_common(intervals), delivery_s=median(delays))


def _ends(run: Run) -> Iterator[tuple[int, float]]:
    """Yield (step, moment at which the engine core had done with its output)."""
    open_update: Update | None = None
    for entry in run.entries:
        if isinstance(entry, Step) and open_update is not None:
            yield open_update.step, entry.at_s if open_update.busy else open_update.end_s
            open_update = None
        elif isinstance(entry, Update):
            if open_update is not None:
                yield open_update.step, open_update.end_s
            open_update = entry
    if open_update is not None:
        yield open_update.step, open_update.end_s


def _shape(step: Step, update: Update) -> StepShape:
    sampled = sum(1 for _, ids in update.tokens if ids)
    decodes = decode_context = prefill_context = 0
    pairs = 0.0
    for (_, tokens), computed in zip(step.scheduled, step.computed, strict=True):
        end = computed + tokens
        if tokens == 1:
            decodes += 1
            decode_context += end
        else:
            prefill_context += end
            pairs += tokens * (end - (tokens - 1) / 2)
    total = sum(tokens for _, tokens in step.scheduled)
    return StepShape(len(step.scheduled), total, decodes, sampled, decode_context, prefill_context, pairs)


def arrival_windows(run: Run) -> dict[str, tuple[float, float]]:
    """Return by vLLM's request id the earliest and the latest moment at which a request can have reached the core.

    The latest is when the scheduler got it; the earliest is when the input queue was drained before that. A core that
    waits for work takes the first request at once, and those it finds behind it have the window of the first.
    """
    found: dict[str, tuple[float, float]] = {}
    drained, idle = float("-inf"), True
    first: tuple[float, float] | None = None
    for entry in run.entries:
        if isinstance(entry, Step):
            drained, idle, first = entry.at_s, False, None
        elif isinstance(entry, Update):
            idle = not entry.busy
        elif isinstance(entry, Add):
            if idle and first is None:
                first = (entry.at_s - _IDLE_S, entry.at_s)
            found[entry.req_id] = first or (drained, entry.at_s)
    return found


def _intake_intervals(run: Run, wanted: frozenset[str] | None) -> list[tuple[float, float]]:
    due = _due(run, wanted)
    windows = ((run.client_id(req_id), window) for req_id, window in arrival_windows(run).items())
    return [(low - due[req_id], high - due[req_id]) for req_id, (low, high) in windows if req_id in due]


def _deliveries(run: Run, wanted: frozenset[str] | None) -> list[float]:
    ends = dict(_ends(run))
    given: dict[str, list[float]] = {}
    for update in run.of_type(Update):
        for req_id, ids in update.tokens:
            given.setdefault(run.client_id(req_id), []).extend([ends[update.step]] * len(ids))
    start = run.header.client_start_s
    return [
        start + received - ended
        for request in run.requests
        if wanted is None or request.req_id in wanted
        for received, ended in zip(request.token_times_s, given.get(request.req_id, ()), strict=False)
    ]


def _due(run: Run, wanted: frozenset[str] | None) -> dict[str, float]:
    start = run.header.client_start_s
    return {r.req_id: start + r.arrival_s for r in run.requests if wanted is None or r.req_id in wanted}


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
