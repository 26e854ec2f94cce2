"""ALISE (arXiv 2410.23537): order by predicted length, and preempted KV swapped to host memory in 8 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_ext.contract.aging import ages_at, outlived_at
from vllm_ext.contract.axes import Admission, Need, Ordering, Residency
from vllm_ext.contract.checks import require
from vllm_ext.contract.preemption import KvDisposition, PreemptionCost
from vllm_ext.contract.request import AGED, Ageing, AgeLimit, Rank, RequestView
from vllm_ext.contract.room import Candidate, Room, Victim
from vllm_ext.contract.step import Step
from vllm_ext.systems.fcfs import LeastComputedLeaves
from vllm_ext.systems.system import System
from vllm_ext.systems.upstream import take_while_they_fit

RETURNING, FRESH = 0.0, 1.0
_CLASSES, _PER_CLASS = 12, 4.0
"""For metrics: classes of cost, the times by which one costs more than the one below."""


def cost(request: RequestView, theta: float) -> float:
    """Return what a request takes of the server, over what its end is worth.

    A decode step in which it holds p + g tokens takes the share ``1 / max_num_seqs + (p + g) / kv_tokens`` of the
    server, so that an output of N tokens after a prompt of p takes

        E[N] * (1 / max_num_seqs + p / kv_tokens) + E[N ** 2] / (2 * kv_tokens) + prefill_steps * uncached

    steps of it, where ``uncached`` counts the prompt tokens still to compute. Its end is worth E[N ** -theta].
    """
    distribution, server = request.distribution, request.server
    share = 1 / server.max_num_seqs + request.num_prompt_tokens / server.kv_tokens
    steps = distribution.moment(1) * share + distribution.moment(2) / (2 * server.kv_tokens)
    return (steps + server.prefill_steps * request.missing_tokens) / distribution.moment(-theta)


@dataclass(frozen=True, kw_only=True)
class CostOverWait(LeastComputedLeaves):
    """Order those who wait by cost over a power of their waiting; nobody is preempted for being passed.

    score = cost / (now - arrival + ``grace_s``) ** ``gamma``, the least goes first. A request of cost c yields to
    newcomers of cost d only until it has waited about ``grace_s`` * (c / d) ** (1 / ``gamma``). Who was preempted comes
    back before all others, by arrival.

    Ours: the order of weighted shortest expected processing time (Smith, 1956), with KV memory as part of the time and
    a wait that counts; ALISE's is by remaining time, preemptive. See docs/systems/alise.md.
    """

    uses_predictions: ClassVar[bool] = True

    gamma: float = 0.5
    """Power of waiting, above 0: 0.25 for normalised latency, 0.5 for the mean, 1 for the tail."""
    theta: float = 0.5
    """Power of the output length by which ends are worth less, from 0 (mean latency) to 1 (normalised latency)."""
    grace_s: float = 1.0
    """Waiting that everybody is taken to have behind it, in seconds."""
    age_limit_s: float = 60.0
    """Waiting from which the oldest requests have a share of all admissions, in seconds."""
    aged_share: float = 0.25
    """That share, above 0: of one admission in four."""

    def __post_init__(self) -> None:
        require(0 < self.gamma <= 4, "ordering.gamma", self.gamma, "greater than 0 and at most 4")
        require(0 <= self.theta <= 1, "ordering.theta", self.theta, "from 0 to 1")
        require(self.grace_s > 0, "ordering.grace_s", self.grace_s, "seconds, greater than 0")
        require(self.age_limit_s > 0, "ordering.age_limit_s", self.age_limit_s, "seconds, greater than 0")
        require(0 < self.aged_share <= 1, "ordering.aged_share", self.aged_share, "greater than 0, at most 1")

    @property
    def age_limit(self) -> AgeLimit:
        """From when on the oldest have a share."""
        return AgeLimit(self.age_limit_s, self.aged_share)

    @property
    def ageing(self) -> Ageing:
        """How waiting counts against cost."""
        return Ageing(self.gamma, self.grace_s)

    def prices(self, decode_s: float, prefill_s: float) -> tuple[float, ...]:
        """Return how prompts compare with outputs: costs are in decode steps."""
        return (prefill_s / decode_s if decode_s else 0.0,)

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; it holds while the request waits."""
        if request.num_preemptions:
            return Rank((RETURNING,), level=0)
        steps = cost(request, self.theta)
        return Rank((FRESH,), cost=steps, level=cost_class(steps))


