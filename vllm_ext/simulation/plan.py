"""Which system for this trace on this hardware? Every candidate from light load to overload, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BASELINE = "vLLM default"
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Multiples of the trace's own rate."""
WORTHWHILE = 0.05
"""A system helps at a load if it improves the objective by more than this fraction: less is within what a cost model
and another hour of traffic would change."""
ATTAINMENT = "slo_attainment_fraction"
LATENCY = "normalised_latency_mean_ms_per_token"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run vLLM."""

    name: str
    system: str
    """What the simulator calls it: ``upstream-fcfs`` or a row of the systems table."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine settings that differ from the defaults, by field of `EngineSpec`."""
    flags: tuple[str, ...] = ()
    """Flags of ``vllm serve`` that bring it about."""
    note: str = ""
    """What it needs to behave as simulated."""


CANDIDATES = (
    Candidate(name=BASELINE, system="upstream-fcfs"),
    Candidate(
        name="vLLM tuned",
        system="upstream-fcfs",
        engine={"watermark": 0.05},
        flags=("--watermark", "0.05"),
        note="a reserve of 5 % of the KV blocks saves preemptions when memory is short",
    ),
    Candidate(
        name="alise",
        system="alise",
        flags=("--scheduler-cls", "alise"),
        note="lengths predicted from the history of finished requests only, learnt during the trace",
    ),
    Candidate(
        name="alise, no preemption",
        system="alise",
        engine={"options": {"admission": {"preempt": False}}},
        flags=("--scheduler-cls", "alise", "--no-ext-preemption"),
        note="as alise, but running requests keep their seats",
    ),
    *(
        Candidate(name=name, system=name, flags=("--scheduler-cls", name), note=note)
        for name, note in (
            ("sarathi", "its token budget follows the objective for the time between tokens (--tbt-slo-ms)"),
            ("past-future", "lengths of finished requests are learnt during the trace"),
            ("accelgen", "requests need objectives of their own, or --ttft-slo-ms and --tbt-slo-ms"),
            ("auto", "lengths are learnt during the trace; objectives help it, but are not needed"),
        )
    ),
)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is optimised: the share of requests that meet all their SLOs, or mean normalised latency without SLOs."""

    with_slo: bool
    min_attainment: float = 0.9
    """A load counts as carried if at least this share of the requests meets all SLOs."""

    @property
    def metric(self) -> str:
        """The metric looked at."""
        return ATTAINMENT if self.with_slo else LATENCY

    def improvement(self, ours: Mapping[str, float], base: Mapping[str, float]) -> float:
        """Return by how much ``ours`` is better than ``base``: points of attainment, or fraction of latency saved."""
        if self.with_slo:
            return ours[ATTAINMENT] - base[ATTAINMENT]
        return 1 - ours[LATENCY] / base[LATENCY] if base[LATENCY] > 0 else 0.0

    def carried(self, metrics: Mapping[str, float]) -> bool:
        """Whether the SLOs hold well enough; without SLOs every load is carried somehow."""
        return not self.with_slo or metrics[ATTAINMENT] >= self.min_attainment


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do."""

    choice: Candidate
    reason: str
    helps_at: tuple[float, ...]
    """Loads at which the choice is worth it."""
    nothing_helps_at: tuple[float, ...]
    """Loads at which no candidate beats vLLM's defaults by more than `WORTHWHILE`."""
    carried_load: Mapping[str, float]
    """Candidate -> highest simulated load up to which its SLOs held; 0 if at none. Empty without SLOs."""


def decide(
    table: Mapping[tuple[str, float], Mapping[str, float]],
    candidates: Sequence[Candidate],
    loads: Sequence[float],
    objective: Objective,
) -> Verdict:
    """Choose a candidate.

    With SLOs the one that carries the highest load wins; among equals, and without SLOs, the one that improves most on
    vLLM's defaults, summed over loads up to the trace's own rate twice as heavily as beyond. A candidate that makes the
    trace's own load worse by more than `WORTHWHILE` is out, and the defaults stay unless something is worthwhile.

    Args:
        table: (candidate, load) -> metrics of `metrics.summarise`.
        candidates: In order of preference among equals; one of them is called `BASELINE`.
        loads: Multiples of the trace's rate, increasing.
        objective: What counts.

    Raises:
        ValueError: the baseline is not among the candidates.
    """
    if BASELINE not in {c.name for c in candidates}:
        raise ValueError(f"candidates: {BASELINE!r} must be among them, to be compared with")
    gains = {
        (c.name, load): objective.improvement(table[c.name, load], table[BASELINE, load])
        for c in candidates
        for load in loads
    }
    carried = {c.name: _carried_load(table, c.name, loads, objective) for c in candidates} if objective.with_slo else {}
    own = min(loads, key=lambda load: abs(load - 1.0))
    eligible = [c for c in candidates if gains[c.name, own] >= -WORTHWHILE]

    def score(candidate: Candidate) -> tuple[float, float]:
        weighted = sum(gains[candidate.name, load] * (2 if load <= 1 else 1) for load in loads)
        return (carried.get(candidate.name, 0.0), round(weighted, 9))

    best = max(eligible, key=score)  # max keeps the first among equals
    helps_at = tuple(load for load in loads if gains[best.name, load] > WORTHWHILE)
    more_load = carried.get(best.name, 0.0) > carried.get(BASELINE, 0.0)
    if best.name != BASELINE and not helps_at and not more_load:
        best = next(c for c in candidates if c.name == BASELINE)
        helps_at = ()
    nothing = tuple(load for load in loads if max(gains[c.name, load] for c in candidates) <= WORTHWHILE)
    return Verdict(
        choice=best,
        reason=_reason(best, gains, carried, own, helps_at, objective),
        helps_at=helps_at,
        nothing_helps_at=nothing,
        carried_load=carried,
    )


def _carried_load(
    table: Mapping[tuple[str, float], Mapping[str, float]], name: str, loads: Sequence[float], objective: Objective
) -> float:
    highest = 0.0
    for load in loads:
        if not objective.carried(table[name, load]):
            break
        highest = load
    return highest


def _reason(
    best: Candidate,
    gains: Mapping[tuple[str, float], float],
    carried: Mapping[str, float],
    own: float,
    helps_at: Sequence[float],
    objective: Objective,
) -> str:
    if best.name == BASELINE:
        return (
            "no candidate improves on vLLM's defaults by more than 5 % at any simulated load without costing at yours"
        )
    unit = "more requests meet their SLOs" if objective.with_slo else "less mean normalised latency"
    parts = [f"{100 * gains[best.name, own]:+.0f} % {unit} at your load"]
    if helps_at:
        peak = max(helps_at, key=lambda load: gains[best.name, load])
        parts.append(f"{100 * gains[best.name, peak]:+.0f} % at {peak:g} times your load")
    if carried:
        parts.append(
            f"SLOs hold up to {carried[best.name]:g} times your load ({carried[BASELINE]:g} with the defaults)"
        )
    return "; ".join(parts)
