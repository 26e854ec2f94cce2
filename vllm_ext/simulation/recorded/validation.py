"""The simulator against the real engine: predict a recorded run from its arrivals, and compare with what happened.

A fit takes two things from recorded steps: a cost model (`cost.fitted.fit_steps`) and two constants for what lies
between a client and the scheduler (`recorded.run.offsets`). A prediction then runs the same scheduler with the same
settings in virtual time on the recorded arrivals, prompts and lengths. Nothing else is adjusted.

What is predicted is never what was fitted: the fit comes from another recording, or from the first half of the run in
time, and then only requests of the second half are judged. The requests served before the measured part are simulated
too, because schedulers learn from them; they are neither judged nor needed for the offsets.

How far apart two runs of the real engine are, given the same requests, bounds what any prediction can reach; where a
recording holds repeats of the same requests, that distance is reported beside the errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, machine, versions
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.fitted import Fitted, fit_steps
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.measure.latency import RequestTimeline
from vllm_ext.simulation.recorded import agreement, recording
from vllm_ext.simulation.recorded.agreement import Batch, Observed, compare
from vllm_ext.simulation.recorded.recording import EngineSettings, RecordingError, Run
from vllm_ext.simulation.recorded.run import Offsets, RecordedWorkload, offsets, timed_steps
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec

if TYPE_CHECKING:
    from vllm_ext.simulation.recorded.replay import Replay

GOALS = {"e2e_error_median": 0.07, "ttft_error_median": 0.15}
"""Metric -> how large it may be for all requests together, and for those of every system and load."""
ALL = "all"
"""Instead of a system and load: all judged requests together."""
MEASURED, REPEAT = "measured", "another run of the real engine"
"""Baselines: what the real engine measured, and how far two of its runs with the same requests differ."""
EQUAL_STEPS = "replayed_equal_steps_fraction"
_COLUMNS = {
    "e2e_error_median": "e2e error",
    "e2e_error_p90": "P90",
    "ttft_error_median": "ttft error",
    "ttft_error_p90": "P90",
    "tbt_mean_error_median": "tbt error",
    "e2e_mean_error": "mean e2e",
    "ttft_mean_error": "mean ttft",
    "normalised_latency_mean_error": "mean norm",
    "batch_jaccard_mean": "same batch",
    EQUAL_STEPS: "replayed equal",
}
_OF_A_RUN = {"system", "load", "repeat", "settings", "facts"}
_ALL_EVENTS = 1 << 40
_ByLoad = dict[tuple[str, float], dict[str, float]]
"""Metrics by system and load."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was learnt of the machine."""

    cost: Fitted
    offsets: Offsets


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


@dataclass(frozen=True, kw_only=True)
class Report:
    """A recording beside its predictions."""

    validations: Sequence[Validation]
    replays: Sequence[Replay]
    """Of the runs without a KV connector, or none at all."""
    groups: _ByLoad
    """The metrics: medians over repeats, as the next."""
    measured: _ByLoad
    """The measured aggregates."""
    floors: _ByLoad
    """See `floors`."""

    def pooled(self) -> dict[str, float]:
        """Return the errors over the requests of all runs together, so that each request counts the same."""
        predicted = [timeline for one in self.validations for timeline in one.predicted.timelines]
        measured = [timeline for one in self.validations for timeline in one.measured.timelines]
        return agreement.request_errors(predicted, measured)

    def divergences(self) -> list[str]:
        """Return what differed first in each replay that was not equal, in words."""
        return [str(replay.divergence) for replay in self.replays if replay.divergence is not None]


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


