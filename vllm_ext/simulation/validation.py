"""The simulator against the real engine: predict a recorded run from its arrivals, and compare with what happened.

A fit takes two things from recorded steps: a cost model (`cost.fit_steps`) and two constants for what lies between a
client and the scheduler (`recorded_steps.offsets`). A prediction then runs the same scheduler with the same settings in
virtual time on the recorded arrivals, prompts and lengths. Nothing else is adjusted.

What is predicted is never what was fitted: the fit comes from another recording, or from the first half of the run in
time, and then only requests of the second half are judged. The requests served before the measured part are simulated
too, because schedulers learn from them; they are neither judged nor needed for the offsets.

How far apart two runs of the real engine are, given the same requests, bounds what any prediction can reach; where a
recording holds repeats of the same requests, that distance is reported beside the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from vllm_ext.simulation import agreement
from vllm_ext.simulation.agreement import Batch
from vllm_ext.simulation.cost.fitted import Fitted, fit_steps
from vllm_ext.simulation.latency import RequestTimeline
from vllm_ext.simulation.recorded_steps import Offsets, offsets, timed_steps
from vllm_ext.simulation.recorded_workload import RecordedWorkload
from vllm_ext.simulation.recording import RecordingError, Run
from vllm_ext.simulation.recording_lines import EngineSettings
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec

_ALL_EVENTS = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was learnt of the machine."""

    cost: Fitted
    offsets: Offsets


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A real or a simulated run, as far as they are compared. Times count from the start of the measured part."""

    timelines: tuple[RequestTimeline, ...]
    """The requests that are judged, in the order of the recording."""
    batches: tuple[Batch, ...]
    """All steps."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A recorded run beside its prediction."""

    run: Run
    fit: Fit
    measured: Observed
    predicted: Observed
    metrics: dict[str, float]
    """Errors as fractions, predicted aggregates in ms, and how far the decisions agree."""
    baseline: dict[str, float]
    """The measured aggregates, under the same names."""


def fit(runs: Sequence[Run], until: Sequence[float] | None = None) -> Fit:
    """Fit cost model and offsets to runs.

    Args:
        until: Per run, seconds after the start of its measured part at which to stop; None: use whole runs.

    Raises:
        RecordingError, ValueError: there are too few steps, or no measured request.
    """
    shapes, seconds = [], []
    wanted = []
    for index, run in enumerate(runs):
        end_s = float("inf") if until is None else until[index]
        for step in timed_steps(run):
            if step.back_to_back and step.duration_s > 0 and step.end_s <= run.header.client_start_s + end_s:
                shapes.append(step.shape)
                seconds.append(step.duration_s)
        wanted.append(frozenset(r.req_id for r in run.requests if r.token_times_s[-1] <= end_s))
    source = "; ".join(dict.fromkeys(f"{run.header.model}, {run.label}" for run in runs))
    return Fit(cost=fit_steps(shapes, seconds, source), offsets=offsets(runs, wanted))


def validate(run: Run, fitted: Fit | None = None) -> Validation:
    """Predict a run and compare.

    Args:
        fitted: What `fit` made of other runs; None: fit the first half of this one and judge the second.

    Raises:
        RecordingError: the run has gaps, or holds what can't be simulated or judged.
        ValueError: see `fit`.
    """
    from_s = 0.0
    if fitted is None:
        from_s = median(request.arrival_s for request in run.requests) if run.requests else 0.0
        fitted = fit([run], [from_s])
    judged = [request.req_id for request in run.requests if request.arrival_s >= from_s]
    if not judged:
        raise RecordingError(f"{run.source}: the run of line {run.line} has no measured request to judge")
    measured, predicted = observe(run, judged), predict(run, fitted, judged)
    baseline = agreement.aggregates(measured.timelines)
    expected = agreement.aggregates(predicted.timelines)
    return Validation(
        run=run,
        fit=fitted,
        measured=measured,
        predicted=predicted,
        metrics={
            **compare(predicted, measured, from_s),
            **agreement.aggregate_errors(expected, baseline),
            **expected,
            "judged_requests": float(len(judged)),
            "intake_ms": fitted.offsets.intake_s * 1000,
            "delivery_ms": fitted.offsets.delivery_s * 1000,
            **({} if fitted.cost.quality is None else {"step_error_median": fitted.cost.quality.median_error}),
        },
        baseline=baseline,
    )


