"""From the description of a workload to the workload."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from vllm_ext.datasets import DatasetError
from vllm_ext.simulation import arrivals
from vllm_ext.simulation.requests import Workload
from vllm_ext.simulation.workloads.generated import GeneratedWorkload
from vllm_ext.simulation.workloads.randomness import Purpose, generator
from vllm_ext.simulation.workloads.sources import Source, read
from vllm_ext.simulation.workloads.spec import WorkloadSpec

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
    context = max_model_len if spec.max_model_len is None else spec.max_model_len
    spec = WorkloadSpec.model_validate(spec.model_dump() | {"max_model_len": context})
    source = read(spec)
    limit = min((bound for bound in (spec.num_requests, source.size) if bound is not None), default=None)
    if limit is None and spec.duration_s is None:
        raise ValueError(f"num_requests=None, duration_s=None: one must be given; {source.name} has no end")
    if limit is None and spec.arrivals == "at-once":
        raise ValueError(f"num_requests=None: must be given for arrivals='at-once'; {source.name} has no end")
    think_s = source.think_s if spec.think_s is None else spec.think_s
    times = _times(spec, source)
    if think_s is None and source.conversations:
        raise ValueError("think_s=None: must be given for recorded conversations, in seconds; Pensieve: 60")
    _check_supply(spec, source, times)
    return GeneratedWorkload(spec, source, times, limit, think_s or 0.0)


def _times(spec: WorkloadSpec, source: Source) -> Times | None:
    """Return what begins the arrival process anew; None for a closed loop."""
    if spec.arrivals == "closed-loop":
        return None
    if spec.arrivals == "at-once":
        return lambda: itertools.repeat(0.0)
    if spec.arrivals == "recorded":
        recorded = _recorded_times(source, spec.rate_per_s)
        return lambda: iter(recorded)
    assert spec.rate_per_s is not None, "the description was checked"
    rate_per_s = spec.rate_per_s / (source.mean_turns if spec.rate_counts == "requests" else 1.0)
    return lambda: arrivals.stream(generator(spec.seed, Purpose.ARRIVALS), rate_per_s=rate_per_s, cv=spec.cv)


def _recorded_times(source: Source, rate_per_s: float | None) -> list[float]:
    """Recorded times from the first arrival on; stretched to a mean rate over the gaps, if one is wanted."""
    known = [time_s for time_s in source.arrivals_s if time_s is not None]
    if len(known) < len(source.arrivals_s):
        raise ValueError(f"arrivals='recorded': {source.name} has no arrival time for every request")
    times = np.array(known) - known[0]
    gaps = np.diff(times)
    if (late := np.flatnonzero(gaps < 0)).size:
        raise DatasetError(
            f"{source.name}: usable row {late[0] + 2}: arrives {-gaps[late[0]]:g} s before the row above it; "
            f"sort the file by time"
        )
    if rate_per_s is not None and gaps.size:
        if times[-1] == 0:
            raise ValueError(f"rate_per_s={rate_per_s}: must be left out; all requests of {source.name} arrive at once")
        times *= gaps.size / rate_per_s / times[-1]
    found: list[float] = times.tolist()
    return found


def _check_supply(spec: WorkloadSpec, source: Source, times: Times | None) -> None:
    """A file that runs out early would change the load without a word."""
    if source.size is None:
        return
    remedy = f"{source.name} has {source.size} usable rows; ask for less, or set sample='with-replacement'"
    if (spec.num_requests or 0) > source.size:
        raise ValueError(f"num_requests={spec.num_requests}: too many, {remedy}")
    if times is None or spec.arrivals == "recorded" or spec.num_requests is not None or spec.duration_s is None:
        return
    first_missing = next(itertools.islice(times(), source.size, None))
    if first_missing < spec.duration_s:
        raise ValueError(f"duration_s={spec.duration_s}: too long, after {first_missing:.1f} s {remedy}")