def cost_class(steps: float) -> int:
    """Return 1 for a cost of less than 4 steps, 2 for less than 16, and so on to 12."""
    return 1 + min(max(0, math.floor(math.log(steps, _PER_CLASS))), _CLASSES - 1)


_RATHER_OFTEN = 8
"""A running request is ranked anew when it has generated, or aged by, an eighth more."""


@dataclass(frozen=True, kw_only=True)
class GittinsOverWait(CostOverWait):
    """Order those who wait and those who run by what it costs to bring the next one to its end, over waiting.

    cost = (share / G + ``prefill_steps`` * missing) * E[N | N > g] ** ``theta``, where G is the Gittins index of a
    request that has generated g tokens, and ``share`` what a decode step of it takes of the server (`cost`). It rises
    with what has been generated for nothing, so that a newcomer, likely to be short, goes before one that turned out
    long. Running requests count ``hysteresis`` times as good: leaving and coming back has a price.

    Whoever was preempted goes before all others ``back_after_s`` after it left. Meant for servers with a KV tier, and
    with an `Admission` that preempts each request once: otherwise long ones come to no end.

    Source: Gittins (1979); Aalto, Ayesta and Righter (2009) for queues. KV as a part of the cost, the waiting and the
    bound on how long one stays out are ours.
    """

    gamma: float = 0.25
    hysteresis: float = 3.0
    """How many times better a waiting request must rank than a running one to go before it, at least 1."""
    back_after_s: float = 15.0
    """Seconds after which one that was preempted goes before all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.hysteresis >= 1, "ordering.hysteresis", self.hysteresis, "at least 1")
        require(self.back_after_s >= 0, "ordering.back_after_s", self.back_after_s, "seconds, at least 0")

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a waiting ``request``; asked again when one that was preempted is to come back."""
        until = math.inf
        if request.num_preemptions and request.waiting_since is not None:
            until = request.waiting_since + self.back_after_s
            if now >= until:
                return Rank((RETURNING,), level=0)
        steps = gittins_cost(request, self.theta)
        return Rank((FRESH,), until_s=until, cost=steps, level=cost_class(steps))

    def running_rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a running request, comparable with those of waiting ones."""
        waited, generated = now - request.arrival_time, request.num_output_tokens
        score = self.ageing.score(gittins_cost(request, self.theta), waited) / self.hysteresis
        return Rank(
            (FRESH, score),
            until_s=now + (waited + self.grace_s) / _RATHER_OFTEN,
            until_tokens=generated + max(1, generated // _RATHER_OFTEN),
        )


def gittins_cost(request: RequestView, theta: float) -> float:
    """Return the decode steps of a full server that it takes to end such a request, over what its end is worth."""
    distribution, server, generated = request.distribution, request.server, request.num_output_tokens
    share = 1 / server.max_num_seqs + request.num_tokens / server.kv_tokens
    steps = share / distribution.gittins(generated) + server.prefill_steps * request.missing_tokens
    return float(steps * (generated + distribution.remaining(generated)) ** theta)


@dataclass(frozen=True, kw_only=True)
class RemainingTimeLevels(Ordering):
    """Order requests by predicted remaining time in priority queues of doubling width.

    Queue 0 takes requests with less than ``base_level_s`` left, queue k those with less than ``base_level_s * 2**k``,
    the last one all the rest; inside a queue the shorter remaining time goes first. A request that outlived its
    estimate k times is never above queue k. Each ``age_limit_s`` of waiting promotes by one queue, and one promoted
    past queue 0 goes before everybody that is not, oldest first; so no request waits longer than
    ``num_levels * age_limit_s`` behind younger ones. Promotions are kept while it runs and when it is preempted.

    Source: ALISE, section 3.1 (preemptive scheduling, virtual aging, demotion). The paper leaves the number of queues,
    their widths and the unit of the age threshold K open.
    """

    num_levels: int = 6
    """Number of queues, at least 1."""
    base_level_s: float = 0.5
    """Remaining time below which a request belongs to the highest queue, in seconds."""
    age_limit_s: float = 20.0
    """Waiting time per promotion, in seconds: the paper's K."""

    def __post_init__(self) -> None:
        require(self.num_levels >= 1, "ordering.num_levels", self.num_levels, "an integer of at least 1")
        require(self.base_level_s > 0, "ordering.base_level_s", self.base_level_s, "seconds, greater than 0")
        require(self.age_limit_s > 0, "ordering.age_limit_s", self.age_limit_s, "seconds, greater than 0")

    def level(self, request: RequestView) -> int:
        """Return the queue of a request before aging, 0 (highest) to ``num_levels - 1``."""
        ratio = request.predicted_remaining_s / self.base_level_s
        if math.isinf(ratio):
            return self.num_levels - 1
        by_time = 0 if ratio < 1 else math.frexp(ratio)[1]  # frexp: 2**(e-1) <= ratio < 2**e
        return min(self.num_levels - 1, max(by_time, request.num_demotions))

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; a waiting one must be asked for again at its next promotion."""
        level = self.level(request)
        promotions = int(request.total_wait_s(now) // self.age_limit_s)
        if promotions > level:
            return Rank((0.0,), older_only_s=-math.inf, level=AGED)
        queue = level - promotions
        return Rank(
            (1.0, queue, request.predicted_remaining_s),
            until_s=ages_at(request, (promotions + 1) * self.age_limit_s),
            until_tokens=self.rises_at(request),
            older_only_s=ages_at(request, (level + 1) * self.age_limit_s),
            level=queue,
        )

    def rises_at(self, request: RequestView) -> float:
        """Return the output length, in tokens, at which a request rises by a queue or outlives its estimate.

        What it has left is taken to fall evenly; it is asked again there, and then knows better.
        """
        left = request.predicted_output_tokens - request.num_output_tokens
        remaining_s = request.predicted_remaining_s
        level = min(self.level(request), self.num_levels - 1)
        if left <= 0 or level <= request.num_demotions or not 0 < remaining_s < math.inf:
            return outlived_at(request)
        share = 1 - self.base_level_s * 2.0 ** (level - 1) / remaining_s
        return min(outlived_at(request), request.num_output_tokens + max(1.0, left * share))


_NOTE, _MOST_NOTED = "passing.since", "passing.most"
_NOTED = 256
"""Requests that are noted before those who are gone are looked for."""


@dataclass(frozen=True, kw_only=True)
class BoundedBypass(Admission):
    """Take waiting requests in order; one that does not fit is passed by others for a while, and then holds them up.

    A short prompt need not wait until there is room for the long one before it, but passed without bound the long one
    starves. One whose objective presses holds nobody up: soon it has joined, or its objective is lost. Nobody is
    preempted for those who wait; running requests keep a reserve of KV blocks to grow into.
    """

    uses_predictions: ClassVar[bool] = False

    kv_reserve: float = 0.05
    """Share of the device's blocks that admissions leave to running requests, as vLLM's ``--watermark``."""
    max_passed: int = 16
    """Requests that may be passed over in one step because they do not fit."""
    passed_s: float = 2.0
    """How long one may be passed since it first did not fit, in seconds."""

    def __post_init__(self) -> None:
        require(0 <= self.kv_reserve < 1, "admission.kv_reserve", self.kv_reserve, "at least 0 and less than 1")
        require(self.max_passed >= 0, "admission.max_passed", self.max_passed, "an integer of at least 0")
        require(self.passed_s >= 0, "admission.passed_s", self.passed_s, "seconds, at least 0")

    @property
    def device_reserve(self) -> float:
        """Share of the device's blocks that admissions leave to running requests."""
        return self.kv_reserve

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit."""
        since: dict[str, float] = step.memo.setdefault(_NOTE, {})
        passed = 0
        for candidate in step.waiting() if room.open else ():
            if room.fits(candidate):
                room.take(candidate)
                since.pop(candidate.req_id, None)
                if not room.open:
                    break
                continue
            passed += 1
            holds = candidate.aged or (
                not candidate.presses and step.now - since.setdefault(candidate.req_id, step.now) > self.passed_s
            )
            if holds or passed > self.max_passed:
                break
        if len(since) > step.memo.get(_MOST_NOTED, _NOTED):
            for req_id in [req_id for req_id in since if not step.is_waiting(req_id)]:
                del since[req_id]
            step.memo[_MOST_NOTED] = 2 * len(since) + _NOTED


@dataclass(frozen=True, kw_only=True)
class Preempting(Admission):
    """What selectors that preempt have in common: who may leave, and when that is worth what it costs.

    A waiting request that does not fit is given the seats and blocks of the running requests of worst rank, if
    normalised latency (seconds per output token, summed over requests) is expected to fall:

        gain = t / n_w                                              t: time until a seat frees by itself
        loss = sum over victims v of (t + c_v) / n_v + s_v * R * m  n: predicted output, c: time to restore v's KV,
                                                                    s: of that, what the others wait,
                                                                    R: running requests, m: mean of their 1 / n

    What is recomputed the others wait for, so s = c; with a KV tier both are shorter. A victim ranks after the request
    it makes room for, and one that was preempted before must have generated ``min_progress_tokens`` since.

    The cost term and the guard against thrashing are ours: ALISE swaps, and states no price.
    """

    preempt: bool = True
    """Whether running requests may be preempted to admit better ones."""
    priced: bool = True
    """Whether a preemption must pay; False: whoever ranks first gets the place, as where KV is swapped for nothing."""
    gain_ratio: float = 1.0
    """The expected gain must exceed the loss this many times."""
    min_progress_tokens: int = 16
    """Output tokens a request must have generated since its last preemption before it can be preempted again."""
    spare_outlived: bool = False
    """Whether requests that outlived their estimate are never victims: what they have left nobody knows."""
    max_preempting: int = 4
    """Waiting requests per step for which others may leave, so that the cost of a step does not depend on the queue."""
    max_victims: int = 4
    """Victims for each."""

    def __post_init__(self) -> None:
        require(self.gain_ratio > 0, "admission.gain_ratio", self.gain_ratio, "greater than 0")
        for field in ("min_progress_tokens", "max_preempting", "max_victims"):
            value = getattr(self, field)
            require(value >= 1, f"admission.{field}", value, "an integer of at least 1")

    @property
    def preempts(self) -> bool:
        """Whether it preempts."""
        return self.preempt

    def make_room(self, step: Step, room: Room, candidates: Iterator[Candidate]) -> None:
        """Take the next candidates for whom it pays that others leave, until one finds no victims."""
        victims: Iterator[Victim] | None = None
        for count, candidate in enumerate(candidates):
            if count >= self.max_preempting or room.tokens < 1:  # a seat is worth nothing without a token
                return
            victims = victims or step.victims(behind=candidate.key)  # the next ones rank after it
            leaving = self._leaving(step, room, candidate, victims)
            if leaving is None:
                return
            room.take(candidate, leaving)

    def _leaving(
        self, step: Step, room: Room, candidate: Candidate, victims: Iterator[Victim]
    ) -> tuple[Victim, ...] | None:
        """Return whom to preempt for a candidate, nobody if it fits anyhow; None if it can't or is not worth it."""
        leaving: tuple[Victim, ...] = ()
        while not room.fits(candidate, leaving):
            if len(leaving) >= self.max_victims:
                return None
            victim = next((v for v in victims if self._may_leave(v)), None)
            if victim is None or candidate.key >= victim.key:
                return None
            leaving += (victim,)
        return leaving if not leaving or not self.priced or self._pays(step, candidate, leaving) else None

    def _may_leave(self, victim: Victim) -> bool:
        request = victim.request
        if self.spare_outlived and request.num_demotions:
            return False
        return not request.num_preemptions or request.progress_tokens >= self.min_progress_tokens

    def _pays(self, step: Step, candidate: Candidate, leaving: tuple[Victim, ...]) -> bool:
        best = step.best_running()
        if best is None:
            return False
        until_free_s = best.predicted_remaining_s
        gain = until_free_s / candidate.request.predicted_output_tokens
        mean_weight = (1 / best.predicted_output_tokens + 1 / leaving[0].request.predicted_output_tokens) / 2
        loss = sum(
            (until_free_s + v.restore_s) / v.request.predicted_output_tokens
            + v.stall_s * step.num_running * mean_weight
            for v in leaving
        )
        return gain > self.gain_ratio * loss


