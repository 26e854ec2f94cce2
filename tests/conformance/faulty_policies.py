"""Policies that fail when told to, or ask for nonsense; registered as systems of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.extent import quick
from tests.support.systems_matrix import Row
from vllm_ext.contract import Rank, RequestView, Room, Split, Step
from vllm_ext.systems import System, register
from vllm_ext.systems.alise import Preemptive, RemainingTimeLevels
from vllm_ext.systems.upstream import StaticBudget


class PolicyFault(Exception):
    """What the faulty policies raise."""


@dataclass
class Faults:
    """When to fail: the answers of ``pattern`` in turn. One object, because policies are built by vLLM's process."""

    pattern: Sequence[bool] = (False,)
    raised: int = 0
    asked: int = 0
    rng: random.Random = field(default_factory=random.Random)

    def arm(self, pattern: Sequence[bool], seed: int = 0) -> None:
        self.pattern, self.raised, self.asked = pattern, 0, 0
        self.rng = random.Random(seed)

    def due(self) -> bool:
        self.asked += 1
        return self.pattern[self.asked % len(self.pattern)]

    def maybe_raise(self) -> None:
        if self.due():
            self.raised += 1
            raise PolicyFault("told to fail")


FAULTS = Faults()


@dataclass(frozen=True, kw_only=True)
class FaultyOrdering(RemainingTimeLevels):
    def rank(self, request: RequestView, now: float) -> Rank:
        FAULTS.maybe_raise()
        return super().rank(request, now)


@dataclass(frozen=True, kw_only=True)
class FaultyAdmission(Preemptive):
    """Fails after it has looked at everything, when half the decision is made."""

    def select(self, step: Step, room: Room) -> None:
        super().select(step, room)
        list(step.waiting())
        FAULTS.maybe_raise()


@dataclass(frozen=True, kw_only=True)
class FaultyBudget(StaticBudget):
    def split(self, step: Step) -> Split:
        FAULTS.maybe_raise()
        return super().split(step)


@dataclass(frozen=True, kw_only=True)
class HostileAdmission(Preemptive):
    """Asks for what can't be: strangers, running requests, the same one twice, victims that wait."""

    def select(self, step: Step, room: Room) -> None:
        if not FAULTS.due():
            super().select(step, room)
            return
        rng = FAULTS.rng
        ids = ["nobody", *(c.request.req_id for c in step.waiting()), *(v.request.req_id for v in step.victims())]
        room.preempt = rng.choices(ids, k=rng.randrange(4))
        room.admit = rng.choices(ids, k=rng.randrange(4))


@dataclass(frozen=True, kw_only=True)
class HostileBudget(StaticBudget):
    def split(self, step: Step) -> Split:
        if not FAULTS.due():
            return super().split(step)
        rng = FAULTS.rng
        return Split(
            tokens=rng.choice([None, -1, 0, 1, 7, 10**9]), prefill=rng.random() < 0.5, apart=rng.random() < 0.5
        )


register(System(name="test-faulty-ordering", ordering=FaultyOrdering, admission=Preemptive))
register(System(name="test-faulty-admission", ordering=RemainingTimeLevels, admission=FaultyAdmission))
register(System(name="test-admission-by-arrival", admission=FaultyAdmission))
register(System(name="test-faulty-budget", ordering=RemainingTimeLevels, admission=Preemptive, budget=FaultyBudget))
register(System(name="test-hostile", ordering=RemainingTimeLevels, admission=HostileAdmission, budget=HostileBudget))

_EXAMPLES = quick(25, full=80)
FAULTY = tuple(
    Row(name=name, options={"system": name}, examples=_EXAMPLES)
    for name in ("test-faulty-ordering", "test-faulty-admission", "test-faulty-budget")
)
EVERY_STEP = (
    Row(name="test-admission-by-arrival", options={"system": "test-admission-by-arrival"}, examples=_EXAMPLES),
    *(row for row in FAULTY if row.name != "test-faulty-admission"),
)
"""Those whose every step is in order of arrival: admission is not asked where nobody waits."""
HOSTILE = Row(name="test-hostile", options={"system": "test-hostile"}, examples=_EXAMPLES)
