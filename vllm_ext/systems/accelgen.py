"""AccelGen (arXiv 2503.13737): objectives of each request set order, batch and budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from vllm_ext.contract import (
    Admission,
    AgeLimit,
    Budget,
    Candidate,
    Need,
    Ordering,
    Rank,
    RequestView,
    Room,
    Split,
    Step,
    Victim,
)
from vllm_ext.contract.aging import AGED_RANK
from vllm_ext.contract.checks import require
from vllm_ext.contract.slack import READING_TBT_S, given_up_at, job_step_s, slack, ttft_s
from vllm_ext.systems.sarathi import TbtBudget, beside_pressing, fitting_prompt_tokens
from vllm_ext.systems.system import System

IN_TIME, RELEGATED = 0, 1
_WAITS, _RUNS = 0.0, 1.0
_KNOWN, _KNOWN_STEPS = "accelgen.long", 64
"""Where a step notes which waiting requests are long beside whom, and for how many steps that holds at most."""


@dataclass(frozen=True, kw_only=True)
class SloSlack(Ordering):
    """Let the request go first that has the least time left to meet its objectives.

    The remaining time of those who wait shrinks for all alike, so it is turned into the clock time by which a request
    must start, which stands still. Of the running ones those with most time left are last, and so leave first.

    With ``relegate``, requests whose objective is lost go after all others: under overload the
    earliest deadlines are those just missed, and serving them first makes everybody miss. Among them the shortest goes
    first. Of those that have waited longer than ``age_limit_s`` the oldest have a share of all admissions, and are not
    pushed out again, so that nobody starves.

    Source: AccelGen, section 4.3; relegation and aging are ours (relegation as in Niyama, arXiv 2503.22562).
    """

    relegate: bool = True
    """Whether requests that can't meet their objective any more go last."""
    lost_steps: float = 1.0
    """Mean steps before it is certain that an objective can't be met, from which on it counts as lost."""
    press_steps: float = 4.0
    """Long steps before a request must run from which on running prompts leave it what it needs."""
    age_limit_s: float = 120.0
    """Waiting from which the oldest requests have a share of all admissions, in seconds."""
    aged_share: float = 0.1
    """That share, above 0: of one admission in ten; 1: they go before all others."""

    uses_predictions: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.STEP_TIMES, Need.OBJECTIVES})

    def __post_init__(self) -> None:
        for name in ("lost_steps", "press_steps"):
            require(getattr(self, name) >= 0, f"ordering.{name}", getattr(self, name), "a number of at least 0")
        require(self.age_limit_s > 0, "ordering.age_limit_s", self.age_limit_s, "seconds, greater than 0")
        require(0 < self.aged_share <= 1, "ordering.aged_share", self.aged_share, "greater than 0, at most 1")

    @property
    def age_limit(self) -> AgeLimit:
        """From when on the oldest have a share."""
        return AgeLimit(self.age_limit_s, self.aged_share)

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; a waiting one must be asked for again when it is lost."""
        if request.waiting_since is None and request.waited_s >= self.age_limit_s:
            return AGED_RANK
        left = slack(request, now)
        lost_at = given_up_at(request, left, self.lost_steps)
        lost = self.relegate and lost_at <= now
        level = RELEGATED if lost else IN_TIME
        loses = math.nextafter(lost_at, math.inf) if self.relegate and not lost else math.inf
        if request.waiting_since is None:  # the time it has left hardly moves once it has begun to answer
            begins = math.inf if request.num_output_tokens else 1.0
            return Rank((float(level), _RUNS, left.start_by - now), until_s=loses, until_tokens=begins, level=level)
        if lost:  # of those that are lost whatever happens, the shortest leaves most room for the others
            return Rank((RELEGATED, _WAITS, float(request.num_tokens)), level=level)
        presses_at = left.start_by - self.press_steps * request.step_stats.longest_step_s
        presses = presses_at <= now
        key = (float(level), _WAITS, left.start_by)
        return Rank(key, until_s=min(loses, math.inf if presses else presses_at), level=level, presses=presses)


class _Hopeful(NamedTuple):
    """A waiting request, and how its objectives stand."""

    candidate: Candidate
    remaining_s: float
    """T_r: time until it must run."""
    lost: bool
    """Whether its objective can't be met any more."""
    resigned: bool
    """Whether that ends its urgency."""

    def is_urgent(self, step: Step) -> bool:
        return self.candidate.aged or (not self.resigned and self.remaining_s <= step.step_stats.longest_step_s)


