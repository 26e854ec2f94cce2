"""What a server carries: by doubling the rate, or of conversations the clients, until it no longer follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate
from vllm_ext.simulation.plan.evidence import Metrics
from vllm_ext.simulation.plan.runs import WINDOWS, Bench, NoAnswer, Part, Parts, at
from vllm_ext.simulation.spec import with_values
from vllm_ext.simulation.sweep.grid import RATE
from vllm_ext.simulation.sweep.points import run_points

_SHORT_REQUESTS, _LONG_REQUESTS = 400, 2000
_OVERLOADED = 1.5
"""What it carries is measured at so many times what short runs say."""
_FOLLOWED = 0.9
"""A server that serves less than this share of what arrives is saturated."""
_DOUBLINGS, _FOURFOLDS = 12, 30
"""So many times more is asked for at most; from the trace's own load, which may be next to nothing, four times each."""
_FEWEST_CLIENTS, _MORE_CLIENTS, _LEAST_TALKING_S, _TALKING_LIVES = 64, 3, 300.0, 5.0
"""Clients that talk at first, how many times more each time, and for how long they begin conversations: all at once at
first, so that their steps are large until they have drifted apart."""
_NO_MORE, _REQUESTS_EACH = 1.15, 4
"""Where so many more clients get less than the first times as much, or not the second each, the server is saturated."""


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
    for _ in range(_FOURFOLDS):
        rates = (rate, 2 * rate)
        served = _served(bench, (DEFAULT,), parts.search.head(_SHORT_REQUESTS), rates, parts)
        if over := [found for found, one in zip(served, rates, strict=True) if found < _FOLLOWED * one]:
            (carries,) = _overloaded(bench, parts, (DEFAULT,), _OVERLOADED * over[0])
            return Saturation(carries, own_rate_per_s)
        rate *= 4
    raise NoAnswer(f"the server as it is follows {rate:.4g} requests/s: nothing to plan")


def carried(bench: Bench, parts: Parts, candidate: Candidate, saturated: Saturation) -> tuple[float, float]:
    """Return what the server as it is and a candidate carry of the same requests, in what the workload's rate counts.

    What a server carries depends a little on how much is asked for: both are asked for the same.

    Raises:
        NoAnswer: one of them failed.
    """
    if parts.life_s:
        return saturated.rate_per_s, _talking(bench, parts, candidate, saturated.clients)
    before, now = _overloaded(bench, parts, (DEFAULT, candidate), 2 * saturated.rate_per_s)
    return before, now


def _overloaded(bench: Bench, parts: Parts, candidates: Sequence[Candidate], asked_per_s: float) -> list[float]:
    """Return the rates that are served when more is asked: twice as much until none of them is what was asked."""
    part = replace(parts.search, count=_LONG_REQUESTS)
    if parts.search.count < part.count and not parts.endless:
        bench = replace(bench, base=with_values(bench.base, {**_drawn(bench, parts.search), RATE: asked_per_s}))
        part = replace(part, first=0)
    for _ in range(_DOUBLINGS):
        found = _served(bench, candidates, part, [asked_per_s], parts)
        if max(found) < _FOLLOWED * asked_per_s:
            return found
        asked_per_s *= 2
    names = " or ".join(candidate.name for candidate in candidates)
    raise NoAnswer(f"{names} follows {asked_per_s:.4g} requests/s: nothing to plan")


def _drawn(bench: Bench, part: Part) -> dict[str, object]:
    """Return what makes the requests of a part come again and again."""
    first = (bench.base.workload.pool or (0,))[0] + part.first
    pool = (first, first + part.count)
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
        **({} if parts.endless else _drawn(bench, parts.search)), "workload.arrivals": "closed-loop",
        "workload.cv": 1.0, RATE: None, "workload.clients": clients, "workload.num_requests": None,
        "workload.skip_requests": 0, "workload.duration_s": _talking_s(parts),
        "workload.seed": parts.search.seed, "record.windows": WINDOWS,
    }  # fmt: skip
    (outcome,) = run_points([candidate.on(with_values(bench.base, talking))], bench.store, bench.pool)
    if outcome.metrics is None:
        raise NoAnswer(f"{candidate.name} failed with {clients} clients: {outcome.error}")
    return parts.counted(_middle(outcome.metrics))


def _served(
    bench: Bench, candidates: Sequence[Candidate], part: Part, rates_per_s: Sequence[float], parts: Parts
) -> list[float]:
    """Rates at which requests ended in the middle of runs, in what the workload's rate counts; of each at each rate."""
    found, asked = [], list(product(candidates, rates_per_s))
    specs = [at(bench.base, candidate, part, rate) for candidate, rate in asked]
    for (candidate, rate), outcome in zip(asked, run_points(specs, bench.store, bench.pool), strict=True):
        if outcome.metrics is None:
            raise NoAnswer(f"{candidate.name} failed at {rate:.4g} requests/s: {outcome.error}")
        served = _middle(outcome.metrics)
        if parts.counts_sessions:
            served *= part.count / outcome.metrics["requests"]
        found.append(min(rate, served))
    return found


def _middle(metrics: Metrics) -> float:
    if not metrics.get("middle_requests_per_s"):
        if rejected := metrics.get("rejected_requests"):
            told = f"{rejected:.0f} of {rejected + metrics['requests']:.0f} requests were rejected"
            raise NoAnswer(f"{told}: their prompts fill the server's context (--max-model-len)")
        raise NoAnswer("too few requests ended to say what the server carries; take more of the trace")
    return metrics["middle_requests_per_s"]
