"""Which requests a candidate is tried on, and at which rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate
from vllm_ext.simulation.plan.evidence import Metrics, Objective
from vllm_ext.simulation.spec import SimulationSpec, with_values
from vllm_ext.simulation.sweep.grid import RATE
from vllm_ext.simulation.sweep.points import run_points
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore
from vllm_ext.simulation.workloads.build import GeneratedWorkload

WINDOWS = 8
"""Parts of a run that are compared with the same parts of another: a ratio's interval is made of theirs."""
_SEARCHED = 3
"""The first of so many parts of the trace is searched on, the others are for the final table."""
_MOST_REQUESTS = 2000
"""Of the final table: more would take longer than anybody waits, and change little."""
_LIVES, _FINAL_LIVES = 3.0, 5.0
"""Conversations begin for as long as so many of them last, one after the other, in the search and in the final table:
at first the server is empty, and at the end only thought is left."""
_SHORTEST = 400
"""Requests of the shortest run of a part, if it has as many."""
_SEEDS = 100
"""Between the seeds of the search and of the final table, where requests are drawn."""


@dataclass(frozen=True)
class Part:
    """A part of the workload."""

    first: int
    """Requests (conversations) before it."""
    count: int
    seed: int

    def head(self, count: int) -> Part:
        """Return its beginning."""
        return Part(self.first, min(count, self.count), self.seed)


@dataclass(frozen=True)
class Parts:
    """Searched on the one, judged on the other: what was chosen because it fitted some requests must prove itself."""

    search: Part
    final: Part
    endless: bool = False
    """Whether requests are drawn and never run out."""
    turns: float = 1.0
    """Requests of a session."""
    think_s: float = 0.0
    """Between the turns of conversations."""
    counts_sessions: bool = True
    """Whether the workload's rate is that of sessions, or of requests."""

    @property
    def life_s(self) -> float:
        """How long a conversation lasts by its think times alone; 0 for single requests."""
        return (self.turns - 1) * self.think_s

    def counted(self, requests: float) -> float:
        """Return what the workload's rate counts, of a number of requests."""
        return requests / self.turns if self.counts_sessions else requests

    def loaded(self, part: Part, rate_per_s: float, most: int | None = None) -> Part:
        """Return the beginning of a part, long enough that a load is reached where conversations overlap.

        Args:
            part: One of the two.
            rate_per_s: The load of saturation, in what the workload's rate counts.
            most: Requests that are enough otherwise; None: all of the part.
        """
        found = part if most is None else part.head(most)
        sessions_per_s = rate_per_s / (1.0 if self.counts_sessions else self.turns)
        needed = math.ceil((_FINAL_LIVES if most is None else _LIVES) * self.life_s * sessions_per_s)
        if needed <= found.count:
            return found
        return replace(part, count=needed) if self.endless else part.head(needed)


def parts_of(workload: GeneratedWorkload) -> Parts:
    """Cut a workload: by its order where that is a file's, else by seeds.

    Raises:
        ValueError: there are fewer than 60 requests, or recorded ones that arrive at once, at no rate.
    """
    spec = workload.spec
    times = [request.arrival_s for request in workload.start()]
    total = len(times)
    if total < 60:
        raise ValueError(f"{spec.source}: {total} requests; a plan needs at least 60")
    seed, first = spec.seed, spec.skip_requests
    talk = (workload.source.mean_turns, workload.think_s, spec.rate_counts == "sessions")
    if workload.source.size is None or spec.sample != "file-order":
        part = Part(first, min(total, _MOST_REQUESTS), seed)
        return Parts(replace(part, seed=seed + _SEEDS), part, workload.source.size is None, *talk)
    searched = total // _SEARCHED
    final = Part(first + searched, min(total - searched, _MOST_REQUESTS), seed)
    for begin, count in ((0, searched), (searched, final.count)) if spec.arrivals == "recorded" else ():
        end = begin + min(count, _SHORTEST)
        if times[begin] == times[end - 1]:
            raise ValueError(
                f"{spec.source}: requests {first + begin + 1} to {first + end} arrive at the same time, so that their "
                "rate cannot be varied; leave them out by workload.skip_requests, or add --arrivals poisson"
            )
    return Parts(Part(first, searched, seed + _SEEDS), final, False, *talk)


