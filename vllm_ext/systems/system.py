"""What a serving system is: a policy for each of five axes, and gates before admission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from vllm_ext.config import AXES
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.contract import Admission, Budget, GatePolicy, Ordering, Policy, Residency, Sharing
from vllm_ext.systems.upstream import Arrival, InOrder, Recompute, StaticBudget, Undivided


def fields_of(policy: Any) -> dict[str, Field[Any]]:
    """Return the parameters of a policy's class by name; of another factory: none."""
    return {found.name: found for found in fields(policy)} if is_dataclass(policy) else {}


@dataclass(frozen=True, kw_only=True)
class System:
    """One row: a factory for the policy of each axis. ``fcfs`` is the row of defaults."""

    name: str
    ordering: Callable[..., Ordering] = Arrival
    admission: Callable[..., Admission] = InOrder
    """The selector: who joins and who leaves for it."""
    gates: tuple[Callable[..., GatePolicy], ...] = ()
    """Who must not join, although there is room; all of them must let a request pass."""
    budget: Callable[..., Budget] = StaticBudget
    residency: Callable[..., Residency] = Recompute
    sharing: Callable[..., Sharing] = Undivided
    """Whose turn it is, before the ordering is asked."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By axis: parameters in which the row differs from its policies' defaults. Those of gates are admission's."""
    oracle: bool = False
    """Whether true output lengths are read: offline benchmarks only."""
    served: bool = True
    """Whether servers list it; ablations, and upper bounds that know true lengths, are for the simulator."""
    paper: str = ""
    """Where the system was published."""
    summary: str = ""
    """One line for ``--help`` and the documentation."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the composed rows."""
        return tuple(self.name.split("+"))


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The policies of a system, built with their parameters."""

    system: System
    ordering: Ordering
    admission: Admission
    gates: tuple[GatePolicy, ...]
    budget: Budget
    residency: Residency
    sharing: Sharing
    shadow: Ordering | None = None
    """Of another system: it only watches."""

    @property
    def all(self) -> tuple[Policy, ...]:
        """Every policy of the system."""
        return (self.ordering, self.admission, *self.gates, self.budget, self.residency, self.sharing)

    @property
    def is_upstream(self) -> bool:
        """Whether order, turns, admission and budget are vLLM's own rules, so that there is nothing to steer."""
        own = type(self.ordering) is Arrival and self.admission.is_vllms and self.budget.is_vllms
        return own and not self.gates and not self.sharing.divides

    @property
    def use_predictions(self) -> bool:
        """Whether any policy looks at predicted lengths."""
        return any(policy.uses_predictions for policy in self.all)

    @property
    def history(self) -> int:
        """How many finished output lengths the gates look at; 0: none."""
        return max((gate.history for gate in self.gates), default=0)

    def tier(self, given: KvTierConfig) -> KvTierConfig:
        """Return the options of the KV tier, as the system wants them where the user left them open.

        Raises:
            ConfigError: they do not fit together.
        """
        return given.resolved(self.residency.tier_options)

    def describe(self) -> str:
        """Return one line: the system and its policies with their parameters."""
        shown = [f"{axis}={getattr(self, axis)!r}" for axis in AXES]
        if self.gates:
            shown.insert(2, f"gates={list(self.gates)!r}")
        return f"{self.system.name}: " + ", ".join(shown)