def validate(run: Run, fitted: Fit | None = None, hardware: HardwareSpec | None = None) -> Validation:
    """Predict a run and compare.

    Args:
        fitted: What `fit` made of other runs; None: fit the first half of this one and judge the second.
        hardware: As for `predict`.

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
    measured, predicted = observe(run, judged), predict(run, fitted, judged, hardware)
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
    """Return what a recording says of these measured requests, in this order, or of all, and of all steps."""
    start = run.header.client_start_s
    found = {r.req_id: r for r in run.requests}
    timelines = tuple(
        RequestTimeline(req_id=r.req_id, arrival_s=r.arrival_s, token_times_s=r.token_times_s)
        for r in (found[req_id] for req_id in (found if req_ids is None else req_ids))
    )
    batches = tuple(
        Batch(step.start_s - start, step.end_s - start, frozenset(map(run.client_id, step.req_ids)))
        for step in timed_steps(run)
    )
    return Observed(timelines=timelines, batches=batches)


def predict(run: Run, fitted: Fit, req_ids: Sequence[str], hardware: HardwareSpec | None = None) -> Observed:
    """Simulate a run's arrivals with its scheduler and settings.

    Args:
        hardware: Of the engine: how many bytes its KV has and how fast they are copied, which only a KV tier asks for.

    Raises:
        RecordingError: the run has gaps, or holds what can't be simulated; it has a KV tier, and there is no hardware.
        ValueError: the settings can't be.
    """
    from vllm_ext.simulation.run import simulate  # imports vLLM

    if hardware is None and run.header.settings.connector is not None:
        raise RecordingError(
            f"{run.source}: the run of line {run.line} has a KV tier; say by --model and --device what its copies move"
        )
    workload = RecordedWorkload(run, fitted.offsets)
    engine = engine_spec(run.header.settings)
    record = RecordSpec(token_times=True, events=_ALL_EVENTS, decisions=True)
    data = simulate(
        SimulationSpec(engine=engine, record=record, hardware=hardware or HardwareSpec()),
        workload=workload,
        cost=fitted.cost,
    )
    start = run.header.client_start_s - workload.start_s
    rows = dict(zip(data.requests.column("req_id").tolist(), data.requests.token_times, strict=True))
    arrivals = {request.req_id: request.arrival_s for request in run.requests}
    timelines = []
    for req_id in req_ids:
        times = rows.get(req_id)
        if times is None:
            raise RecordingError(f"{run.source}: {req_id} of the run of line {run.line} did not end in the simulation")
        shifted = [time - start + fitted.offsets.delivery_s for time in times]
        timelines.append(RequestTimeline(req_id=req_id, arrival_s=arrivals[req_id], token_times_s=shifted))
    steps = data.events.steps if data.events is not None else []
    busy = [decision for decision in data.decisions or () if decision.scheduled]
    batches = tuple(
        Batch(step.start_s - start, step.end_s - start, frozenset(req_id for req_id, _ in decision.scheduled))
        for step, decision in zip(steps, busy, strict=True)
    )
    return Observed(timelines=tuple(timelines), batches=batches)


def floors(runs: Sequence[Run]) -> _ByLoad:
    """Return how far repeats of the same requests differ on the real engine: medians over pairs.

    Empty where no two runs of a system and load serve the same requests. Their moments may differ: who goes on with a
    conversation asks when the answer before is there.
    """

    def asked(run: Run) -> Any:
        requests = {(r.req_id, r.source_id, r.prompt_tokens, r.output_tokens) for r in run.requests}
        return run.header.system, run.header.load, requests

    pairs = [(one, other) for one, other in combinations(runs, 2) if asked(one) == asked(other)]
    return _medians(
        (one, compare(observe(one), observe(other, [request.req_id for request in one.requests])))
        for one, other in pairs
    )


def _medians(found: Iterable[tuple[Run, Mapping[str, float]]]) -> _ByLoad:
    """Return the median of each metric that all runs of a system and load have."""
    groups: dict[tuple[str, float], list[Mapping[str, float]]] = {}
    for run, metrics in found:
        groups.setdefault((run.header.system, run.header.load), []).append(metrics)
    return {
        key: {name: median(one[name] for one in group) for name in group[0] if all(name in one for one in group)}
        for key, group in groups.items()
    }


def engine_spec(settings: EngineSettings) -> EngineSpec:
    """Return the simulator's description of a recorded engine's settings."""
    options = {k: v for k, v in settings.options.items() if k not in ("system", "allow_oracle")}
    same = settings.model_dump(include=set(EngineSpec.model_fields) - {"options"})
    return EngineSpec(options=options, **same)


def make_report(
    runs: Sequence[Run], fit_on: Sequence[Run] | None = None, *, replays: bool = True,
    hardware: HardwareSpec | None = None,
) -> Report:  # fmt: skip
    """Validate every run.

    Args:
        fit_on: Runs of another recording to fit on, those of the same system where there are any; None: see `validate`.
        replays: Also repeat every run exactly and compare all decisions, but those with a KV connector, whose copies
            end when the machine has done them.
        hardware: As for `predict`.

    Raises:
        RecordingError, ValueError: a run can't be replayed, simulated or judged, or the fit has too little to go by.
    """
    from vllm_ext.simulation.recorded.replay import replay  # imports vLLM

    fits: dict[str, Fit] = {}
    if fit_on is not None:
        for system in dict.fromkeys(run.header.system for run in runs):
            fits[system] = fit([run for run in fit_on if run.header.system == system] or fit_on)
    validations = [validate(run, fits.get(run.header.system), hardware) for run in runs]
    repeated = [replay(run) if replays and run.header.settings.connector is None else None for run in runs]
    equal = [{} if one is None else {EQUAL_STEPS: one.steps / max(1, one.total_steps)} for one in repeated]
    return Report(
        validations=validations,
        replays=[one for one in repeated if one is not None],
        groups=_medians((one.run, {**one.metrics, **same}) for one, same in zip(validations, equal, strict=True)),
        measured=_medians((one.run, one.baseline) for one in validations),
        floors=floors(runs),
    )


def make_result(
    report: Report, path: Path, fit_path: Path | None, *, name: str, command: str, seed: int = 0, note: str = ""
) -> Result:
    """Return the result; a goal that is missed says what the real engine itself differs by.

    Args:
        path: The recording, for its checksum.
        fit_path: The recording that was fitted, if another one.
        note: Why a goal is missed, if one is; put before the facts.
    """
    runs = [one.run for one in report.validations]
    judged = {ALL: (report.pooled(), list(report.floors.values()))}
    for (system, load), values in report.groups.items():
        floor = report.floors.get((system, load))
        judged[f"{system}.load_{load:g}"] = (values, [] if floor is None else [floor])
    metrics = {f"{prefix}.{key}": value for prefix, (values, _) in judged.items() for key, value in values.items()}
    claims = [
        Claim(
            name=f"{prefix}.{metric}",
            value=values[metric],
            op="<=",
            goal=limit,
            facts=f"{note} {_noise_in_words(noise, metric)}".strip(),
        )
        for prefix, (values, noise) in judged.items()
        for metric, limit in GOALS.items()
    ]
    return Result(
        name=name,
        command=command,
        config=_config(runs, fit_path),
        details={"runs": [{"requests": len(run.requests), **run.header.model_dump(include=_OF_A_RUN)} for run in runs]},
        seed=seed,
        workload=Workload(
            name=path.name,
            rows=sum(len(run.requests) for run in runs),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        ),
        metrics=metrics,
        baselines={
            MEASURED: _flat(report.measured),
            **({REPEAT: _flat(report.floors)} if report.floors else {}),
        },
        claims=claims,
        versions=versions(),
        machine=machine(),
    )


def make_table(report: Report) -> Table:
    """Return a line per system and load, errors in percent, and one for all requests together.

    Below each system and load stands the distance of two runs of the real engine, where there are repeats.
    """
    rows: list[list[object]] = []
    for (system, load), values in report.groups.items():
        rows.append([f"{load:g}", system, *(_percent(values.get(key)) for key in _COLUMNS)])
        floor = report.floors.get((system, load))
        if floor is not None:
            rows.append(["", "  real engine, again", *(_percent(floor.get(key)) for key in _COLUMNS)])
    pooled = report.pooled()
    rows.append([ALL, "", *(_percent(pooled.get(key)) for key in _COLUMNS)])
    return Table(["load", "system (%)", *_COLUMNS.values()], rows)


def load(path: Path, system: str | None = None) -> list[Run]:
    """Read a recording, perhaps only the runs of one system.

    Raises:
        OSError, RecordingError: as `recording.read`, or it holds no run of this system.
    """
    runs = recording.read(path)
    found = [run for run in runs if system in (None, run.header.system)]
    if not found:
        known = ", ".join(dict.fromkeys(run.header.system for run in runs))
        raise RecordingError(f"system={system!r}: the recording holds {known}")
    return found


def _config(runs: Sequence[Run], fit_path: Path | None) -> dict[str, Any]:
    return {
        "fitted_on": fit_path.name if fit_path is not None else "the first half of each run, in time",
        "judged": "all measured requests" if fit_path is not None else "requests due in the second half",
        "recorded_with": runs[0].header.versions,
        "model": runs[0].header.model,
    }


def _noise_in_words(floors: Sequence[Mapping[str, float]], metric: str) -> str:
    found = [floor[metric] for floor in floors]
    if not found:
        return "The recording holds no repeats of the same requests to tell the noise of the machine from."
    apart = "Two runs of the real engine with the same requests differ by"
    if len(found) == 1:
        return f"{apart} {found[0]:.1%} in this metric."
    return f"{apart} {min(found):.1%} to {max(found):.1%} in this metric, by system and load."


def _flat(groups: Mapping[tuple[str, float], Mapping[str, float]]) -> dict[str, float]:
    return {
        f"{system}.load_{load:g}.{key}": value
        for (system, load), values in groups.items()
        for key, value in values.items()
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 1)