class _Longs:
    """Exclusive request allocation in a step: whom a long prompt of their priority or a higher one keeps out."""

    def __init__(self, policy: SloMatch, step: Step) -> None:
        self._policy, self._step = policy, step
        self._above = policy.long_prompt_tokens or step.runtime.pivot.tokens
        begun = itertools.chain(step.prefilling(), step.decoding() if policy.exclusive_to_end else ())
        long = [one for one in begun if one.num_prompt_tokens > self._above] if policy.exclusive else []
        self._first: float = min((one.priority for one in long), default=math.inf)
        self.passed_over: float = math.inf
        """The first priority of those that were left out."""
        self._known: dict[str, int] = {}
        if policy.exclusive_urgent:
            # A view of everybody in every step would cost most of it; what is cached of a prompt changes with these.
            computed, (since, of, known) = {one.req_id for one in long}, step.memo.get(_KNOWN, (0, None, {}))
            if of != computed or step.number - since >= _KNOWN_STEPS:
                step.memo[_KNOWN] = step.number, computed, (known := {})
            self._known = known

    @property
    def computes(self) -> bool:
        """Whether a long prompt is computed."""
        return self._first < math.inf

    def keep_out(self, candidate: Candidate) -> bool:
        """Say whether a request must wait."""
        if not self.computes:
            return False
        priority = self._known.get(candidate.req_id)
        if priority is None:
            if not self._is_long(candidate) or self._is_exempt(candidate):
                return False
            priority = candidate.request.priority
            if self._policy.exclusive_urgent:  # else time changes who is exempt
                self._known[candidate.req_id] = priority
        return self._first <= priority

    def pass_over(self, candidate: Candidate) -> bool:
        """Say the same, and note that others may pass."""
        out = self.keep_out(candidate)
        if out and self.passed_over == math.inf:
            self.passed_over = candidate.request.priority
        return out

    def joined(self, candidate: Candidate) -> None:
        """Note who joins the step."""
        self._known.pop(candidate.req_id, None)
        if self._policy.exclusive and self._is_long(candidate):
            self._first = min(self._first, candidate.request.priority)

    def _is_long(self, candidate: Candidate) -> bool:
        return candidate.request.missing_tokens > self._above

    def _is_exempt(self, candidate: Candidate) -> bool:
        if self._policy.exclusive_urgent:  # but who had begun to answer was started before
            return candidate.request.num_output_tokens > 0
        return self._policy.hopeful(candidate, self._step).is_urgent(self._step)


def _again(seen: list[Victim], rest: Iterator[Victim]) -> Iterator[Victim]:
    """Yield those who were looked at before, then the others, which are remembered."""
    yield from tuple(seen)
    for victim in rest:
        seen.append(victim)
        yield victim


