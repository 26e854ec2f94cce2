"""Admit what must run now, then what fits what is left of compute and memory best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from vllm_ext.policies.admission.queue_scan import NO_CHANGE
from vllm_ext.policies.budget.slo_pivot import pivot_tokens
from vllm_ext.policies.checks import require
from vllm_ext.policies.slack import given_up_at, slack
from vllm_ext.scheduling.plan import AGED, AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView


class _Candidate(NamedTuple):
    request: RequestView
    remaining_s: float
    """T_r: time until it must run."""
    lost: bool
    """Whether its objective can't be met any more."""
    aged: bool


class _Demand(NamedTuple):
    """What a request asks of a step: tokens to compute, tokens of KV."""

    req_id: str
    tokens: int
    memory: int
    long: bool


@dataclass
class _Room:
    """What is left of the step, in tokens, and who was given some."""

    compute: int
    memory: int
    seats: int
    long_above: int
    """Prompts of more tokens are long."""
    long_prompts: int
    """Long ones that are being computed."""
    chosen: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SloMatch:
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
    match: bool = True
    """Choose by demand; False: in the order of the queue (ablation /Batch)."""
    whole_prompts: bool = False
    """Admit a prompt only if all of it fits into the step, or alone (ablation /Chunk)."""
    ordered: bool = True
    """Whether the queue is in the order of slack, so that the first ones tell of those after them."""
    exclusive: bool = True
    """Whether one long prompt at a time is computed."""
    long_prompt_tokens: int = 0
    """Prompts longer than this are long; 0: longer than the step at which throughput saturates."""
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

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return whom to preempt, how many join, and who of the first in the queue must not."""
        if not step.num_waiting:
            return NO_CHANGE
        room = self._room(step)
        head = self._head(step, room)
        if not head:
            return NO_CHANGE
        held_up = not self._admit_urgent(step, room, [c for c in head if self._is_urgent(c, step)])
        if not held_up:
            self._admit_matching(step, room, head)
        cap = step.num_running - len(room.preempted) + len(room.chosen)
        if not cap:  # nothing would run: the first one does, whatever it needs
            return AdmissionPlan(preempt=tuple(room.preempted), max_running=1)
        passed_over = frozenset(c.request.req_id for c in head).difference(room.chosen)
        return AdmissionPlan(preempt=tuple(room.preempted), max_running=cap, hold=passed_over)

    def _room(self, step: StepView) -> _Room:
        long_above = self.long_prompt_tokens or step.pivot.tokens
        # However tight the objective, the budget policy leaves a token beside the decodes.
        budget = min(step.token_budget, max(pivot_tokens(step), step.decode_tokens + 1))
        return _Room(
            compute=step.num_free_tokens - step.token_budget + budget,
            memory=step.num_free_blocks * step.block_size,
            seats=step.max_running - step.num_running,
            long_above=long_above,
            long_prompts=sum(request.num_prompt_tokens > long_above for request in step.prefilling()),
        )

    def _head(self, step: StepView, room: _Room) -> list[_Candidate]:
        """Return the urgent requests at the head of the queue and, where there is room, those that compete to join."""
        has_room = room.seats > 0 and room.memory > 0 and room.compute > 0
        found: list[_Candidate] = []
        first: _Candidate | None = None
        for request in step.waiting():
            left = slack(request, step.now)
            aged = step.level_of(request) == AGED
            lost = given_up_at(request, left, self.lost_steps) <= step.now
            candidate = _Candidate(request, left.start_by - step.now, lost, aged)
            if not self._is_urgent(candidate, step):
                # In order of slack those after the first one's group are later still.
                first = candidate if first is None else first
                late = not has_room or candidate.remaining_s > first.remaining_s + self._group_s(step)
                if late and self.ordered:
                    break
                if not has_room:
                    continue
            found.append(candidate)
        return found

    @staticmethod
    def _is_urgent(candidate: _Candidate, step: StepView) -> bool:
        return candidate.aged or (not candidate.lost and candidate.remaining_s <= step.pace.longest_step_s)

    def _admit_urgent(self, step: StepView, room: _Room, urgent: list[_Candidate]) -> bool:
        """Take the urgent requests in; False if one that aged finds no room, so that nobody may pass it."""
        victims = step.running_worst_first()
        for candidate in urgent:
            request = candidate.request
            short = room.seats < 1 or room.memory < request.num_blocks * step.block_size
            if short and not (self.preempt and not candidate.lost and self._make_room(step, room, candidate, victims)):
                if candidate.aged:
                    return False
                continue
            if room.compute < 1:
                return not candidate.aged
            self._take(room, self._demand(step, room, request))
        return True

    def _make_room(self, step: StepView, room: _Room, candidate: _Candidate, victims: Iterator[RequestView]) -> bool:
        """Preempt those with most time left until the candidate fits; nobody, if it can't be made to fit."""
        needed = candidate.request.num_blocks * step.block_size
        found: list[RequestView] = []
        seats, memory = room.seats, room.memory
        for victim in victims:
            if len(room.preempted) + len(found) >= self.max_victims:
                return False
            left = slack(victim, step.now)
            lost = given_up_at(victim, left, self.lost_steps) <= step.now
            remaining_s = left.start_by - step.now
            if not lost and remaining_s <= candidate.remaining_s:
                return False
            if victim.num_preemptions and victim.progress_tokens < self.min_progress_tokens:
                continue
            if self.spare and victim.num_output_tokens:
                continue
            found.append(victim)
            seats += 1
            memory += victim.num_blocks * step.block_size
            if seats >= 1 and memory >= needed:
                room.seats, room.memory = seats, memory
                room.preempted += [v.req_id for v in found]
                return True
        return False

    def _admit_matching(self, step: StepView, room: _Room, head: list[_Candidate]) -> None:
        rest = [c for c in head if c.request.req_id not in room.chosen and not self._is_urgent(c, step)]
        if not rest:
            return
        latest_s = rest[0].remaining_s + self._group_s(step)
        group = [
            self._demand(step, room, c.request) for c in rest if c.lost == rest[0].lost and c.remaining_s <= latest_s
        ]
        if not self.match:
            for demand in itertools.takewhile(lambda demand: room.seats > 0 and self._fits(step, room, demand), group):
                self._take(room, demand)
            return
        while room.seats > 0:
            # Room only shrinks: what does not fit now will not fit later in this step.
            group = [demand for demand in group if self._fits(step, room, demand)]
            if not group:
                return
            best = min(group, key=lambda demand: self._distance(room, demand))
            group.remove(best)
            self._take(room, best)

    def _group_s(self, step: StepView) -> float:
        """Return how much later than the first one a request may be to compete with it, in seconds."""
        if not self.gamma_steps:
            return self.gamma_s
        return min(self.gamma_s, self.gamma_steps * step.pace.longest_step_s)

    @staticmethod
    def _demand(step: StepView, room: _Room, request: RequestView) -> _Demand:
        tokens = request.num_tokens - request.num_computed_tokens
        long = request.num_prompt_tokens > room.long_above
        return _Demand(request.req_id, tokens, request.num_blocks * step.block_size, long)

    def _fits(self, step: StepView, room: _Room, demand: _Demand) -> bool:
        if demand.memory > room.memory or room.compute < 1 or (self.exclusive and room.long_prompts and demand.long):
            return False
        alone = self.whole_prompts and not step.num_running and not room.chosen
        return self._compute(room, demand) <= room.compute or alone

    def _compute(self, room: _Room, demand: _Demand) -> int:
        """Tokens to compute, cut to what is left where prompts may be cut."""
        return demand.tokens if self.whole_prompts else min(demand.tokens, max(room.compute, 1))

    def _distance(self, room: _Room, demand: _Demand) -> float:
        return math.hypot(room.compute - self._compute(room, demand), room.memory - demand.memory)

    def _take(self, room: _Room, demand: _Demand) -> None:
        room.compute -= self._compute(room, demand)
        room.memory -= demand.memory
        room.seats -= 1
        room.long_prompts += demand.long
        room.chosen.append(demand.req_id)
