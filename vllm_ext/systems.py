"""The systems table: each paper is a row of four policies, and rows compose."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

from vllm_ext.config import AXES, ConfigError, ExtConfig
from vllm_ext.policies.residency.estimated_wait import EstimatedWait
from vllm_ext.policies.residency.retention import Retention, RetentionWithSwaps
from vllm_ext.system import Policies, System
from vllm_ext.systems_table import ROWS

__all__ = ["Policies", "System", "build", "known", "register", "resolve", "table"]

_SYSTEMS: dict[str, System] = {row.name: row for row in ROWS}


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
            setting = _SYSTEMS[part].axis(axis)
            if setting == base.axis(axis):
                continue
            if axis in chosen and chosen[axis][1] != setting:
                both = _with_conversations(chosen[axis][1], setting)
                if both is None:
                    allowed = f"systems that differ in their axes; {chosen[axis][0]} and {part} both set {axis}"
                    raise ConfigError("system", name, allowed)
                setting = both
            chosen[axis] = (part, setting)
    return dataclasses.replace(
        base,
        name=name,
        oracle=any(_SYSTEMS[p].oracle for p in parts),
        paper="; ".join(_SYSTEMS[p].paper for p in parts if _SYSTEMS[p].paper),
        summary=" + ".join(_SYSTEMS[p].summary for p in parts if _SYSTEMS[p].summary),
        parameters={axis: parameters for axis, (_, (_, parameters)) in chosen.items() if parameters},
        **{axis: factory for axis, (_, (factory, _)) in chosen.items()},
    )


def _with_conversations(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """Return both settings in one if one is about preempted requests and the other about conversations, else None."""
    for (jobs, swapped), (talks, kept) in ((one, other), (other, one)):
        if jobs is EstimatedWait and talks is Retention:
            return RetentionWithSwaps, {**kept, **swapped}
    return None


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


def _construct(system: System, axis: str, given: Mapping[str, Any]) -> Any:
    factory, defaults = system.axis(axis)
    parameters = {**defaults, **given}
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
        raise ConfigError(axis, parameters, str(error)) from error


def _fits(value: object, expected: type) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is not float:
        return isinstance(value, expected)
    try:
        return isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False