@dataclass(frozen=True, kw_only=True)
class SloMatch(Admission):
    """Urgent requests join first, then those whose demand is nearest to what is left.

    A waiting request is urgent if it must run in the next step to keep its objective (T_r at most one long step), or if
    it has waited so long that the ordering puts it before all others. For an urgent one without a seat or memory the
    running requests with most time left are preempted. Among the waiting requests whose remaining time is within
    ``gamma_s`` of the first one's, the one is taken whose demand (tokens to compute, tokens of KV) is nearest, by
    Euclid, to what the step has left; this is repeated until none fits. A prompt longer than what is left is cut to it.

    A long prompt does not start while another one is computed, with ``exclusive_to_end`` while another one's request is
    unfinished (exclusive request allocation), unless that one has a lower priority. It does not count as the first one
    then: others of its priority pass it, of the first ``look_past`` that wait. At most the first 32 of the others are
    looked at, and only the urgent ones where there is no room. Who had begun to answer before it was preempted is no
    new long prompt.

    Source: AccelGen, section 4.2 (ERA) and 4.4, Algorithms 1 and 2. Ours: the guard against preempting a request again
    before it got on, that a request that is lost already is not urgent, ``gamma_steps``, ``lost_steps``, and ``spare``:
    whoever has begun to answer and is pushed out misses its next token, so that one objective is kept at the price of
    another and a recomputation.
    """

    uses_predictions: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OBJECTIVES})

    gamma_s: float = 0.75
    """Requests so much later than the first one compete with it, in seconds. Source: AccelGen, section 6.1."""
    gamma_steps: float = 4.0
    """... and at most so many long steps later, so that it suits engines much quicker than the paper's; 0: no bound."""
    lost_steps: float = 1.0
    """Mean steps before it is certain that an objective can't be met, from which on it counts as lost."""
    lost_urgent: bool = False
    """Whether a request whose objective is lost is urgent like one that can still be met."""
    match: bool = True
    """Choose by demand; False: in the order of the queue (ablation /Batch)."""
    ordered: bool = True
    """Whether the queue is in the order of slack, so that the first ones tell of those after them."""
    exclusive: bool = True
    """Whether one long prompt at a time is computed."""
    exclusive_to_end: bool = False
    """Whether its request then keeps other long ones out until it is completed."""
    exclusive_urgent: bool = True
    """Whether it keeps out urgent ones as well: two in a step make each other late."""
    look_past: int = 256
    """Long prompts that are kept out, and others, that a step looks at to find those behind them."""
    long_prompt_tokens: int = 0
    """Prompts with more to compute than this are long; 0: more than the step at which throughput saturates."""
    preempt: bool = True
    """Whether urgent requests may push out running ones."""
    min_progress_tokens: int = 16
    """Output tokens a request must have generated since its last preemption before it can be preempted again."""
    spare: bool = True
    """Whether running requests that have begun to answer are left alone."""
    max_victims: int = 8
    """Requests preempted per step at most."""

    def __post_init__(self) -> None:
        require(self.gamma_s >= 0, "admission.gamma_s", self.gamma_s, "seconds, at least 0")
        for name in ("gamma_steps", "lost_steps"):
            require(getattr(self, name) >= 0, f"admission.{name}", getattr(self, name), "a number of at least 0")
        for name, least in (
            ("long_prompt_tokens", 0),
            ("min_progress_tokens", 1),
            ("max_victims", 1),
            ("look_past", 1),
        ):
            value = getattr(self, name)
            require(value >= least, f"admission.{name}", value, f"an integer of at least {least}")

    @property
    def preempts(self) -> bool:
        """Whether it preempts."""
        return self.preempt

    def select(self, step: Step, room: Room) -> None:
        """Take the urgent ones, then those that match; of a lower priority only when nobody of a higher one is left."""
        longs = _Longs(self, step)
        # Without room only urgent ones can get in, who stand before all others, or are kept out too.
        looks_past = longs.computes and (room.open or not self.exclusive_urgent)
        waiting = step.waiting(longs.pass_over if looks_past else None, past=self.look_past)
        for priority, alike in itertools.groupby(waiting, key=lambda candidate: candidate.request.priority):
            if longs.passed_over < priority:
                return
            head, more = self._head(alike, step, room)
            urgent = [hopeful for hopeful in head if hopeful.is_urgent(step)]
            if not self._admit_urgent(step, room, urgent, longs):
                return
            self._admit_matching(step, room, [hopeful for hopeful in head if hopeful not in urgent], longs)
            joined = {*room.admit}
            if more or not room.open or any(hopeful.candidate.req_id not in joined for hopeful in head):
                return

    def _head(self, candidates: Iterator[Candidate], step: Step, room: Room) -> tuple[list[_Hopeful], bool]:
        """Return the urgent requests at the head of the queue and, where there is room, those that compete to join.

        And whether there are others, which do not compete yet.
        """
        found: list[_Hopeful] = []
        first: _Hopeful | None = None
        has_room, group_s = room.open, self._group_s(step)
        for candidate in candidates:
            hopeful = self.hopeful(candidate, step)
            if not hopeful.is_urgent(step):
                # In order of slack those after the first one's group are later still.
                first = first or hopeful
                late = not has_room or hopeful.remaining_s > first.remaining_s + group_s
                if late and self.ordered:
                    return found, True
                if not has_room:
                    continue
            found.append(hopeful)
        return found, False

    def hopeful(self, candidate: Candidate, step: Step) -> _Hopeful:
        """Return how the objectives of a waiting request stand."""
        remaining_s, lost = self._standing(candidate.request, step.now)
        return _Hopeful(candidate, remaining_s, lost, lost and not self.lost_urgent)

    def _standing(self, request: RequestView, now: float) -> tuple[float, bool]:
        """Return T_r, the time until a request must run, in seconds, and whether its objective is lost."""
        left = slack(request, now)
        return left.start_by - now, given_up_at(request, left, self.lost_steps) <= now

    def _admit_urgent(self, step: Step, room: Room, urgent: list[_Hopeful], longs: _Longs) -> bool:
        """Take the urgent requests in; False if one that aged finds no room, so that nobody may pass it."""
        victims, seen = step.victims(), list[Victim]()
        for hopeful in urgent:
            candidate = hopeful.candidate
            if longs.keep_out(candidate):
                continue
            if room.fits(candidate):
                room.take(candidate)
                longs.joined(candidate)
                continue
            if room.tokens < 1:
                return not candidate.aged
            may = self.preempt and not hopeful.resigned
            leaving = self._leaving(step, room, hopeful, _again(seen, victims)) if may else ()
            if leaving:
                room.take(candidate, leaving)
                longs.joined(candidate)
            elif candidate.aged:
                return False
        return True

    def _leaving(self, step: Step, room: Room, hopeful: _Hopeful, victims: Iterator[Victim]) -> tuple[Victim, ...]:
        """Return those with most time left, until the urgent one fits; nobody, if it can't be made to fit."""
        leaving: tuple[Victim, ...] = ()
        for victim in victims:
            if len(room.preempt) + len(leaving) >= self.max_victims:
                return ()
            request = victim.request
            if request.req_id in room.preempt:
                continue
            remaining_s, lost = self._standing(request, step.now)
            if not lost and remaining_s <= hopeful.remaining_s:
                return ()
            if request.num_preemptions and request.progress_tokens < self.min_progress_tokens:
                continue
            if self.spare and request.num_output_tokens:
                continue
            leaving += (victim,)
            if room.fits(hopeful.candidate, leaving):
                return leaving
        return ()

    def _admit_matching(self, step: Step, room: Room, rest: list[_Hopeful], longs: _Longs) -> None:
        rest = [hopeful for hopeful in rest if not longs.keep_out(hopeful.candidate)]
        if not rest or not room.open:
            return
        first = rest[0]
        latest_s = first.remaining_s + self._group_s(step)
        group = [h.candidate for h in rest if h.lost == first.lost and h.remaining_s <= latest_s]
        while group:
            # What does not fit now may do so once somebody is taken whose prefix it shares.
            fitting = [c for c in group if not longs.keep_out(c) and room.fits(c)]
            if not fitting or (not self.match and fitting[0] is not group[0]):
                return
            best = min(fitting, key=lambda c: self._distance(step, room, c)) if self.match else fitting[0]
            group.remove(best)
            room.take(best)
            longs.joined(best)

    def _group_s(self, step: Step) -> float:
        """Return how much later than the first one a request may be to compete with it, in seconds."""
        if not self.gamma_steps:
            return self.gamma_s
        return min(self.gamma_s, self.gamma_steps * step.step_stats.longest_step_s)

    @staticmethod
    def _distance(step: Step, room: Room, candidate: Candidate) -> float:
        demand = room.demand(candidate)
        left = room.tokens - min(demand.tokens, room.tokens)
        return math.hypot(left, (room.blocks - demand.blocks) * step.pool.block_size)


