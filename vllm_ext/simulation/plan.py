"""Which system for this trace on this hardware? Every candidate from light load to overload, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ext import config, systems
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM
from vllm_ext.simulation.sweep.paths import UPSTREAM, checked, with_values
from vllm_ext.simulation.sweep.points import Plan, run_plans
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore
from vllm_ext.systems_own import split

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
    """Engine settings that differ from the defaults, by path within `EngineSpec`."""
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
        engine={"options.admission.preempt": False},
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
class Row:
    """A candidate at a load."""

    candidate: Candidate
    load: float
    outcome: Outcome
    skipped: bool = False
    """Whether it was not run, as the outcome is that of vLLM's defaults: nobody waited, so no order mattered."""


def with_own_policies(base: SimulationSpec) -> tuple[SimulationSpec, tuple[Candidate, ...]]:
    """Return a run without the user's own policies, and all candidates: they make one, in the row of defaults."""
    options = dict(base.engine.options)
    named = options.pop("policies", None)
    if not named:
        return base, CANDIDATES
    own = Candidate(
        name=" and ".join(split(text)[1] for text in named),
        system="fcfs",
        engine={"options.policies": named},
        flags=("--policy", ",".join(named)),
    )
    engine = base.engine.model_copy(update={"options": options})
    return base.model_copy(update={"engine": engine}), (*CANDIDATES, own)


def compare(
    base: SimulationSpec,
    own_rate: float,
    candidates: Sequence[Candidate],
    loads: Sequence[float],
    store: PointStore,
    pool: Pool,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Run every candidate at every load, the trace's own load and vLLM's defaults first.

    Args:
        base: The run at the trace's own load.
        own_rate: That load, in requests/s.
        candidates: One of them is called `BASELINE`.
        loads: Multiples of ``own_rate``.
        store: Where finished runs are kept; opened.
        pool: Where they run; entered.
        on_row: Told of every row as it comes.

    Raises:
        SpecError: a candidate is not allowed with these settings; nothing was run.
    """

    def row(candidate: Candidate, load: float, own: SimulationSpec, default: SimulationSpec) -> Plan[Row]:
        if own != default and only_orders(own):
            outcome = yield default
            if outcome.metrics is not None and not outcome.metrics["contended_steps"]:
                return told(Row(candidate=candidate, load=load, outcome=outcome, skipped=True))
        return told(Row(candidate=candidate, load=load, outcome=(yield own)))

    def told(made: Row) -> Row:
        on_row(made)
        return made

    baseline = next(c for c in candidates if c.name == BASELINE)
    others = [c for c in candidates if c is not baseline]
    plans = []
    for load in sorted(loads, key=lambda load: (load != own_load(loads), load)):
        default, *rest = (_at(base, candidate, load * own_rate) for candidate in (baseline, *others))
        plans.append(row(baseline, load, default, default))
        plans.extend(row(candidate, load, own, default) for candidate, own in zip(others, rest, strict=True))
    return run_plans(plans, store, pool)


def own_load(loads: Sequence[float]) -> float:
    """Return the load that is nearest to the trace's own."""
    return min(loads, key=lambda load: abs(load - 1.0))


def only_orders(spec: SimulationSpec) -> bool:
    """Whether a system does as vLLM where nobody waits: it has vLLM's token budget, no gates and no KV tier."""
    engine = spec.engine
    if engine.system in UPSTREAM or "kv_tier" in engine.options:
        return False
    policies = systems.build(config.parse({**engine.options, "system": engine.system, "allow_oracle": True}))
    return policies.budget.is_vllms and not policies.gates


def _at(base: SimulationSpec, candidate: Candidate, rate_per_s: float) -> SimulationSpec:
    changes: dict[str, Any] = {SYSTEM: candidate.system, RATE: rate_per_s}
    changes |= {f"engine.{name}": value for name, value in candidate.engine.items()}
    return checked(with_values(base, changes))


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
    own = own_load(loads)
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