@dataclass(frozen=True, kw_only=True)
class Preemptive(Preempting):
    """Let the requests that rank first have the seats and the KV memory, when that is worth what it costs.

    Waiting requests are taken in rank order while they fit; for the next ones others are preempted, if that pays.

    Source: ALISE, section 3.2 and Algorithm 2 (the first M jobs in order belong on the GPU).
    """

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at: prices are made of them."""
        return self.priced

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit in order, then those who fit if others leave."""
        candidates = step.waiting()
        refused = take_while_they_fit(room, candidates) if room.open else None
        if self.preempt:
            self.make_room(step, room, candidates if refused is None else itertools.chain((refused,), candidates))


@dataclass(frozen=True, kw_only=True)
class BypassThenPreempt(BoundedBypass, Preempting):
    """What selectors have in common that take waiting requests as `BoundedBypass`, and then preempt others for some."""

    uses_predictions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        BoundedBypass.__post_init__(self)
        Preempting.__post_init__(self)

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit, then those for whom others leave."""
        super().select(step, room)
        if self.preempt and (room.why or not room.open):
            joined = set(room.admit)
            self.make_room(step, room, (c for c in self._left_over(step) if c.req_id not in joined))

    def _left_over(self, step: Step) -> Iterator[Candidate]:
        """Yield waiting requests for whom others may leave, in order."""
        return step.waiting()


@dataclass(frozen=True, kw_only=True)
class PreemptOnce(BypassThenPreempt):
    """Take waiting requests as `BoundedBypass` does; for those that do not fit others leave that rank behind them.

    Whoever was preempted once stays from then on, unless KV memory runs out: so every request ends, and its stream has
    one such gap at most. Ours; preemption is by rank, as in ALISE.
    """

    priced: bool = False

    def _may_leave(self, victim: Victim) -> bool:
        return not victim.request.num_preemptions and super()._may_leave(victim)


SWAPPED, RECOMPUTED, PRICED = "swap", "recompute", "cost"


@dataclass(frozen=True, kw_only=True)
class EstimatedWait(Residency):
    """Decide for each preempted request, and copy the KV of those who will be preempted ahead of it.

    Of a request that has to leave, the KV stays where it is if the request is expected back before its blocks are
    reused (estimated wait time, eq. 7). Otherwise it is copied to host memory, or given up where computing it again is
    quicker than both copies:

        swap if  exposed * out + back < recompute

    unless it costs less to keep it on the device in 8 bits, where there is room for that.

    Who leaves next is seen by Algorithm 2: all requests in order of rank, the first that fit into memory belong there,
    and the KV of the others is copied while they still run, so that little is left to copy when they go.

    Needs a KV tier; without one everything is recomputed, as vLLM does.

    Source: ALISE, section 3.2, eqs. 6-7, Algorithm 2. Ours: the choice by cost, where the paper always swaps; a wait
    counted in places side by side; and copies ahead of time in the order of ranks, where the paper's are by queues.
    """

    choose: str = PRICED
    """``cost``, or always ``swap`` or ``recompute``: the strategies that ALISE's figure 8 compares."""
    exposed: float = 1.0
    """Part of the copy to the host that others wait for; 0 where it is wholly hidden behind computation."""
    ahead: bool = True
    """Whether KV is copied before its request is preempted, when that is foreseen."""
    every_steps: int = 4
    """Steps between two looks at who will have to leave."""
    max_leaving: int = 4
    """Requests whose KV is copied ahead at a time."""
    tier_bits: int = 8
    """Form of KV in host memory unless the user asks for another: 8 (ALISE, section 3.3) or 16."""

    def __post_init__(self) -> None:
        allowed = (PRICED, SWAPPED, RECOMPUTED)
        require(self.choose in allowed, "residency.choose", self.choose, f"one of {', '.join(allowed)}")
        require(0 <= self.exposed <= 1, "residency.exposed", self.exposed, "from 0 to 1")
        require(self.tier_bits in (8, 16), "residency.tier_bits", self.tier_bits, "8 or 16")
        for field in ("every_steps", "max_leaving"):
            value = getattr(self, field)
            require(value >= 1, f"residency.{field}", value, "an integer of at least 1")

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at: waits are made of them."""
        return self.choose == PRICED

    @property
    def needs(self) -> frozenset[Need]:
        """Host memory, unless everything is recomputed anyway."""
        return frozenset() if self.choose == RECOMPUTED else frozenset({Need.TIER_FOR_PREEMPTED})

    @property
    def tier_options(self) -> dict[str, Any]:
        """Options of the KV tier that this policy wants where the user leaves them open."""
        return {"bits": self.tier_bits}

    def on_preempt(self, request: RequestView, cost: PreemptionCost) -> KvDisposition:
        """Return what becomes of a preempted request's KV."""
        if self.choose == RECOMPUTED:
            return KvDisposition.RECOMPUTE
        if cost.wait_s < cost.reuse_s:
            return KvDisposition.KEEP
        if self.choose == SWAPPED:
            return KvDisposition.SWAP
        swap_s = self.exposed * cost.out_s + cost.back_s
        return KvDisposition.SWAP if swap_s < request.recompute_s else KvDisposition.RECOMPUTE

    @property
    def look_ahead_steps(self) -> int:
        """Steps between two times that `leaving_soon` is asked."""
        return self.every_steps

    def leaving_soon(self, step: Step, room: Room) -> tuple[str, ...]:
        """Return the running requests, by id, that better-ranked waiting ones will push out.

        Cost: a look at a few requests in one step of ``every_steps``.
        """
        if not self.ahead or self.choose == RECOMPUTED or not step.num_waiting or not step.num_running:
            return ()
        leaving: list[str] = []
        victims = (victim for victim in step.victims() if victim.request.req_id not in room.preempt)
        blocks = room.blocks
        victim = next(victims, None)
        for candidate in step.waiting():
            if candidate.request.req_id in room.admit:
                continue
            blocks -= room.demand(candidate).blocks
            while blocks < 0 and victim is not None and len(leaving) < self.max_leaving:
                if candidate.key >= victim.key:
                    return tuple(leaving)
                leaving.append(victim.request.req_id)
                blocks += victim.blocks
                victim = next(victims, None)
            if blocks < 0:
                break
        return tuple(leaving)


