"""The final table, on requests that nothing was chosen by, and what it says."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_ext.report.intervals import Points, Ratio
from vllm_ext.simulation.plan import evidence
from vllm_ext.simulation.plan.candidates import AS_IT_IS, DEFAULT, LEAST_TOKENS, Candidate, unique, with_budget
from vllm_ext.simulation.plan.evidence import Metrics, Objective
from vllm_ext.simulation.plan.runs import Bench, NoAnswer, Part, Parts, Tried
from vllm_ext.simulation.plan.saturation import Saturation, carried, saturation
from vllm_ext.simulation.plan.search import SLACK, Coarse
from vllm_ext.simulation.spec import resolve, with_values

SHOWN_AT = 0.9
"""The load at which what each change brings is told, or the nearest to it."""
_JITTER = 1.002
"""An A/A pair is the server as it is twice, with arrivals this much closer together the second time: what differs then
says how much of a difference is chance."""
_WRONG_BY = 0.3
"""Constants of a cost model that nobody measured may be off by so much."""
_CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "arithmetic": ("gemm_efficiency",), "memory": ("memory_efficiency", "weight_efficiency"),
    "host time per step": ("host_base_s",),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What to do, and why."""

    choice: Candidate
    tried: Tried
    """All finalists at all loads."""
    pair: Mapping[float, Metrics]
    """The A/A pair's second run, by load."""
    rejected: Mapping[str, str]
    """Finalists that broke a limit: name -> which."""
    objective: Objective
    carries_per_s: tuple[float, float]
    """What the server as it is and the one that was chosen carry, as `carried` returns it."""

    def over(self, candidate: Candidate, load: float, metric: str) -> Ratio:
        """Return how many times better than the server as it is; of a latency."""
        return evidence.ratio(self.tried.metrics[candidate][load], self.tried.metrics[DEFAULT][load], metric)

    def compared(self, candidate: Candidate, load: float, metric: str) -> Ratio | Points:
        """Return how much better than the server as it is; see `evidence.compared`."""
        return evidence.compared(self.tried.metrics[candidate][load], self.tried.metrics[DEFAULT][load], metric)

    def is_difference(self, candidate: Candidate, load: float, metric: str) -> bool:
        """Whether it is better or worse for certain: outside its interval, and by more than the A/A pair differs."""
        found = self.compared(candidate, load, metric)
        chance = evidence.compared(self.pair[load], self.tried.metrics[DEFAULT][load], metric)
        differs = abs(chance.value - chance.EQUAL)
        return not found.low <= found.EQUAL <= found.high and abs(found.value - found.EQUAL) > differs

    def is_better(self, candidate: Candidate, load: float) -> bool | None:
        """Whether it is better for certain, by the first measure of the objective that differs; None if none does."""
        for metric in self.objective.metrics:
            if self.is_difference(candidate, load, metric):
                return (found := self.compared(candidate, load, metric)).value > found.EQUAL
        return None

    @property
    def helps_from(self) -> float | None:
        """The lowest load from which on the choice is better; None if at none, as where it changes nothing."""
        if self.choice == DEFAULT:
            return None
        found = None
        for load in sorted(self.pair, reverse=True):
            if not self.is_better(self.choice, load):
                break
            found = load
        return found

    @property
    def unmet(self) -> bool:
        """Whether no server that was tried keeps to the constraints: the choice is the best without them."""
        return self.choice.name in self.rejected

    @property
    def who_pays(self) -> list[str]:
        """What is worse under the choice, a line for each measure."""
        return evidence.who_pays(self.tried.metrics[self.choice], self.tried.metrics[DEFAULT])