_RULE = TbtBudget()


@dataclass(frozen=True, kw_only=True)
class SloPivotBudget(Budget):
    """Scale the step at which throughput saturates to the tightest objective of those who run.

        S_b = S_pf * SLO_min / T_pf        S_pf: tokens of the saturated step, T_pf: its duration
                                           SLO_min: tightest TBT objective, the reading speed where nobody has one;
                                           with ``every_objective`` also the tightest TTFT of unfinished prompts,
                                           and what a step of a job may take

    Computed anew for every step; prompts are cut where exactly S_b is reached (vLLM cuts the last one). Contexts are
    not in the formula: a step of long contexts takes longer than it says. So with ``fitted`` no more is granted than
    keeps the step within 0.9 of the objective by the step-time model.

    Source: AccelGen, section 4.2 and equation 6, Algorithm 2; ``fitted`` is ours, by the rule of `TbtBudget`. So are
    two omissions, which the published row undoes. A TTFT objective spans many steps of a long prompt, and those of
    short ones are often less than a step that decodes. And a prompt that starts without KV for all of it may stop half
    way, for want of what others hold who wait for the same.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.STEP_TIMES, Need.OBJECTIVES})

    fitted: bool = True
    """Whether contexts are looked at as well."""
    every_objective: bool = False
    """Whether SLO_min covers TTFT objectives too, of prompts that run unfinished and of the first one that waits, and
    those of whole jobs that run, spread evenly over their steps. Cost: a look at everybody who runs."""
    min_prefill_tokens: int = 64
    """Prompt tokens granted to a step at least: or one tight objective stops everybody's prompts."""
    within_kv: bool = False
    """Whether a step gets no more prompt tokens than there are free KV slots, so that prompts, those that start
    included, are cut to these too."""

    def __post_init__(self) -> None:
        least = self.min_prefill_tokens
        require(least >= 1, "budget.min_prefill_tokens", least, "an integer of at least 1")

    @property
    def starts_partly(self) -> bool:
        """Whether a prompt may start before there is KV for all of it."""
        return self.within_kv

    def split(self, step: Step) -> Split:
        """Return S_b, and at least a token for everybody who decodes and some for a prompt."""
        objective_s = self.objective_s(step)
        tokens = pivot_tokens(step, objective_s)
        if self.fitted and step.num_decoding:
            fitting = fitting_prompt_tokens(step, _RULE.safety * objective_s)
            tokens = min(tokens, step.decode_tokens + fitting)
        tokens = max(tokens, step.decode_tokens + self.min_prefill_tokens)
        if self.within_kv and (step.num_decoding or step.pool.unused):
            # With neither, the next token costs somebody its KV, and prompts would take it from one another for ever.
            blocks_per_token = sum(1 / size for size in step.pool.block_sizes)
            tokens = min(tokens, step.decode_tokens + int(step.pool.unused / blocks_per_token))
        return beside_pressing(step, Split(tokens=max(tokens, step.decode_tokens + 1)))

    def objective_s(self, step: Step) -> float:
        """Return SLO_min, in seconds."""
        tightest = step.tbt_s(READING_TBT_S)
        if not self.every_objective:
            return tightest
        first, unfinished = next(step.waiting(), None), step.prefilling()
        prompts = [*unfinished, *(() if first is None else (first.request,))]
        jobs = [
            job_step_s(request, request.slo.e2e_s)
            for request in (*unfinished, *step.decoding())
            if request.slo.e2e_s is not None
        ]
        return min([tightest, *map(_next_token_s, prompts), *jobs])


