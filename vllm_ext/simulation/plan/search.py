"""The search: saturation first, then candidates by successive halving, then the few that are left on other requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_ext.simulation.plan import evidence
from vllm_ext.simulation.plan.candidates import (
    AS_IT_IS,
    DEFAULT,
    RESERVE,
    Candidate,
    budgets,
    nearby,
    systems,
    unique,
    with_budget,
    with_fp8_kv,
)  # fmt: skip
from vllm_ext.simulation.plan.evidence import Metrics, Objective
from vllm_ext.simulation.plan.runs import WINDOWS, Bench, NoAnswer, Part, Parts
from vllm_ext.simulation.spec import resolve, with_values
from vllm_ext.simulation.sweep.grid import RATE
from vllm_ext.simulation.sweep.points import run_points

LOADS = (0.5, 0.7, 0.9, 1.0, 1.2)
"""Multiples of the rate at which the server as it is saturates."""
_SEARCH_LOADS = (0.7, 0.9, 1.0)
_FIRST_LOADS = (0.9, 1.0)
_SATURATION_REQUESTS, _FIRST_REQUESTS, _SECOND_REQUESTS = 2000, 400, 1000
SLACK = 0.05
"""On the short runs of the search."""
_OVERLOADED = 1.5
"""What it carries is measured at so many times what short runs say."""
_FOLLOWED = 0.9
"""A server that serves less than this share of what arrives is saturated."""
_DOUBLINGS = 12
_FEWEST_CLIENTS, _MORE_CLIENTS, _LEAST_TALKING_S, _TALKING_LIVES = 64, 3, 300.0, 5.0
"""Clients that talk at first, how many times more each time, and for how long they begin conversations: all at once at
first, so that their steps are large until they have drifted apart."""
_NO_MORE, _REQUESTS_EACH = 1.15, 4
"""Where so many more clients get less than the first times as much, or not the second each, the server is saturated."""
_HALVED = 6
"""Candidates that the second, longer round of the search gets."""


@dataclass(frozen=True)
class Saturation:
    """What the server as it is carries."""

    rate_per_s: float
    """In requests (conversations) per second."""
    own_rate_per_s: float
    clients: int = 0
    """Of conversations: how many clients talked when that was measured."""

    @property
    def own_load(self) -> float:
        """The trace's own load."""
        return self.own_rate_per_s / self.rate_per_s


def saturation(bench: Bench, parts: Parts, own_rate_per_s: float) -> Saturation:
    """Ask for more and more until the server no longer follows, on short runs; then ask a long run what it carries.

    What is lost when memory runs out is lost only after it did: a short run does not see it. Requests of a file that
    has too few are drawn again. Of conversations not the rate grows but the number of clients that talk without end:
    most of a conversation is thought, so that a short run of many is over before they overlap.

    Raises:
        NoAnswer: it failed.
    """
    if parts.life_s:
        return _of_conversations(bench, parts, own_rate_per_s)
    rate = own_rate_per_s
    for _ in range(_DOUBLINGS):
        rates = (rate, 2 * rate)
        served = _served(bench, DEFAULT, parts.search.head(_FIRST_REQUESTS), rates, parts)
        if over := [found for found, one in zip(served, rates, strict=True) if found < _FOLLOWED * one]:
            return Saturation(_overloaded(bench, parts, DEFAULT, _OVERLOADED * over[0]), own_rate_per_s)
        rate *= 4
    raise NoAnswer(f"the server as it is follows {rate:.4g} requests/s: nothing to plan")


def carried(bench: Bench, parts: Parts, candidate: Candidate, saturated: Saturation) -> float:
    """Return what a candidate carries, in what the workload's rate counts.

    Raises:
        NoAnswer: it failed.
    """
    if parts.life_s:
        return _talking(bench, parts, candidate, saturated.clients)
    return _overloaded(bench, parts, candidate, 2 * saturated.rate_per_s)