def observe(run: Run, req_ids: Sequence[str] | None = None) -> Observed:
    """Return what a recording says of these measured requests, or of all, and of all steps."""
    start = run.header.client_start_s
    wanted = None if req_ids is None else set(req_ids)
    timelines = tuple(
        RequestTimeline(req_id=r.req_id, arrival_s=r.arrival_s, token_times_s=r.token_times_s)
        for r in run.requests
        if wanted is None or r.req_id in wanted
    )
    batches = tuple(
        Batch(step.start_s - start, step.end_s - start, frozenset(map(run.client_id, step.req_ids)))
        for step in timed_steps(run)
    )
    return Observed(timelines=timelines, batches=batches)


def predict(run: Run, fitted: Fit, req_ids: Sequence[str]) -> Observed:
    """Simulate a run's arrivals with its scheduler and settings.

    Raises:
        RecordingError: the run has gaps, or holds what can't be simulated.
        ValueError: the settings can't be.
    """
    from vllm_ext.simulation.run import simulate_parts  # imports vLLM

    workload = RecordedWorkload(run, fitted.offsets)
    engine = engine_spec(run.header.settings)
    record = RecordSpec(token_times=True, events=_ALL_EVENTS, decisions=True)
    data, decisions = simulate_parts(
        SimulationSpec(engine=engine, record=record),
        workload=workload,
        cost=fitted.cost,
        num_blocks=run.header.settings.num_blocks,
    )
    start = run.header.client_start_s - workload.start_s
    rows = dict(zip(data.requests.texts("req_id"), data.requests.token_times, strict=True))
    arrivals = {request.req_id: request.arrival_s for request in run.requests}
    timelines = []
    for req_id in req_ids:
        times = rows.get(req_id)
        if times is None:
            raise RecordingError(f"{run.source}: {req_id} of the run of line {run.line} did not end in the simulation")
        shifted = [time - start + fitted.offsets.delivery_s for time in times]
        timelines.append(RequestTimeline(req_id=req_id, arrival_s=arrivals[req_id], token_times_s=shifted))
    steps = data.events.steps if data.events is not None else []
    busy = [decision for decision in decisions or [] if decision.scheduled]
    batches = tuple(
        Batch(step.start_s - start, step.end_s - start, frozenset(req_id for req_id, _ in decision.scheduled))
        for step, decision in zip(steps, busy, strict=True)
    )
    return Observed(timelines=tuple(timelines), batches=batches)


def compare(predicted: Observed, measured: Observed, from_s: float = 0.0) -> dict[str, float]:
    """Return errors per request and the agreement of decisions, those of steps that begin at ``from_s`` or later."""
    return {
        **agreement.request_errors(predicted.timelines, measured.timelines),
        **agreement.batch_agreement(predicted.batches, [b for b in measured.batches if b.start_s >= from_s]),
        "first_token_order_agreement": agreement.order_agreement(predicted.timelines, measured.timelines),
    }


def floors(runs: Sequence[Run]) -> dict[tuple[str, float], dict[str, float]]:
    """Return how far repeats of the same requests differ on the real engine, by system and load; medians over pairs.

    Empty where no two runs of a system and load serve the same requests at the same times.
    """
    groups: dict[tuple[str, float, tuple[object, ...]], list[Run]] = {}
    for run in runs:
        requests = tuple((r.req_id, r.source_id, r.arrival_s, r.output_tokens) for r in run.requests)
        groups.setdefault((run.header.system, run.header.load, requests), []).append(run)
    pairs: dict[tuple[str, float], list[dict[str, float]]] = {}
    for (system, load, _), group in groups.items():
        observed = [observe(run) for run in group]
        for one, other in combinations(observed, 2):
            pairs.setdefault((system, load), []).append(compare(one, other))
    return {key: medians(found) for key, found in pairs.items()}


def medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each metric that all have."""
    names = [name for name in found[0] if all(name in one for one in found)]
    return {name: median(one[name] for one in found) for name in names}


def engine_spec(settings: EngineSettings) -> EngineSpec:
    """Return the simulator's description of a recorded engine's settings."""
    options = {k: v for k, v in settings.options.items() if k not in ("system", "allow_oracle")}
    return EngineSpec(
        system=settings.system,
        options=options,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        prefix_caching=settings.prefix_caching,
        async_scheduling=settings.async_scheduling,
        watermark=settings.watermark,
    )
