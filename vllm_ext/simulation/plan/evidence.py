"""How a candidate compares with the server as it is: ratios and differences, and what must not get worse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from vllm_ext.report import intervals
from vllm_ext.report.intervals import MIN_SEEDS, Points, Ratio, half_width, interval
from vllm_ext.simulation.plan.candidates import Candidate
from vllm_ext.simulation.sweep.capacity import Constraint

MEAN, P99, TTFT_P90 = "e2e_mean_ms", "e2e_p99_ms", "ttft_p90_ms"
ATTAINMENT = "slo_attainment_fraction"
LEAST_TTFT, SHORT_TTFT_MS, TTFT_UP_TO = 0.85, 1000.0, 0.9
"""Up to the third of these loads the P90 of the TTFT may be no less than the first times as good as on the server as it
is, unless it is short: meets the objective, or without one the second, up to which a user's flow of thought stays
uninterrupted (Nielsen, Usability Engineering, 1993, section 5.5). A smaller budget spreads prompts over steps."""
FULLY_COUNTED, BEYOND = 1.5, 0.25
"""A gain beyond the first counts by the second: it is of a queue that grows, and as large as the run is long."""
JUDGED_UP_TO = 1.0
"""Loads beyond are shown and not judged: there the queue grows for as long as a run lasts, and so does every gain."""
WORTHWHILE = 0.01
"""A change that improves the objective by no more is no change."""
_PAYS = 0.95
_WATCHED = {
    P99: "P99 end-to-end", TTFT_P90: "P90 TTFT", "ttft_p99_ms": "P99 TTFT", "tbt_p99_ms": "P99 TBT",
    "tbt_max_ms": "longest gap", "waited_max_s": "longest wait",
}  # fmt: skip
"""Of what is worse by more than a twentieth the reader is told."""

Metrics = Mapping[str, float]


def times_better(ours: Metrics, base: Metrics, metric: str) -> float:
    """Return ``base / ours`` of what should be small."""
    return intervals.times_better(*(found.get(metric, math.nan) for found in (ours, base)))


def ratio(ours: Metrics, base: Metrics, metric: str) -> Ratio:
    """Compare two runs of the same requests.

    The value is of the whole runs. The interval is Student's over the logarithms of the windows' ratios: the windows
    of one run have the same requests as those of the other.
    """
    value = times_better(ours, base, metric)
    ratios = (times_better(ours, base, name) for name in _windows(ours, base, metric))
    logs = [math.log(found) for found in ratios if 0 < found < math.inf]
    if len(logs) < MIN_SEEDS:
        return Ratio(value, 0.0, math.inf)
    found = interval(logs)
    return Ratio(value, found.low, found.high)


def compared(ours: Metrics, base: Metrics, metric: str) -> Ratio | Points:
    """Compare two runs of the same requests: a latency by `ratio`, the share of met objectives by the difference.

    A ratio of shares says nothing where the server as it is meets none. The interval is Student's over the windows'
    differences; of fewer than two windows it is all that shares can differ by.
    """
    if metric != ATTAINMENT:
        return ratio(ours, base, metric)
    value = 100 * (ours.get(metric, 0.0) - base.get(metric, 0.0))
    found = [100 * (ours[name] - base[name]) for name in _windows(ours, base, metric)]
    if len(found) < MIN_SEEDS:
        return Points(value, -100.0, 100.0)
    middle, half = mean(found), half_width(found)
    return Points(value, max(-100.0, middle - half), min(100.0, middle + half))


def _windows(ours: Metrics, base: Metrics, metric: str) -> Iterator[str]:
    """Yield the names of a metric in the windows that both runs have."""
    number = 0
    while (name := f"window_{number}.{metric}") in ours and name in base:
        yield name
        number += 1


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is wanted, and what must not be paid for it."""

    with_slo: bool
    """Optimise the share of requests that meet their objectives; else the mean end-to-end latency."""
    tolerance: float = 0.05
    """By how much the P99 of the end-to-end latency may be worse than on the server as it is."""
    short_ttft_ms: float = SHORT_TTFT_MS
    """The objective for the TTFT, if there is one."""
    allow_fp8_kv: bool = False
    """Whether KV in 8 bits may be chosen, which changes the model's answers; else it is shown only."""
    constraints: tuple[Constraint, ...] = ()
    """What must hold at ``own_load``."""
    own_load: float = 0.0
    """The trace's own load, as a multiple of saturation."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is optimised; each tells apart what those before it do not."""
        return (ATTAINMENT, MEAN) if self.with_slo else (MEAN,)

    def score(self, ours: Mapping[float, Metrics], base: Mapping[float, Metrics]) -> float:
        """Return the mean of the logarithms of the improvement over the loads that are judged; 0 is as it is.

        With objectives, how much larger the share is that meets them; what both meet alike is told apart by a tenth of
        the logarithm of the mean latency's.
        """
        loads = [load for load in base if load <= JUDGED_UP_TO and load in ours]
        if not loads:
            return -math.inf
        total = 0.0
        for load in loads:
            latency = times_better(ours[load], base[load], MEAN)
            if not 0 < latency < math.inf:
                return -math.inf
            gain = min(math.log(latency), math.log(FULLY_COUNTED))
            gain += BEYOND * max(0.0, math.log(latency / FULLY_COUNTED))
            total += gain * (0.1 if self.with_slo else 1.0)
            if self.with_slo:
                total += ours[load].get(ATTAINMENT, 0.0) - base[load].get(ATTAINMENT, 0.0)
        return total / len(loads)

    def told(self, score: float) -> str:
        """Return what a score of the search means."""
        if self.with_slo:
            return f"{100 * score:+.1f} points of met objectives, with a tenth for the mean latency, in the search"
        return f"{math.exp(score):.2f} times as good as the server as it is, in the search"

    def broken(self, ours: Mapping[float, Metrics], base: Mapping[float, Metrics], slack: float = 0.0) -> str:
        """Return which limit a candidate breaks; empty if none.

        Args:
            ours: By load.
            base: The server as it is.
            slack: Added to the tolerances, where runs are short and noisy.
        """
        for load in sorted(base):
            if load > JUDGED_UP_TO or load not in ours:
                continue
            tail, first = (times_better(ours[load], base[load], metric) for metric in (P99, TTFT_P90))
            if tail < 1 / (1 + self.tolerance) - slack:
                return f"{_WATCHED[P99]} {1 / tail:.2f} times as long at {load:g} of saturation"
            is_short = ours[load][TTFT_P90] <= self.short_ttft_ms * (1 + slack)
            if load <= TTFT_UP_TO and first < LEAST_TTFT - slack and not is_short:
                return f"{_WATCHED[TTFT_P90]} {1 / first:.2f} times as long at {load:g} of saturation"
        if (own := ours.get(self.own_load)) is not None:
            for constraint in self.constraints:
                if constraint.metric not in own and constraint.metric in base.get(self.own_load, {}):
                    return f"{constraint} was not measured at your load"
                if not constraint.meets(own):
                    return f"{constraint} does not hold at your load: {own.get(constraint.metric, math.nan):.4g}"
        return ""

    def with_own(self, loads: Sequence[float]) -> tuple[float, ...]:
        """Return loads, with the trace's own among them where something must hold there."""
        return tuple(sorted({*loads, self.own_load})) if self.constraints else tuple(loads)


def who_pays(ours: Mapping[float, Metrics], base: Mapping[float, Metrics]) -> list[str]:
    """Return what is worse by more than a twentieth, a line for each measure, with the loads."""
    lines = []
    for metric, label in _WATCHED.items():
        worse = {
            load: found
            for load in sorted(base)
            if load in ours and metric in ours[load] and metric in base[load]
            and (found := times_better(ours[load], base[load], metric)) < _PAYS
        }  # fmt: skip
        if worse:
            at = ", ".join(f"{1 / found:.2f} times at {load:g}" for load, found in worse.items())
            lines.append(f"{label} is longer: {at}")
    return lines


def best(scores: Mapping[Candidate, float]) -> Candidate:
    """Return the candidate of the highest score, at least one; of those within `WORTHWHILE` what changes least."""
    top = max(scores.values())
    alike = [candidate for candidate, score in scores.items() if score >= top - WORTHWHILE]
    return min(alike, key=lambda candidate: (len(candidate.changed), -scores[candidate]))