def _overloaded(bench: Bench, parts: Parts, candidate: Candidate, asked_per_s: float) -> float:
    """Return the rate that is served when more is asked: twice as much until it no longer is what was asked."""
    part = replace(parts.search, count=_SATURATION_REQUESTS)
    if parts.search.count < part.count and not parts.endless:
        bench = replace(bench, base=with_values(bench.base, {**_drawn(parts.search), RATE: asked_per_s}))
        part = replace(part, first=0)
    for _ in range(_DOUBLINGS):
        (found,) = _served(bench, candidate, part, [asked_per_s], parts)
        if found < _FOLLOWED * asked_per_s:
            return found
        asked_per_s *= 2
    raise NoAnswer(f"{candidate.name} follows {asked_per_s:.4g} requests/s: nothing to plan")


def _drawn(part: Part) -> dict[str, object]:
    """Return what makes the requests of a part come again and again."""
    pool = (part.first, part.first + part.count)
    return {"workload.arrivals": "poisson", "workload.cv": 1.0, "workload.sample": "with-replacement",
            "workload.pool": pool}  # fmt: skip


def _of_conversations(bench: Bench, parts: Parts, own_rate_per_s: float) -> Saturation:
    clients, before = _FEWEST_CLIENTS, 0.0
    for _ in range(_DOUBLINGS):
        served = _talking(bench, parts, DEFAULT, clients)
        each = served / parts.counted(1.0) * _talking_s(parts) / clients
        if served < _NO_MORE * before or each < _REQUESTS_EACH:
            return Saturation(served, own_rate_per_s, clients)
        clients, before = _MORE_CLIENTS * clients, served
    raise NoAnswer(f"the server as it is follows {clients} clients: nothing to plan")


def _talking_s(parts: Parts) -> float:
    """Return for how long clients begin conversations: each has time for more than `_REQUESTS_EACH` requests."""
    return max(_LEAST_TALKING_S, _TALKING_LIVES * parts.life_s, 2 * _REQUESTS_EACH * parts.think_s)


def _talking(bench: Bench, parts: Parts, candidate: Candidate, clients: int) -> float:
    """Return the rate that is served when so many clients begin another conversation whenever one has ended."""
    talking = {
        **({} if parts.endless else _drawn(parts.search)), "workload.arrivals": "closed-loop", "workload.cv": 1.0,
        RATE: None, "workload.clients": clients, "workload.num_requests": None, "workload.skip_requests": 0,
        "workload.duration_s": _talking_s(parts), "workload.seed": parts.search.seed, "record.windows": WINDOWS,
    }  # fmt: skip
    (outcome,) = run_points([candidate.on(with_values(bench.base, talking))], bench.store, bench.pool)
    if outcome.metrics is None:
        raise NoAnswer(f"{candidate.name} failed with {clients} clients: {outcome.error}")
    return parts.counted(_middle(outcome.metrics))


def _served(bench: Bench, candidate: Candidate, part: Part, rates_per_s: Sequence[float], parts: Parts) -> list[float]:
    """Rates at which requests ended in the middle of runs, in what the workload's rate counts."""
    found = []
    for rate, outcome in zip(rates_per_s, bench.rates(candidate, part, rates_per_s), strict=True):
        if outcome.metrics is None:
            raise NoAnswer(f"{candidate.name} failed at {rate:.4g} requests/s: {outcome.error}")
        served = _middle(outcome.metrics)
        if parts.counts_sessions:
            served *= part.count / outcome.metrics["requests"]
        found.append(min(rate, served))
    return found


def _middle(metrics: Metrics) -> float:
    if not metrics.get("middle_requests_per_s"):
        raise NoAnswer("too few requests ended to say what the server carries; take more of the trace")
    return metrics["middle_requests_per_s"]


@dataclass(frozen=True)
class Coarse:
    """What the search found."""

    choice: Candidate
    vllm: Candidate
    """The best without a system of ours."""
    ours: Candidate
    """The best with one."""
    finalists: Sequence[Candidate]
    dropped: Mapping[str, str]
    """Name -> why it is not among them."""


