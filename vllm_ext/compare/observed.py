"""What became of the same requests on each server, and what is compared of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run, a row for each request in the order of `all_requests`; times in seconds, nan where a request failed."""

    arrival_s: Floats
    """When it was to be sent, from the start of the run; nan of one that never was."""
    ttft_s: Floats
    """From then to its first token."""
    e2e_s: Floats
    """From then to its last."""
    longest_gap_s: Floats
    """Between two tokens; 0 of a single token."""
    output_tokens: Floats
    prompt_tokens: Floats
    on_time: Floats
    """1 where all objectives of the request were met, 0 where one was not; nan where it has none."""

    def __getitem__(self, rows: Any) -> Observed:
        return Observed(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    @classmethod
    def joined(cls, runs: Sequence[Observed]) -> Observed:
        """Return the rows of all runs, one after the other."""
        return cls(**{one.name: np.concatenate([getattr(run, one.name) for run in runs]) for one in fields(cls)})

    @property
    def normalised_s(self) -> Floats:
        """End-to-end latency per output token."""
        return np.asarray(self.e2e_s / self.output_tokens)

    @property
    def tpot_s(self) -> Floats:
        """Time per output token after the first; nan where there is no second."""
        return np.asarray((self.e2e_s - self.ttft_s) / np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan))

    @property
    def failed(self) -> int:
        """Requests that have no answer."""
        return int(np.isnan(self.e2e_s).sum())


@dataclass(frozen=True)
class Measure:
    """A number of a run: seconds, per token where it is normalised, shares, or requests/s."""

    name: str
    of: Callable[[Observed], float]
    higher: bool = False
    """Whether more is better."""


MEAN, P99, ON_TIME, GOODPUT = "mean e2e", "P99 e2e", "on time", "goodput"
MEASURES: Mapping[str, Measure] = {
    one.name: one
    for one in (
        Measure(MEAN, lambda run: float(run.e2e_s.mean())),
        Measure(P99, lambda run: float(np.percentile(run.e2e_s, 99))),
        Measure("mean TTFT", lambda run: float(run.ttft_s.mean())),
        Measure("P90 TTFT", lambda run: float(np.percentile(run.ttft_s, 90))),
        Measure("P99 TTFT", lambda run: float(np.percentile(run.ttft_s, 99))),
        Measure("mean TPOT", lambda run: float(np.nanmean(run.tpot_s)) if (run.output_tokens > 1).any() else 0.0),
        Measure("P99 longest gap", lambda run: float(np.percentile(run.longest_gap_s, 99))),
        Measure("mean normalised", lambda run: float(run.normalised_s.mean())),
        Measure(ON_TIME, lambda run: float(run.on_time.mean()), higher=True),
        Measure(GOODPUT, lambda run: float(run.on_time.sum() / _span_s(run)), higher=True),
    )
}


def measured(run: Observed) -> dict[str, float]:
    """Return the measures of a run: latencies of answered requests; those of objectives only where there are some."""
    answered = run[~np.isnan(run.e2e_s)]
    if not len(answered.e2e_s):
        return {}
    has_objectives = not np.isnan(answered.on_time).any()
    return {
        name: one.of(run if one.higher else answered)  # who has no answer has missed its objectives
        for name, one in MEASURES.items()
        if has_objectives or not one.higher
    }


def pooled(runs: Sequence[Observed]) -> dict[str, float]:
    """Return the measures of the requests of several runs; of what is counted by time the mean, as each has its own."""
    found = measured(Observed.joined(runs))
    if GOODPUT in found:
        found[GOODPUT] = float(np.mean([measured(run).get(GOODPUT, 0.0) for run in runs]))
    return found


def _span_s(run: Observed) -> float:
    return float(max(np.nanmax(run.arrival_s + run.e2e_s) - np.nanmin(run.arrival_s), 1e-9))
