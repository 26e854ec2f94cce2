"""The four axes of a serving system. A policy is a frozen dataclass of its parameters with one of these methods.

A policy that looks at no predicted length says so by a class variable ``uses_predictions = False``: where all four do,
no predictor is started. Without it, a policy is taken to need them.
"""

from __future__ import annotations

from typing import Protocol

from vllm_ext.policies.residency.fate import Fate, Parting
from vllm_ext.scheduling.plan import AdmissionPlan, BudgetPlan, Rank
from vllm_ext.scheduling.views import RequestView, StepView


class Ordering(Protocol):
    """Who first?"""

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request`` at time ``now`` (s); lower keys go first."""
        ...


class Admission(Protocol):
    """Who may join, and who must leave for it?"""

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return this step's preemptions, cap and holds; nothing is changed by asking."""
        ...


class Budget(Protocol):
    """How many tokens?"""

    def plan(self, step: StepView) -> BudgetPlan:
        """Return this step's token budget; nothing is changed by asking."""
        ...


class Residency(Protocol):
    """Whose KV lives where?"""

    def on_preempt(self, request: RequestView, parting: Parting) -> Fate:
        """Return what becomes of the KV of a request that is preempted; asked where there is a KV tier."""
        ...

    def leaving_soon(self, step: StepView) -> tuple[str, ...]:
        """Return the running requests, by id, whose KV is to be copied before they are preempted."""
        ...