def search(
    bench: Bench, parts: Parts, objective: Objective, saturated: Saturation, keep: Collection[str] = ()
) -> Coarse:
    """Find the few that are worth a long run.

    First vLLM at every budget, on a short part at two loads; then each system at the server's own budget and at the one
    that paid most. The best of all go on to a longer part and three loads, with the neighbours of the best.

    Args:
        bench: Where they are tried.
        parts: The first is searched on.
        objective: What is wanted.
        saturated: What the server as it is carries.
        keep: What must stay as it is, of `CHANGED`.

    Raises:
        NoAnswer: the server as it is failed.
    """
    resolved = resolve(bench.base)
    own = resolved.limits.max_num_batched_tokens
    first = parts.loaded(parts.search, saturated.rate_per_s, _FIRST_REQUESTS)
    dropped: dict[str, str] = {}

    def score(candidates: Sequence[Candidate], part: Part, loads: Sequence[float]) -> dict[Candidate, float]:
        allowed = [one for one in candidates if one.changed.isdisjoint(keep)]
        if "seats" in keep:  # which vLLM lowers to a smaller budget
            allowed = [one for one in allowed if (one.tokens or own) >= resolved.limits.max_num_seqs]
        tried = bench.tried(allowed, part, loads, saturated.rate_per_s)
        scores, out = tried.scored(objective, loads, SLACK)
        if not scores:  # nobody keeps to the constraints: the long runs will say so of the best
            scores, _ = tried.scored(replace(objective, constraints=()), loads, SLACK)
        dropped.update(out)
        return scores

    every = [with_budget(DEFAULT, tokens, resolved) for tokens in budgets(resolved.limits)]
    first_loads = objective.with_own(_FIRST_LOADS)
    scores = score([DEFAULT, *every], first, first_loads)
    paying = [candidate for candidate in _ranked(scores) if candidate is not DEFAULT][:1]
    others = [system for system in systems(bench.base) if system is not AS_IT_IS]
    mixed = [replace(budget, system=system) for system in others for budget in (DEFAULT, *paying)]
    mixed += [replace(budget, reserve=RESERVE) for budget in (DEFAULT, *paying)]
    scores |= score([DEFAULT, *mixed], first, first_loads)

    ranked = _ranked(scores)
    kept = unique([DEFAULT, *ranked[:_HALVED]])
    kept = unique([*kept, *nearby(ranked[0], resolved)])
    kept = unique([*kept, *[candidate for candidate in ranked if candidate.system is AS_IT_IS][:2]])
    for candidate in scores:
        if candidate not in kept:
            dropped[candidate.name] = _over(scores[candidate])
    second = parts.loaded(parts.search, saturated.rate_per_s, _SECOND_REQUESTS)
    scores = score(kept, second, objective.with_own(_SEARCH_LOADS))
    ranked = _ranked(scores)
    choice = evidence.best(scores)
    vllm = evidence.best({one: value for one, value in scores.items() if one.system is AS_IT_IS} or {DEFAULT: 0.0})
    ours = evidence.best({one: value for one, value in scores.items() if one.system is not AS_IT_IS} or scores)
    alone = Candidate(system=choice.system)
    # A short run does not see all that a small budget costs: what breaks a limit in a long one needs another behind it.
    larger = (one for one in ranked if (one.tokens or own) > (choice.tokens or own) and one != DEFAULT)
    runner_up = next(larger, choice)
    # And what the search says of half the budget hangs on how heavy that part of the traffic is.
    half = [one for one in nearby(choice, resolved) if (one.tokens or own) < (choice.tokens or own)]
    finalists = unique([DEFAULT, vllm, alone, choice, runner_up, *half, *with_fp8_kv(choice, bench.base)])
    finalists = [one for one in finalists if one.changed.isdisjoint(keep)]
    for candidate in scores:
        if candidate not in finalists:
            dropped[candidate.name] = _over(scores[candidate])
    for candidate in finalists:
        dropped.pop(candidate.name, None)
    return Coarse(choice, vllm, ours, finalists, dropped)


def _ranked(scores: Mapping[Candidate, float]) -> list[Candidate]:
    return sorted(scores, key=lambda one: (-scores[one], len(one.changed)))


def _over(score: float) -> str:
    return f"{math.exp(score):.2f} times as good as the server as it is, in the search"