def answer(
    bench: Bench, parts: Parts, objective: Objective, saturated: Saturation, coarse: Coarse, loads: Sequence[float]
) -> Answer:
    """Run the finalists on what the search did not see, and choose.

    The best score wins; within one percent of it the one that changes least. Who breaks a limit is out, and what a
    candidate brings must be more than chance at a load that is judged, else the server stays as it is. What was chosen
    is also run at the trace's own load, where nothing is judged: users see that one.

    Raises:
        NoAnswer: the server as it is failed.
    """
    part, loads = parts.loaded(parts.final, saturated.rate_per_s), objective.with_own(loads)
    tried = bench.tried(coarse.finalists, part, loads, saturated.rate_per_s)
    scores, rejected = tried.scored(objective, loads)
    again = bench.rates(DEFAULT, part, [load * saturated.rate_per_s * _JITTER for load in loads])
    pair = {load: outcome.metrics for load, outcome in zip(loads, again, strict=True) if outcome.metrics is not None}
    if len(pair) < len(loads):
        raise NoAnswer("the A/A pair of the server as it is failed")
    judged = [load for load in loads if load <= evidence.JUDGED_UP_TO]
    while True:
        choice = evidence.best(scores)
        found = Answer(choice, tried, pair, rejected, objective, (saturated.rate_per_s, saturated.rate_per_s))
        sure = any(found.is_better(choice, load) for load in judged)
        if choice == DEFAULT or DEFAULT not in scores or sure:
            break
        del scores[choice]
    if choice == DEFAULT:
        return found
    _try_parts(bench, part, found, loads, saturated)
    if 0 < objective.own_load <= evidence.JUDGED_UP_TO:
        own = bench.tried((DEFAULT, choice), part, (objective.own_load,), saturated.rate_per_s)
        tried.failed.update(own.failed)
        for candidate, runs in own.metrics.items():
            tried.metrics[candidate].update(runs)
    return replace(found, carries_per_s=carried(bench, parts, choice, saturated))


def parts_of_choice(choice: Candidate) -> dict[str, Candidate]:
    """Return what a choice consists of, by what it changes: vLLM's own settings, and who schedules."""
    return {
        "the flags of vLLM": replace(choice, system=AS_IT_IS),
        shlex.join(choice.system.flags): Candidate(system=choice.system),
    }


def _try_parts(bench: Bench, part: Part, found: Answer, loads: Sequence[float], saturated: Saturation) -> None:
    """Run what the choice consists of, where that was no finalist, so that the reader sees what each part brings."""
    shown = nearest(loads)
    others = [one for one in parts_of_choice(found.choice).values() if one not in (DEFAULT, found.choice)]
    others = [one for one in others if shown not in found.tried.metrics.get(one, {})]
    tried = bench.tried(others, part, (shown,), saturated.rate_per_s)
    found.tried.metrics.update(tried.metrics)


def nearest(loads: Iterable[float]) -> float:
    """Return the load at which parts are told apart."""
    return min(loads, key=lambda load: abs(load - SHOWN_AT))


@dataclass(frozen=True)
class Doubt:
    """What becomes of the token budget if the cost model's constants are wrong."""

    budgets: Mapping[str, int]
    """What is wrong -> the best budget then."""
    tokens: int
    """The budget that was chosen, or the server's own."""

    @property
    def flips(self) -> bool:
        """Whether another budget would be better in some case."""
        return any(tokens != self.tokens for tokens in self.budgets.values())


def doubt(bench: Bench, parts: Parts, objective: Objective, choice: Candidate, own_rate_per_s: float) -> Doubt:
    """Search the best budget again with each constant of the cost model off by 30 % either way.

    Args:
        bench: Of a run whose costs nobody measured.
        parts: Its search part is used.
        objective: As in the search.
        choice: Its budget is compared with half of it, twice it, and the server's own.
        own_rate_per_s: Of the trace.
    """
    resolved = resolve(bench.base)
    own = resolved.limits.max_num_batched_tokens
    tokens = choice.tokens or own
    around = [each for each in (tokens // 2, tokens, tokens * 2) if each >= LEAST_TOKENS and each != own]
    candidates = unique([DEFAULT, replace(choice, tokens=None)])
    candidates += [with_budget(choice, each, resolved) for each in around]
    found = dict[str, int]()
    for name, factor in ((name, factor) for name in _CONSTANTS for factor in (1 - _WRONG_BY, 1 + _WRONG_BY)):
        changed = _with_constants(bench, _CONSTANTS[name], factor)
        saturated = saturation(changed, parts, own_rate_per_s)
        part = parts.loaded(parts.search, saturated.rate_per_s, 500)
        tried = changed.tried(candidates, part, (SHOWN_AT,), saturated.rate_per_s)
        scores, _ = tried.scored(objective, (SHOWN_AT,), SLACK)
        found[f"{name} {100 * (factor - 1):+.0f} %"] = evidence.best(scores).tokens or own
    return Doubt(found, tokens)


def _with_constants(bench: Bench, names: Sequence[str], factor: float) -> Bench:
    cost, device = bench.base.cost, bench.base.hardware.resolve().device
    changed = {}
    for name in names:
        value = getattr(cost, name)
        value = (getattr(device, name) if value is None else value) * factor
        changed[f"cost.{name}"] = min(1.0, value) if name.endswith("_efficiency") else value
    return replace(bench, base=with_values(bench.base, changed), tell=lambda *_: None)
