"""From the description of a workload to the workload: who sends requests, when, and with which history."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from vllm_ext.datasets import DatasetError
from vllm_ext.hints import MAX_OSL, SLO_KEYS
from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.workloads import arrivals, token_ids
from vllm_ext.simulation.workloads.randomness import Purpose, choices, draws, generator
from vllm_ext.simulation.workloads.requests import NO_SLO, SimRequest, Slo
from vllm_ext.simulation.workloads.sources import Session, Source, Turn, read
from vllm_ext.simulation.workloads.spec import WorkloadSpec

NO_BOUND = 1 << 30
"""``max_tokens`` where the client sets none and the context is not known: the server's context is the bound."""
_MS = 1000.0

_RANDOM: tuple[tuple[Purpose, Callable[..., Any]], ...] = (
    (Purpose.THINK, Generator.exponential),
    (Purpose.ANNOUNCE, Generator.normal),
    (Purpose.SLO_TTFT, Generator.random),
    (Purpose.SLO_TBT, Generator.random),
    (Purpose.SLO_E2E, Generator.random),
    (Purpose.ABORT, Generator.random),
    (Purpose.ABORT_TIME, Generator.exponential),
)
"""Streams of a turn's random fields, in their order; each has its own, so that using one shifts no other."""
Times = Callable[[], Iterator[float]]
"""Begins an arrival process anew: increasing times in seconds."""


def build(spec: WorkloadSpec, *, max_model_len: int | None = None) -> GeneratedWorkload:
    """Return a workload; files are read here, presets are drawn as requests are asked for.

    Args:
        spec: What to build; checked again, for a changed copy of a pydantic model is not.
        max_model_len: The model's context, used where the description leaves it open.

    Raises:
        ValueError: (DatasetError and pydantic's ValidationError included) a field does not fit the others, a file is
            unreadable or malformed, or it has fewer rows than requests are wanted.
    """
    context = max_model_len if spec.max_model_len is None else spec.max_model_len
    spec = WorkloadSpec.model_validate(spec.model_dump() | {"max_model_len": context})
    source = read(spec)
    if spec.num_requests is None and source.size is None:
        if spec.duration_s is None:
            raise ValueError(f"num_requests=None, duration_s=None: one must be given; {source.name} has no end")
        if spec.arrivals == "at-once":
            raise ValueError(f"num_requests=None: must be given for arrivals='at-once'; {source.name} has no end")
    think_s = source.think_s if spec.think_s is None else spec.think_s
    times = _times(spec, source)
    if think_s is None and any(part.conversations for part in spec.mix or (spec,)):
        raise ValueError("think_s=None: must be given for recorded conversations, in seconds; Pensieve: 60")
    _check_supply(spec, source, times)
    return GeneratedWorkload(spec, source, times, think_s or 0.0)


def _times(spec: WorkloadSpec, source: Source) -> Times | None:
    """Return what begins the arrival process anew; None for a closed loop."""
    if spec.arrivals == "closed-loop":
        return None
    if spec.arrivals == "at-once":
        return lambda: itertools.repeat(0.0)
    if spec.arrivals == "recorded":
        recorded = _recorded_times(source, spec)
        return lambda: iter(recorded)
    assert spec.rate_per_s is not None, "the description was checked"
    rate_per_s = spec.rate_per_s / (source.mean_turns if spec.rate_counts == "requests" else 1.0)
    return lambda: arrivals.stream(generator(spec.seed, Purpose.ARRIVALS), rate_per_s=rate_per_s, cv=spec.cv)


def _recorded_times(source: Source, spec: WorkloadSpec) -> list[float]:
    """Recorded times of the part that is served, from its first arrival on; stretched to a mean rate, if one is wanted.

    Else those of a sample are moved together to the rate of all requests. The part is taken first: its own rate may be
    far from that of the whole file.
    """
    times = _since_first(source)[spec.skip_requests :][: spec.num_requests]
    times = times - times[:1]
    if spec.duration_s is not None:
        times = times[times < spec.duration_s]
    if spec.rate_per_s is not None and len(times) > 1:
        if times[-1] == 0:
            raise ValueError(
                f"rate_per_s={spec.rate_per_s}: must be left out; all requests of {source.name} arrive at once"
            )
        times = times * (mean_rate(times) / spec.rate_per_s)
    elif spec.rate_per_s is None:
        times = times * source.share
    found: list[float] = times.tolist()
    return found