def at(base: SimulationSpec, candidate: Candidate, part: Part, rate_per_s: float) -> SimulationSpec:
    """Return a run of a candidate on a part of the workload."""
    values = {
        RATE: rate_per_s, "workload.num_requests": part.count, "workload.skip_requests": part.first,
        "workload.seed": part.seed, "workload.duration_s": None, "record.windows": WINDOWS,
    }  # fmt: skip
    return candidate.on(with_values(base, values))


class NoAnswer(ValueError):
    """There is nothing to compare with; the message says why."""


@dataclass
class Tried:
    """What came of the runs on a part, by candidate and load."""

    metrics: dict[Candidate, dict[float, Metrics]] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Candidates of which a run failed, and why."""

    def whole(self, loads: Sequence[float]) -> Iterator[Candidate]:
        """Yield the candidates that were run at all these loads."""
        for candidate, found in self.metrics.items():
            if candidate not in self.failed and all(load in found for load in loads):
                yield candidate

    def scored(
        self, objective: Objective, loads: Sequence[float], slack: float = 0.0
    ) -> tuple[dict[Candidate, float], dict[str, str]]:
        """Return the scores of those that were run at all loads and break no limit, and why each other is out, by name.

        Where nobody keeps to the constraints, the scores are of those that break no other limit.

        Raises:
            NoAnswer: the server as it is failed.
        """
        if DEFAULT in self.failed or DEFAULT not in self.metrics:
            raise NoAnswer(f"the server as it is failed {self.failed.get(DEFAULT, '')}")
        base, scores = self.metrics[DEFAULT], dict[Candidate, float]()
        out = {candidate.name: f"failed {why}" for candidate, why in self.failed.items()}
        for candidate in self.whole(loads):
            if candidate.fp8_kv and not objective.allow_fp8_kv:
                out[candidate.name] = "changes the model's answers; --allow-fp8-kv lets it be chosen"
            elif broken := objective.broken(self.metrics[candidate], base, slack):
                out[candidate.name] = broken
            else:
                scores[candidate] = objective.score(self.metrics[candidate], base)
        if not scores and objective.constraints:
            scores, _ = self.scored(replace(objective, constraints=()), loads, slack)
        return scores, out


@dataclass
class Bench:
    """Where candidates are tried."""

    base: SimulationSpec
    store: PointStore
    pool: Pool
    tell: Callable[[Candidate, float, Outcome], None]
    """Called for every run that ended, with its load."""
    told: set[tuple[str, Candidate]] = field(default_factory=set)
    """Runs that were told of, and candidates: where a part is short, a longer round asks for the same."""

    def rates(self, candidate: Candidate, part: Part, rates_per_s: Sequence[float]) -> list[Outcome]:
        """Run a candidate at rates."""
        specs = [at(self.base, candidate, part, rate) for rate in rates_per_s]
        return run_points(specs, self.store, self.pool)

    def tried(
        self, candidates: Sequence[Candidate], part: Part, loads: Sequence[float], saturation_per_s: float
    ) -> Tried:
        """Run candidates at loads, which are multiples of a rate."""
        asked = [(candidate, load) for candidate in candidates for load in loads]
        specs = [at(self.base, candidate, part, load * saturation_per_s) for candidate, load in asked]
        found = Tried()
        places: dict[str, list[tuple[Candidate, float]]] = {}
        for spec, pair in zip(specs, asked, strict=True):
            places.setdefault(spec.model_dump_json(), []).append(pair)

        def told(spec: SimulationSpec, outcome: Outcome, _known: bool) -> None:
            described = spec.model_dump_json()
            for candidate, load in places.get(described, ()):
                if (described, candidate) not in self.told:
                    self.told.add((described, candidate))
                    self.tell(candidate, load, outcome)

        for (candidate, load), outcome in zip(asked, run_points(specs, self.store, self.pool, told), strict=True):
            if outcome.metrics is None:
                found.failed[candidate] = f"at {load:g}: {outcome.error}"
            else:
                found.metrics.setdefault(candidate, {})[load] = outcome.metrics
        return found
