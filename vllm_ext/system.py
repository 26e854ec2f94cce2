"""What a serving system is: a policy for each of four axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.config import AXES
from vllm_ext.config_kv import KvTierConfig
from vllm_ext.policies.admission.fits_now import FitsNow
from vllm_ext.policies.budget.static import StaticBudget
from vllm_ext.policies.ordering.arrival import Arrival
from vllm_ext.policies.protocols import Admission, Budget, Ordering, Residency
from vllm_ext.policies.residency.recompute import Recompute


@dataclass(frozen=True, kw_only=True)
class System:
    """One row: a factory for the policy of each axis. ``fcfs`` is the row of defaults."""

    name: str
    ordering: Callable[..., Ordering] = Arrival
    admission: Callable[..., Admission] = FitsNow
    budget: Callable[..., Budget] = StaticBudget
    residency: Callable[..., Residency] = Recompute
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By axis: parameters of its policy in which the row differs from the policy's own defaults."""
    oracle: bool = False
    """Whether true output lengths are read: offline benchmarks only."""
    paper: str = ""
    """Where the system was published."""
    summary: str = ""
    """One line for ``--help`` and the documentation."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the composed rows."""
        return tuple(self.name.split("+"))

    def axis(self, name: str) -> tuple[Any, Mapping[str, Any]]:
        """Return the factory of an axis and the row's parameters for it: what a composition takes over."""
        return getattr(self, name), self.parameters.get(name, {})


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The four policies of a system, built with their parameters."""

    system: System
    ordering: Ordering
    admission: Admission
    budget: Budget
    residency: Residency

    @property
    def is_upstream(self) -> bool:
        """Whether every axis is vLLM's own rule, so that there is nothing to steer."""
        return (type(self.ordering), type(self.admission), type(self.budget)) == (Arrival, FitsNow, StaticBudget)

    @property
    def use_predictions(self) -> bool:
        """Whether any policy looks at predicted lengths; one that does not say so is taken to do."""
        return any(getattr(getattr(self, axis), "uses_predictions", True) for axis in AXES)

    def tier(self, given: KvTierConfig) -> KvTierConfig:
        """Return the options of the KV tier, as the system wants them where the user left them open.

        Raises:
            ConfigError: they do not fit together.
        """
        return given.resolved(getattr(self.residency, "tier_options", {}))

    def describe(self) -> str:
        """Return one line: the system and its policies with their parameters."""
        return f"{self.system.name}: " + ", ".join(f"{axis}={getattr(self, axis)!r}" for axis in AXES)