_PAPER = "ALISE (arXiv 2410.23537)"
_ALL = 32
"""Requests that the scheduler shows: no bound of ours below that."""

ROWS = (
    System(
        name="alise",
        ordering=CostOverWait,
        admission=BoundedBypass,
        residency=EstimatedWait,
        paper=_PAPER,
        summary="least cost by predicted length and KV over a power of waiting, not preemptive",
    ),
    System(
        name="alise-ttft",
        ordering=GittinsOverWait,
        admission=PreemptOnce,
        residency=EstimatedWait,
        parameters={"admission": {"kv_reserve": 0.02}, "residency": {"choose": SWAPPED}},
        paper=_PAPER,
        summary="alise for first tokens: long requests leave for short ones once, for 15 s at most; with a KV tier",
    ),
    System(
        name="alise-published",
        ordering=RemainingTimeLevels,
        admission=Preemptive,
        residency=EstimatedWait,
        parameters={
            # The number of queues, their widths and the age threshold K are not in the paper.
            "ordering": {"num_levels": 6, "base_level_s": 0.5, "age_limit_s": 300.0},
            "admission": {
                "preempt": True,
                "priced": False,
                "gain_ratio": 1.0,
                "min_progress_tokens": 1,
                "spare_outlived": False,
                "max_preempting": _ALL,
                "max_victims": _ALL,
            },
            "residency": {
                "choose": SWAPPED,
                "exposed": 1.0,
                "ahead": True,
                "every_steps": 1,
                "max_leaving": _ALL,
                "tier_bits": 8,
            },
        },
        paper=_PAPER,
        summary="alise as published: preempts whoever ranks worse, and always swaps in 8 bits",
    ),
)
