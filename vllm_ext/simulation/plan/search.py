"""The search: candidates by successive halving, up to the few that are worth a long run on other requests."""

from __future__ import annotations

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
from vllm_ext.simulation.plan.evidence import Objective
from vllm_ext.simulation.plan.runs import Bench, Part, Parts
from vllm_ext.simulation.plan.saturation import Saturation
from vllm_ext.simulation.spec import resolve

LOADS = (0.5, 0.7, 0.9, 1.0, 1.2)
"""Multiples of the rate at which the server as it is saturates."""
_SEARCH_LOADS = (0.7, 0.9, 1.0)
_FIRST_LOADS = (0.9, 1.0)
_FIRST_REQUESTS, _SECOND_REQUESTS = 400, 1000
SLACK = 0.05
"""On the short runs of the search."""
_HALVED = 6
"""Candidates that the second, longer round of the search gets."""


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

    def allowed(candidates: Sequence[Candidate]) -> list[Candidate]:
        least = resolved.limits.max_num_seqs if "seats" in keep else 0  # which vLLM lowers to a smaller budget
        return [one for one in candidates if one.changed.isdisjoint(keep) and (one.tokens or own) >= least]

    def score(candidates: Sequence[Candidate], part: Part, loads: Sequence[float]) -> dict[Candidate, float]:
        tried = bench.tried(allowed(candidates), part, loads, saturated.rate_per_s)
        scores, out = tried.scored(objective, loads, SLACK)
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
            dropped[candidate.name] = objective.told(scores[candidate])
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
    finalists = [DEFAULT, vllm, alone, choice, runner_up, *half, *with_fp8_kv(choice, bench.base)]
    finalists = allowed(unique(finalists))
    for candidate in scores:
        if candidate not in finalists:
            dropped[candidate.name] = objective.told(scores[candidate])
    for candidate in finalists:
        dropped.pop(candidate.name, None)
    return Coarse(choice, vllm, ours, finalists, dropped)


def _ranked(scores: Mapping[Candidate, float]) -> list[Candidate]:
    return sorted(scores, key=lambda one: (-scores[one], len(one.changed)))
