"""Policies that fail when told to, or ask for nonsense; registered as systems of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.extent import quick
from vllm_ext.policies.admission.best_set import BestSet
from vllm_ext.policies.budget.static import StaticBudget
from vllm_ext.policies.ordering.remaining_time import RemainingTimeLevels
from vllm_ext.scheduling.plan import AdmissionPlan, BudgetPlan, Rank
from vllm_ext.scheduling.views import RequestView, StepView
from vllm_ext.systems import System, register

from .systems_matrix import Row


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
class FaultyAdmission(BestSet):
    """Fails after it has looked at everything, when half the decision is made."""

    def plan(self, step: StepView) -> AdmissionPlan:
        plan = super().plan(step)
        list(step.waiting())
        FAULTS.maybe_raise()
        return plan


@dataclass(frozen=True, kw_only=True)
class FaultyBudget(StaticBudget):
    def plan(self, step: StepView) -> BudgetPlan:
        FAULTS.maybe_raise()
        return super().plan(step)


@dataclass(frozen=True, kw_only=True)
class HostileAdmission(BestSet):
    """Asks for what can't be: strangers, waiting requests, the same victim twice, impossible caps."""

    def plan(self, step: StepView) -> AdmissionPlan:
        if not FAULTS.due():
            return super().plan(step)
        rng = FAULTS.rng
        ids = ["nobody", *(r.req_id for r in step.waiting()), *(r.req_id for r in step.running_worst_first())]
        return AdmissionPlan(
            preempt=tuple(rng.choices(ids, k=rng.randrange(4))),
            max_running=rng.choice([None, -3, 0, 1, 10**9]),
            hold=frozenset(rng.choices(ids, k=rng.randrange(4))),
        )


@dataclass(frozen=True, kw_only=True)
class HostileBudget(StaticBudget):
    def plan(self, step: StepView) -> BudgetPlan:
        if not FAULTS.due():
            return super().plan(step)
        rng = FAULTS.rng
        return BudgetPlan(
            token_budget=rng.choice([None, -1, 0, 1, 7, 10**9]),
            decode_only=rng.random() < 0.5,
            skip=tuple(rng.choices(["nobody", *(r.req_id for r in step.running_worst_first())], k=2)),
        )


register(System(name="test-faulty-ordering", ordering=FaultyOrdering, admission=BestSet))
register(System(name="test-faulty-admission", ordering=RemainingTimeLevels, admission=FaultyAdmission))
register(System(name="test-faulty-budget", ordering=RemainingTimeLevels, admission=BestSet, budget=FaultyBudget))
register(System(name="test-hostile", ordering=RemainingTimeLevels, admission=HostileAdmission, budget=HostileBudget))

_EXAMPLES = quick(25, full=80)
FAULTY = tuple(
    Row(name=name, options={"system": name}, examples=_EXAMPLES)
    for name in ("test-faulty-ordering", "test-faulty-admission", "test-faulty-budget")
)
HOSTILE = Row(name="test-hostile", options={"system": "test-hostile"}, examples=_EXAMPLES)
