"""Which system for this trace on this hardware? Every candidate from light load to overload, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm_ext.simulation.spec import UPSTREAM, SimulationSpec, checked, policies_of, with_values
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM
from vllm_ext.simulation.sweep.points import Plan, run_plans
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore
from vllm_ext.systems.user_policies import split

BASELINE = "vLLM default"
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Multiples of the trace's own rate."""
WORTHWHILE = 0.05
"""A system helps at a load if it improves the objective by more than this fraction: less is within what a cost model
and another hour of traffic would change."""
ATTAINMENT = "slo_attainment_fraction"
LATENCY = "normalised_latency_mean_ms_per_token"
ALIKE = 0.01
"""Two runs are alike if none of `COMPARED` differs by more: points of attainment, or a fraction of vLLM's."""
_ROUNDING = 1 + 1e-9
COMPARED = (ATTAINMENT, LATENCY, "ttft_mean_ms", "ttft_p99_ms", "tbt_p99_ms", "e2e_mean_ms", "e2e_p99_ms")
ALIKE_LOADS = 2
"""A candidate that is like vLLM's defaults at so many loads in a row is not run at lighter ones. One alone may be where
all is lost whoever schedules."""


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
        name="fcfs-tuned",
        system="fcfs-tuned",
        flags=("--scheduler-cls", "fcfs-tuned"),
        note="the same order and reserve; whoever has computed least leaves when memory runs out",
    ),
    Candidate(
        name="alise",
        system="alise",
        flags=("--scheduler-cls", "alise"),
        note="lengths predicted from the history of finished requests only, learnt during the trace",
    ),
    Candidate(
        name="alise, for the tail",
        system="alise",
        engine={"options.ordering.gamma": 1.0},
        flags=("--scheduler-cls", "alise", "--ext-optimise", "tail"),
        note="as alise, but nearer to the order of arrival",
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
    rate_per_s: float
    """The load in requests/s."""
    outcome: Outcome
    skipped: str = ""
    """Why it was not run and the outcome is that of vLLM's defaults; empty if it was run."""


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
    return with_values(base, {"engine.options": options}), (*CANDIDATES, own)


def compare(
    base: SimulationSpec,
    own_rate: float,
    candidates: Sequence[Candidate],
    loads: Sequence[float],
    store: PointStore,
    pool: Pool,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Run vLLM's defaults at every load, the trace's own first, and each candidate from the heaviest load down.

    A candidate is not run where it can't differ: where it only orders requests and nobody waited, and below loads at
    which it did as the defaults (`ALIKE_LOADS`), since what a scheduler can do shrinks with the load.

    Args:
        base: The run at the trace's own load.
        own_rate: That load, in requests/s.
        candidates: One of them is called `BASELINE`.
        loads: Multiples of ``own_rate``.
        store: Where finished runs are kept; opened.
        pool: Where they run; entered.
        on_row: Told of every row as it comes.

    Returns:
        By load, increasing, and the order of the candidates.

    Raises:
        ConfigError: a candidate is not allowed with these settings; nothing was run.
    """
    (baseline,) = (c for c in candidates if c.name == BASELINE)
    heaviest_first = sorted(loads, reverse=True)
    specs = {(c.name, load): _at(base, c, load * own_rate) for c in candidates for load in heaviest_first}

    def row(candidate: Candidate, load: float, outcome: Outcome, skipped: str = "") -> Row:
        outcome = _within_offered(outcome, specs[candidate.name, load])
        made = Row(candidate=candidate, load=load, rate_per_s=load * own_rate, outcome=outcome, skipped=skipped)
        on_row(made)
        return made

    def of_defaults(load: float) -> Plan[list[Row]]:
        outcome = yield specs[BASELINE, load]
        return [row(baseline, load, outcome)]

    def of_candidate(candidate: Candidate) -> Plan[list[Row]]:
        rows, alike = list[Row](), 0
        for load in heaviest_first:
            spec, default_spec = specs[candidate.name, load], specs[BASELINE, load]
            default = yield default_spec
            skipped = ""
            if alike >= ALIKE_LOADS:
                skipped = f"did as vLLM at {rows[-alike].load:g} x"
            elif spec != default_spec and _nobody_waited(default) and only_orders(spec):
                skipped = "nobody waited"
            outcome = default if skipped else (yield spec)
            rows.append(row(candidate, load, outcome, skipped))
            alike = alike + 1 if _are_alike(outcome, default) else 0
        return rows

    plans = [of_defaults(load) for load in sorted(heaviest_first, key=lambda load: load != own_load(loads))]
    plans += [of_candidate(candidate) for candidate in candidates if candidate is not baseline]
    order = [candidate.name for candidate in candidates]
    rows = [row for found in run_plans(plans, store, pool) for row in found]
    return sorted(rows, key=lambda row: (row.load, order.index(row.candidate.name)))


def _at(base: SimulationSpec, candidate: Candidate, rate_per_s: float) -> SimulationSpec:
    changes: dict[str, Any] = {SYSTEM: candidate.system, RATE: rate_per_s}
    changes |= {f"engine.{name}": value for name, value in candidate.engine.items()}
    return checked(with_values(base, changes))


def _within_offered(outcome: Outcome, spec: SimulationSpec) -> Outcome:
    """Return the outcome, failed if more requests were served well than a recording offers: its rate is not the row's.

    Of ``n`` requests the gaps are ``n - 1``; other arrivals are random, and have the rate on average only.
    """
    rate, metrics = spec.workload.rate_per_s, outcome.metrics or {}
    goodput, lasted_s = metrics.get("goodput_requests_per_s", 0.0), metrics.get("duration_s", 0.0)
    if spec.workload.arrivals != "recorded" or rate is None or goodput * lasted_s <= (1 + rate * lasted_s) * _ROUNDING:
        return outcome
    return Outcome(error=f"goodput of {goodput:.4g} requests/s: must be at most the offered rate of {rate:.4g}")


def _nobody_waited(default: Outcome) -> bool:
    return default.metrics is not None and not default.metrics["contended_steps"]


def _are_alike(one: Outcome, default: Outcome) -> bool:
    if one.metrics is None or default.metrics is None:
        return False
    for name in COMPARED:
        if (name in one.metrics) != (name in default.metrics):
            return False
        if name in default.metrics:
            allowed = ALIKE * (1 if name == ATTAINMENT else abs(default.metrics[name]))
            if abs(one.metrics[name] - default.metrics[name]) > allowed:
                return False
    return LATENCY in default.metrics


def own_load(loads: Iterable[float]) -> float:
    """Return the load that is nearest to the trace's own."""
    return min(loads, key=lambda load: abs(load - 1.0))


def only_orders(spec: SimulationSpec) -> bool:
    """Whether a system does as vLLM where nobody waits: it has vLLM's token budget, no gates and no KV tier."""
    engine = spec.engine
    if engine.system in UPSTREAM or "kv_tier" in engine.options:
        return False
    policies = policies_of(engine)
    return policies.budget.is_vllms and not policies.gates


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


class Obstacle(Enum):
    """Why no candidate beats vLLM's defaults at a load."""

    NO_QUEUE = "no request waits, so that no order is better than another"
    OVERLOADED = "overloaded under every candidate"
    NO_BETTER = "requests wait, but no candidate serves them better by more than 5 %"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do."""

    choice: Candidate
    reason: str
    helps_at: tuple[float, ...]
    """Loads at which the choice is worth it."""
    nothing_helps: Mapping[float, Obstacle]
    """Loads at which no candidate beats vLLM's defaults by more than `WORTHWHILE`, and why."""
    carried_load: Mapping[str, float]
    """Candidate -> highest simulated load up to which its SLOs held; 0 if at none, and a lower bound if it is the
    highest load of all. Empty without SLOs."""
    left_out: tuple[str, ...]
    """Candidates that failed at a load."""


def decide(rows: Sequence[Row], objective: Objective) -> Verdict | None:
    """Choose a candidate; None if vLLM's defaults failed at every load, so that there is nothing to compare with.

    With SLOs the one that carries the highest load wins; among equals, and without SLOs, the one that improves most on
    vLLM's defaults, summed over loads up to the trace's own rate twice as heavily as beyond. A candidate that makes the
    trace's own load worse by more than `WORTHWHILE` is out, and the defaults stay unless something is worthwhile.
    A load at which the defaults failed is not judged, nor is a candidate that failed at one that is.

    Args:
        rows: By load, increasing; candidates in order of preference among equals.
        objective: What counts.
    """
    found = {(r.candidate.name, r.load): r.outcome.metrics for r in rows if r.outcome.metrics is not None}
    loads = [load for name, load in found if name == BASELINE]
    if not loads:
        return None
    known = {row.candidate.name: row.candidate for row in rows}
    names = [name for name in known if all((name, load) in found for load in loads)]
    gains = {
        name: {load: objective.improvement(found[name, load], found[BASELINE, load]) for load in loads}
        for name in names
    }

    def holds(name: str, load: float) -> bool:
        return found[name, load][ATTAINMENT] >= objective.min_attainment

    carried = {
        name: max((load for load in loads if all(holds(name, lower) for lower in loads if lower <= load)), default=0.0)
        for name in (names if objective.with_slo else ())
    }
    own = own_load(loads)

    def score(name: str) -> tuple[float, float]:
        weighted = sum(gain * (2 if load <= 1 else 1) for load, gain in gains[name].items())
        return (carried.get(name, 0.0), round(weighted, 9))

    best = max((name for name in names if gains[name][own] >= -WORTHWHILE), key=score)  # the first among equals
    helps_at = tuple(load for load, gain in gains[best].items() if gain > WORTHWHILE)
    if not helps_at and carried.get(best, 0.0) <= carried.get(BASELINE, 0.0):
        best = BASELINE
    reason = "no candidate improves on vLLM's defaults by more than 5 % at any simulated load without costing at yours"
    if best != BASELINE:
        unit = "more requests meet their SLOs" if objective.with_slo else "less mean normalised latency"
        parts = [f"{100 * gains[best][own]:+.0f} % {unit} at your load"]
        if helps_at:
            peak = max(helps_at, key=gains[best].__getitem__)
            parts.append(f"{100 * gains[best][peak]:+.0f} % at {peak:g} times your load")
        if carried:
            ours, defaults = (_up_to(carried[name], max(loads)) for name in (best, BASELINE))
            parts.append(f"SLOs hold {ours} (with the defaults {defaults})")
        reason = "; ".join(parts)
    return Verdict(
        choice=known[best],
        reason=reason,
        helps_at=helps_at,
        nothing_helps={
            load: _obstacle([found[name, load] for name in names], found[BASELINE, load], objective)
            for load in loads
            if max(gain[load] for gain in gains.values()) <= WORTHWHILE
        },
        carried_load=carried,
        left_out=tuple(name for name in known if name not in names),
    )


def _obstacle(
    candidates: Iterable[Mapping[str, float]], default: Mapping[str, float], objective: Objective
) -> Obstacle:
    if not default.get("contended_steps", 1.0):
        return Obstacle.NO_QUEUE
    if objective.with_slo and all(metrics[ATTAINMENT] < objective.min_attainment for metrics in candidates):
        return Obstacle.OVERLOADED
    return Obstacle.NO_BETTER


def _up_to(load: float, highest: float) -> str:
    """Say which load is carried; the highest that was tried is a lower bound."""
    if not load:
        return "at no simulated load"
    return f"up to {'>= ' if load == highest else ''}{load:g} times your load"