def mean_rate(times_s: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the mean rate of increasing arrival times over their gaps, in requests/s; at least two, at two times."""
    return (len(times_s) - 1) / float(times_s[-1] - times_s[0])


def _since_first(source: Source) -> NDArray[np.float64]:
    known = [time_s for time_s in source.arrivals_s if time_s is not None]
    if len(known) < len(source.arrivals_s):
        raise ValueError(f"arrivals='recorded': {source.name} has no arrival time for every request")
    times = np.array(known) - known[0]
    gaps = np.diff(times)
    if (late := np.flatnonzero(gaps < 0)).size:
        raise DatasetError(
            f"{source.name}: usable row {late[0] + 2}: arrives {-gaps[late[0]]:g} s before the row above it; "
            f"sort the file by time"
        )
    return times


def _check_supply(spec: WorkloadSpec, source: Source, times: Times | None) -> None:
    """A file that runs out early would change the load without a word."""
    if source.size is None:
        return
    left = source.size - spec.skip_requests
    remedy = f"{source.name} has {source.size} usable rows; ask for less, or set sample='with-replacement'"
    if left < 1:
        raise ValueError(f"skip_requests={spec.skip_requests}: too many, {remedy}")
    if (spec.num_requests or 0) > left:
        raise ValueError(f"num_requests={spec.num_requests}: too many, {remedy}")
    if times is None or spec.arrivals == "recorded" or spec.num_requests is not None or spec.duration_s is None:
        return
    first_missing = next(itertools.islice(times(), left, None))
    if first_missing < spec.duration_s:
        raise ValueError(f"duration_s={spec.duration_s}: too long, after {first_missing:.1f} s {remedy}")


@dataclass(eq=False)
class GeneratedWorkload:
    """Requests of a source, at the times of an arrival process.

    Open loop: `after` depends on its arguments only. Closed loop: whoever ends first takes the next session, so that
    one run at a time can use a workload; `start` begins anew.
    """

    spec: WorkloadSpec
    source: Source
    arrival_times: Times | None
    think_s: float
    """Mean think time, in seconds."""

    def __post_init__(self) -> None:
        self.name, self.rows, self.sha256 = self.source.name, self.source.rows, self.source.sha256
        self._sigma = sigma_of(self.spec.announce_error)
        self._tiers = {tier.name: tier for tier in self.spec.tiers}
        self._system_prompt = token_ids.system_prompt(self.spec.system_prompt_tokens)
        self._context = self.spec.max_model_len or NO_BOUND
        cut = self.spec.arrivals == "recorded"  # before it was stretched
        self._end_s = math.inf if cut or self.spec.duration_s is None else self.spec.duration_s
        self._queue: Iterator[Session] = iter(())

    def start(self) -> Iterator[SimRequest]:
        """Yield the requests whose arrival does not depend on the run, by arrival time, lazily."""
        sessions = self._sessions()
        if self.arrival_times is None:
            self._queue = sessions
            return (self._opening(0.0, session) for session in itertools.islice(sessions, self.spec.clients))
        times = itertools.takewhile(lambda time_s: time_s < self._end_s, self.arrival_times())
        return itertools.starmap(self._opening, zip(times, sessions, strict=False))

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Return the conversation's next turn; else, in a closed loop, the client's next session.

        A conversation ends early where its client has disconnected, where a turn was refused or gave no token, and,
        with ``over_context="drop"``, where the next turn would exceed the context.
        """
        following = self._next_turn(request, finished_s, output_ids)
        if following is None and finished_s < self._end_s and (session := next(self._queue, None)) is not None:
            arrival_s = finished_s + self._thought_s(session.turns[0])
            following = self._opening(arrival_s, session) if arrival_s < self._end_s else None
        return () if following is None else (following,)

    def _sessions(self) -> Iterator[Session]:
        seed, tiers = self.spec.seed, self.spec.tiers
        random = zip(*(draws(generator(seed, purpose), draw) for purpose, draw in _RANDOM), strict=True)
        chosen: Iterator[str | None] = itertools.repeat(None)
        if tiers:
            indices = choices([tier.share for tier in tiers], generator(seed, Purpose.TIER))
            chosen = (tiers[index].name for index in indices)
        sessions = itertools.islice(self.source.sessions(), self.spec.skip_requests, None)
        sessions = itertools.islice(sessions, self.spec.num_requests)
        for number, (session, tier) in enumerate(zip(sessions, chosen, strict=False)):
            turns = tuple(Turn._make((*turn[:4], *drawn)) for turn, drawn in zip(session.turns, random, strict=False))
            yield session._replace(turns=turns, tier=session.tier or tier, number=number)

    def _thought_s(self, turn: Turn) -> float:
        return self.think_s * (1.0 if self.spec.think == "constant" else turn.think)

    def _opening(self, arrival_s: float, session: Session) -> SimRequest:
        first = session.turns[0]
        ids: list[int] | None = None
        recorded = None if self._system_prompt else session.token_ids
        if recorded is not None:
            ids = list(recorded)
        elif session.hash_ids is not None:
            ids = token_ids.of_blocks(session.hash_ids, first.prompt_tokens, session.hash_block_tokens)
        elif session.conversation is not None:
            ids = token_ids.of_turn(session.conversation, session.earlier, first.prompt_tokens)
        elif self._system_prompt or len(session.turns) > 1:
            ids = token_ids.opening(session.number, first.prompt_tokens)
        if ids is not None:
            ids = self._system_prompt + ids
        made = self._request(session, 0, arrival_s, first.prompt_tokens if ids is None else len(ids), ids)
        made.recorded_ids = recorded is not None
        return made

    def _next_turn(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> SimRequest | None:
        session: Session = request.meta["session"]
        turn = request.meta["turn"] + 1
        gone = request.abort_after_s is not None and finished_s >= request.arrival_s + request.abort_after_s
        if turn == len(session.turns) or gone or not output_ids or request.token_ids is None:
            return None
        wanted = session.turns[turn]
        arrival_s = finished_s + self._thought_s(wanted)
        if arrival_s >= self._end_s:
            return None
        history = [*request.token_ids, *output_ids]
        excess = len(history) + wanted.prompt_tokens + self.spec.served(wanted.output_tokens) - self._context
        if excess > 0:
            kept = len(self._system_prompt)
            if self.spec.over_context == "drop" or excess > len(history) - kept:
                return None
            del history[kept : kept + excess]
        ids = history + token_ids.added(session.number, turn, wanted.prompt_tokens)
        made = self._request(session, turn, arrival_s, len(ids), ids)
        made.recorded_ids = request.recorded_ids
        return made

    def _request(
        self, session: Session, number: int, arrival_s: float, prompt_tokens: int, ids: list[int] | None
    ) -> SimRequest:
        spec, turn = self.spec, session.turns[number]
        several, talk = len(session.turns) > 1, session.conversation
        tier = None if session.tier is None else self._tiers[session.tier]
        max_tokens = max(1, self._context - prompt_tokens)
        if spec.max_tokens != "cap":
            max_tokens = min(max_tokens, turn.output_tokens if spec.max_tokens == "exact" else spec.max_tokens)
        slo = NO_SLO if tier is None else tier.slo(prompt_tokens, (turn.ttft, turn.tbt, turn.e2e))
        gives_up = turn.abort < spec.abort_share
        return SimRequest(
            req_id=f"r{session.number}.{number}" if several else f"r{session.number}",
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=turn.output_tokens,
            max_tokens=max_tokens,
            token_ids=ids,
            extra_args=self._said(min(turn.output_tokens, max_tokens), turn.error, slo) or None,
            priority=0 if tier is None else tier.priority,
            session_id=f"s{session.number if talk is None else talk}" if several or talk is not None else None,
            slo=slo,
            tier=session.tier or "",
            tenant=session.tenant,
            abort_after_s=turn.abort_time * (spec.abort_mean_s or 0.0) if gives_up else None,
            patience_s=spec.patience_s,
            prompt=turn.text,
            predicted=turn.predicted if spec.announce == "predicted" else None,
            meta={"session": session, "turn": number},
        )

    def _said(self, true_tokens: int, error: float, slo: Slo) -> dict[str, Any]:
        """Return what the client announces, or what lies where only oracles read."""
        said: dict[str, Any] = {}
        if self.spec.announce == "hidden":
            said[HIDDEN_LENGTH_KEY] = true_tokens
        elif self.spec.announce == "hint":
            said["osl"] = min(MAX_OSL, max(1, round(true_tokens * math.exp(self._sigma * error))))
        if self.spec.announce_slo:
            wanted = zip(SLO_KEYS, (slo.ttft_s, slo.tbt_s, slo.e2e_s), strict=True)
            said |= {key: seconds * _MS for key, seconds in wanted if seconds is not None}
        return said


def mean_error(sigma: float) -> float:
    """Return ``E|exp(sigma Z) - 1|`` of a standard normal Z.

    The parts above and below 1 are ``exp(sigma^2 / 2) Phi(sigma) - 1/2`` and ``1/2 - exp(sigma^2 / 2) Phi(-sigma)``;
    their sum is ``exp(sigma^2 / 2) erf(sigma / sqrt(2))``.
    """
    return math.exp(sigma**2 / 2) * math.erf(sigma / math.sqrt(2))


def sigma_of(error: float) -> float:
    """Return the sigma whose `mean_error` is ``error``, a finite number of at least 0."""
    low, high = 0.0, 1.0
    while mean_error(high) < error:
        high *= 2
    for _ in range(100):  # mean_error grows with sigma
        middle = (low + high) / 2
        low, high = (middle, high) if mean_error(middle) < error else (low, middle)
    return high