def pivot_tokens(step: Step, objective_s: float) -> int:
    """Return S_b, in tokens."""
    pivot = step.runtime.pivot
    return int(pivot.tokens * objective_s / pivot.step_s)


def _next_token_s(request: RequestView) -> float:
    """Return the objective of a request's next token: its first one, or one after a preemption."""
    if not request.num_output_tokens:
        return ttft_s(request)
    return READING_TBT_S if request.slo.tbt_s is None else request.slo.tbt_s


_PAPER = "AccelGen (arXiv 2503.13737)"
_ALL = 32
"""Requests that the scheduler shows: no bound of ours below that."""
_NEVER_AGED = {"age_limit_s": 1e6, "aged_share": 1.0}

ROWS = (
    System(
        name="accelgen",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        paper=_PAPER,
        summary="least time left to the objective first, urgent requests preempt, compute and memory matched",
    ),
    System(
        name="accelgen-published",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        parameters={
            "ordering": {"relegate": False, "lost_steps": 0.0, "press_steps": 1.0, **_NEVER_AGED},
            "admission": {
                "gamma_s": 0.75,
                "gamma_steps": 0.0,
                "lost_steps": 0.0,
                "lost_urgent": False,
                "match": True,
                "ordered": True,
                "exclusive": True,
                "exclusive_to_end": True,  # section 4.2: "until the request is completed"
                "exclusive_urgent": False,  # those "that must run in the next iteration" are no issue
                "look_past": 4096,  # as good as all
                "long_prompt_tokens": 4095,  # "long" is 4K tokens and more
                "preempt": True,
                "min_progress_tokens": 1,
                "spare": False,
                "max_victims": _ALL,
            },
            "budget": {"fitted": False, "every_objective": True, "min_prefill_tokens": 1, "within_kv": False},
        },
        paper=_PAPER,
        summary="accelgen as published: nobody is relegated, answers are preempted, equation 6 decides alone",
    ),
)
