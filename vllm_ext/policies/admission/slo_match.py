"""Admit what must run now, then what fits what is left of compute and memory best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from vllm_ext.contract import Admission, Candidate, RequestView, Room, Step, Victim
from vllm_ext.contract.checks import require
from vllm_ext.contract.slack import given_up_at, slack


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
        return self.candidate.aged or (not self.resigned and self.remaining_s <= step.pace.longest_step_s)


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

    A long prompt does not start while another one is unfinished, unless it is urgent (exclusive request allocation).
    At most the first 32 waiting requests are looked at, and only the urgent ones where there is no room.

    Source: AccelGen, section 4.2 (ERA) and 4.4, Algorithms 1 and 2. Ours: the guard against preempting a request again
    before it got on, that a request that is lost already is not urgent, ``gamma_steps``, ``lost_steps``, and ``spare``:
    whoever has begun to answer and is pushed out misses its next token, so that one objective is kept at the price of
    another and a recomputation.
    """

    uses_predictions: ClassVar[bool] = True

    gamma_s: float = 0.75
    """Requests so much later than the first one compete with it, in seconds. Source: AccelGen, section 6.1."""
    gamma_steps: float = 4.0
    """... and at most so many long steps later, so that it suits engines much quicker than the paper's; 0: no bound."""
    lost_steps: float = 1.0
    """Mean steps before it is certain that an objective can't be met, from which on it counts as lost."""
    lost_urgent: bool = False
    """Whether a request whose objective is lost is urgent like one that can still be met, as published."""
    match: bool = True
    """Choose by demand; False: in the order of the queue (ablation /Batch)."""
    ordered: bool = True
    """Whether the queue is in the order of slack, so that the first ones tell of those after them."""
    exclusive: bool = True
    """Whether one long prompt at a time is computed."""
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
        require(
            self.long_prompt_tokens >= 0,
            "admission.long_prompt_tokens",
            self.long_prompt_tokens,
            "an integer of at least 0",
        )
        for name in ("min_progress_tokens", "max_victims"):
            require(getattr(self, name) >= 1, f"admission.{name}", getattr(self, name), "an integer of at least 1")

    @property
    def preempts(self) -> bool:
        """Whether it preempts."""
        return self.preempt

    def select(self, step: Step, room: Room) -> None:
        """Take the urgent ones, then those that match."""
        head = self._head(step, room)
        urgent = [hopeful for hopeful in head if hopeful.is_urgent(step)]
        if self._admit_urgent(step, room, urgent):
            self._admit_matching(step, room, [hopeful for hopeful in head if hopeful not in urgent], urgent)

    def _head(self, step: Step, room: Room) -> list[_Hopeful]:
        """Return the urgent requests at the head of the queue and, where there is room, those that compete to join."""
        found: list[_Hopeful] = []
        first: _Hopeful | None = None
        has_room, group_s = room.open, self._group_s(step)
        for candidate in step.waiting():
            remaining_s, lost = self._standing(candidate.request, step.now)
            hopeful = _Hopeful(candidate, remaining_s, lost, lost and not self.lost_urgent)
            if not hopeful.is_urgent(step):
                # In order of slack those after the first one's group are later still.
                first = first or hopeful
                late = not has_room or hopeful.remaining_s > first.remaining_s + group_s
                if late and self.ordered:
                    break
                if not has_room:
                    continue
            found.append(hopeful)
        return found

    def _standing(self, request: RequestView, now: float) -> tuple[float, bool]:
        """Return T_r, the time until a request must run, in seconds, and whether its objective is lost."""
        left = slack(request, now)
        return left.start_by - now, given_up_at(request, left, self.lost_steps) <= now

    def _admit_urgent(self, step: Step, room: Room, urgent: list[_Hopeful]) -> bool:
        """Take the urgent requests in; False if one that aged finds no room, so that nobody may pass it."""
        victims, seen = step.victims(), list[Victim]()
        for hopeful in urgent:
            candidate = hopeful.candidate
            if room.fits(candidate):
                room.take(candidate)
                continue
            if room.tokens < 1:
                return not candidate.aged
            may = self.preempt and not hopeful.resigned
            leaving = self._leaving(step, room, hopeful, _again(seen, victims)) if may else ()
            if leaving:
                room.take(candidate, leaving)
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

    def _admit_matching(self, step: Step, room: Room, rest: list[_Hopeful], urgent: list[_Hopeful]) -> None:
        if not rest or not room.open:
            return
        first = rest[0]
        latest_s = first.remaining_s + self._group_s(step)
        group = [h.candidate for h in rest if h.lost == first.lost and h.remaining_s <= latest_s]
        long_above = self.long_prompt_tokens or step.runtime.pivot.tokens

        def is_long(request: RequestView) -> bool:
            return self.exclusive and request.missing_tokens > long_above

        joined = [h.candidate.request for h in urgent if h.candidate.req_id in room.admit]
        computing_long = any(map(is_long, joined)) or any(
            request.num_prompt_tokens > long_above for request in step.prefilling()
        )
        while group:
            # What does not fit now may do so once somebody is taken whose prefix it shares.
            fitting = [c for c in group if not (computing_long and is_long(c.request)) and room.fits(c)]
            if not fitting or (not self.match and fitting[0] is not group[0]):
                return
            best = min(fitting, key=lambda c: self._distance(step, room, c)) if self.match else fitting[0]
            group.remove(best)
            computing_long = computing_long or is_long(best.request)
            room.take(best)

    def _group_s(self, step: Step) -> float:
        """Return how much later than the first one a request may be to compete with it, in seconds."""
        if not self.gamma_steps:
            return self.gamma_s
        return min(self.gamma_s, self.gamma_steps * step.pace.longest_step_s)

    @staticmethod
    def _distance(step: Step, room: Room, candidate: Candidate) -> float:
        demand = room.demand(candidate)
        left = room.tokens - min(demand.tokens, room.tokens)
        return math.hypot(left, (room.blocks - demand.blocks) * step.pool.block_size)
