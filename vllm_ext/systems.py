"""The systems table: each paper is a row of four policies, and rows compose."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ext.config import AXES, ConfigError, ExtConfig
from vllm_ext.policies.admission.best_set import BestSet
from vllm_ext.policies.admission.fits_now import FitsNow
from vllm_ext.policies.admission.prefill_first import PrefillFirst
from vllm_ext.policies.admission.reserve_maximum import ReserveMaximum
from vllm_ext.policies.budget.separate_batches import SeparateBatches
from vllm_ext.policies.budget.static import StaticBudget
from vllm_ext.policies.ordering.arrival import Arrival
from vllm_ext.policies.ordering.remaining_time import RemainingTimeLevels
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

    def describe(self) -> str:
        """Return one line: the system and its policies with their parameters."""
        return f"{self.system.name}: " + ", ".join(f"{axis}={getattr(self, axis)!r}" for axis in AXES)


_SYSTEMS: dict[str, System] = {}


def register(system: System) -> System:
    """Add a row to the table.

    Raises:
        ConfigError: the name is taken by another row, or holds a character reserved for compositions and class names.
    """
    if not system.name or any(c in system.name for c in "+. "):
        raise ConfigError("system", system.name, "a name without '+', '.' and spaces")
    if _SYSTEMS.get(system.name, system) != system:
        raise ConfigError("system", system.name, "a name that is not registered yet")
    _SYSTEMS[system.name] = system
    return system


def known() -> tuple[str, ...]:
    """Return the registered names in the order of the table."""
    return tuple(_SYSTEMS)


def table() -> tuple[System, ...]:
    """Return the rows of the table."""
    return tuple(_SYSTEMS.values())


def resolve(name: str) -> System:
    """Return the row called ``name``, or the composition ``A+B``.

    Each named system contributes the axes in which it differs from ``fcfs``.

    Raises:
        ConfigError: a name is unknown, or two systems set the same axis differently.
    """
    parts = name.split("+")
    for part in parts:
        if part not in _SYSTEMS:
            raise ConfigError("system", name, f"one of {', '.join(known())}, or several joined by '+'")
    if len(parts) == 1:
        return _SYSTEMS[name]
    base = _SYSTEMS["fcfs"]
    chosen: dict[str, tuple[str, Any]] = {}
    for part in parts:
        for axis in AXES:
            factory = getattr(_SYSTEMS[part], axis)
            if factory is getattr(base, axis):
                continue
            if axis in chosen and chosen[axis][1] is not factory:
                raise ConfigError(
                    "system", name, f"systems that differ in their axes; {chosen[axis][0]} and {part} both set {axis}"
                )
            chosen[axis] = (part, factory)
    return dataclasses.replace(
        base,
        name=name,
        oracle=any(_SYSTEMS[p].oracle for p in parts),
        paper="; ".join(_SYSTEMS[p].paper for p in parts if _SYSTEMS[p].paper),
        summary=" + ".join(_SYSTEMS[p].summary for p in parts if _SYSTEMS[p].summary),
        **{axis: factory for axis, (_, factory) in chosen.items()},
    )


def build(config: ExtConfig) -> Policies:
    """Return the policies of ``config.system`` with the parameters the configuration gives.

    Raises:
        ConfigError: unknown system, module that can't be imported, unknown parameter or bad value, or an oracle without
            permission.
    """
    for module in config.modules:
        try:
            importlib.import_module(module)
        except ConfigError:
            raise
        except Exception as error:  # whatever the module's own code raises
            allowed = f"a module that can be imported ({type(error).__name__}: {error})"
            raise ConfigError("modules", module, allowed) from error
    system = resolve(config.system)
    if system.oracle and not config.allow_oracle:
        raise ConfigError(
            "system",
            system.name,
            "reads true output lengths, which only offline benchmarks may: set allow_oracle there",
        )
    built = {axis: _construct(system, axis, getattr(config, axis)) for axis in AXES}
    return Policies(system=system, **built)


def _construct(system: System, axis: str, parameters: Mapping[str, Any]) -> Any:
    factory: Any = getattr(system, axis)
    fields = {f.name: f for f in dataclasses.fields(factory)} if dataclasses.is_dataclass(factory) else {}
    for name, value in parameters.items():
        if name not in fields:
            allowed = ", ".join(fields) or "nothing"
            raise ConfigError(f"{axis}.{name}", value, f"a parameter of {factory.__name__}: {allowed}")
        default = fields[name].default
        if isinstance(default, bool | int | float | str) and not _fits(value, type(default)):
            raise ConfigError(f"{axis}.{name}", value, f"of type {type(default).__name__}, and finite")
    try:
        return factory(**parameters)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(axis, dict(parameters), str(error)) from error


def _fits(value: object, expected: type) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is not float:
        return isinstance(value, expected)
    try:
        return isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False


register(System(name="fcfs", summary="vLLM's own scheduling, with our metrics"))
register(
    System(
        name="alise",
        ordering=RemainingTimeLevels,
        admission=BestSet,
        paper="ALISE (arXiv 2410.23537)",
        summary="shortest predicted remaining time first, preemptive, aged",
    )
)
register(
    System(
        name="oracle-alise",
        ordering=RemainingTimeLevels,
        admission=BestSet,
        oracle=True,
        paper="ALISE (arXiv 2410.23537), Oracle",
        summary="alise with true output lengths; offline benchmarks only",
    )
)
register(
    System(
        name="orca",
        admission=ReserveMaximum,
        paper="Orca (OSDI '22)",
        summary="baseline: arrival order, the maximum length of each request reserved, whole prompts",
    )
)
register(
    System(
        name="vllm-2023",
        admission=PrefillFirst,
        budget=SeparateBatches,
        paper="vLLM 0.2 (SOSP '23)",
        summary="baseline: arrival order, steps of prompts before steps of decodes",
    )
)
