"""From the description of a workload to the workload."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from vllm_ext.datasets import DatasetError
from vllm_ext.simulation import arrivals
from vllm_ext.simulation.requests import Workload
from vllm_ext.simulation.workloads.generated import GeneratedWorkload
from vllm_ext.simulation.workloads.randomness import Purpose, sequence
from vllm_ext.simulation.workloads.reading import read
from vllm_ext.simulation.workloads.sessions import Fitting, MixedSource, RecordedSource, Source
from vllm_ext.simulation.workloads.spec import SourceSpec, WorkloadSpec

Times = Callable[[], Iterator[float]]


def build(spec: WorkloadSpec, *, max_model_len: int | None = None) -> Workload:
    """Return a workload; files are read here, presets are drawn as requests are asked for.

    Args:
        spec: What to build; checked again, for a changed copy of a pydantic model is not.
        max_model_len: The model's context, used where the description leaves it open.

    Raises:
        ValueError: (DatasetError and pydantic's ValidationError included) a field does not fit the others, a file is
            unreadable or malformed, or it has fewer rows than requests are wanted.
    """
    spec = WorkloadSpec.model_validate(spec.model_dump())
    if spec.max_model_len is None and max_model_len is not None:
        spec = WorkloadSpec.model_validate(spec.model_dump() | {"max_model_len": max_model_len})
    source = _source(spec)
    _check_end(spec, source)
    times = _times(spec, source)
    _check_supply(spec, source, times)
    return GeneratedWorkload(spec, source, times, _limit(spec, source), _think_s(spec, source))


def _source(spec: WorkloadSpec) -> Source:
    if not spec.mix:
        source: Source = read(spec, _fitting(spec, spec), seed=spec.seed, part=0)
        next(source.sessions())  # filters that leave nothing are to be noticed before the run
        return source
    parts: list[Source] = []
    for index, part in enumerate(spec.mix):
        source = read(part, _fitting(spec, part), seed=spec.seed, part=index)
        if source.size is not None:
            raise ValueError(f"sample={part.sample!r} of {source.name} in mix: must be 'with-replacement'")
        next(source.sessions())
        parts.append(source)
    return MixedSource(parts, [part.weight for part in spec.mix], [part.tier for part in spec.mix], spec.seed)


def _fitting(spec: WorkloadSpec, source: SourceSpec) -> Fitting:
    context = None if spec.max_model_len is None else spec.max_model_len - spec.system_prompt_tokens
    if context is not None and context < 2:
        raise ValueError(
            f"system_prompt_tokens={spec.system_prompt_tokens}: must leave at least 2 tokens of "
            f"max_model_len={spec.max_model_len}"
        )
    return Fitting(
        spec=source,
        context_tokens=context,
        cut=spec.over_context == "cut",
        most_output_tokens=spec.max_tokens if isinstance(spec.max_tokens, int) else None,
    )


def _times(spec: WorkloadSpec, source: Source) -> Times | None:
    rate, seed = spec.rate_per_s, sequence(spec.seed, Purpose.ARRIVALS)
    if spec.arrivals == "closed-loop":
        return None
    if spec.arrivals == "at-once":
        return lambda: itertools.repeat(0.0)
    if spec.arrivals == "recorded":
        recorded = _recorded_times(source, rate)
        return lambda: iter(recorded)
    if rate is None:
        raise ValueError(f"rate_per_s=None: must be given for arrivals={spec.arrivals!r}")
    if spec.rate_counts == "requests":
        rate /= source.mean_turns
    cv = spec.cv if spec.arrivals == "gamma" else 1.0
    return lambda: arrivals.stream(rate_per_s=rate, seed=seed, cv=cv)


def _recorded_times(source: Source, rate_per_s: float | None) -> list[float]:
    """Recorded times from the first arrival on; stretched to a rate, if one is wanted."""
    found = source.arrival_times_s if isinstance(source, RecordedSource) else [None]
    known = [time_s for time_s in found if time_s is not None]
    if len(known) < len(found):
        raise ValueError(f"arrivals='recorded': {source.name} has no arrival time for every request")
    times = np.array(known) - known[0]
    if (late := np.flatnonzero(np.diff(times) < 0)).size:
        raise DatasetError(
            f"{source.name}: usable row {late[0] + 2}: arrives {-np.diff(times)[late[0]]:g} s before the row above it; "
            f"sort the file by time"
        )
    if rate_per_s is not None and len(times) > 1:
        times = arrivals.rescaled(times, rate_per_s=rate_per_s)
    return [float(time_s) for time_s in times]


def _think_s(spec: WorkloadSpec, source: Source) -> float | None:
    think_s = spec.think_s if spec.think_s is not None else source.think_s
    if think_s is None and source.conversations:
        raise ValueError("think_s=None: must be given for recorded conversations, in seconds; Pensieve: 60")
    return think_s


def _limit(spec: WorkloadSpec, source: Source) -> int | None:
    bounds = [bound for bound in (spec.num_requests, source.size) if bound is not None]
    return min(bounds, default=None)


def _check_end(spec: WorkloadSpec, source: Source) -> None:
    if _limit(spec, source) is not None:
        return
    if spec.duration_s is None:
        raise ValueError(f"num_requests=None, duration_s=None: one must be given; {source.name} has no end")
    if spec.arrivals == "at-once":
        raise ValueError(f"num_requests=None: must be given for arrivals='at-once'; {source.name} has no end")


def _check_supply(spec: WorkloadSpec, source: Source, times: Times | None) -> None:
    """A file that runs out early would change the load without a word."""
    if source.size is None:
        return
    remedy = f"{source.name} has {source.size} usable rows; ask for less, or set sample='with-replacement'"
    if (spec.num_requests or 0) > source.size:
        raise ValueError(f"num_requests={spec.num_requests}: too many, {remedy}")
    if times is None or spec.arrivals == "recorded" or spec.num_requests is not None:
        return
    if spec.duration_s is not None:
        first_missing = next(itertools.islice(times(), source.size, None))
        if first_missing < spec.duration_s:
            raise ValueError(f"duration_s={spec.duration_s}: too long, after {first_missing:.1f} s {remedy}")
