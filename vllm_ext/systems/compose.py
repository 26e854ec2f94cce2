"""The systems by name, and how they compose: a paper is a row of policies, one for each of five axes."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Mapping
from typing import Any

from vllm_ext.config import AXES, ConfigError, ExtConfig
from vllm_ext.config.errors import did_you_mean
from vllm_ext.contract import Ordering
from vllm_ext.systems.system import Policies, System, fields_of
from vllm_ext.systems.upstream import Arrival
from vllm_ext.systems.user_policies import BASES, with_own

_FIRST, _LAST = "fcfs", "baselines"
UNSERVED = "vllm_ext.experiments.ablations"
"""Registers rows that nobody serves: it is imported when a name is asked for that no paper's file has."""


def _papers() -> dict[str, System]:
    """Return the rows of all files of this package that have some; ours and vLLM's first, and baselines last."""
    package = __name__.rpartition(".")[0]
    files = [found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    files.sort(key=lambda file: (file != _FIRST, file == _LAST, file))
    here = __name__.rpartition(".")[2]
    modules = [importlib.import_module(f"{package}.{file}") for file in files if file != here]
    return {row.name: row for module in modules for row in getattr(module, "ROWS", ())}


_SYSTEMS = _papers()


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


def known(*, unserved: bool = False) -> tuple[str, ...]:
    """Return the names of the rows of `table`."""
    return tuple(row.name for row in table(unserved=unserved))


def table(*, unserved: bool = False) -> tuple[System, ...]:
    """Return the registered rows.

    Args:
        unserved: Whether those that nobody serves, as ablations, are among them.
    """
    if unserved:
        importlib.import_module(UNSERVED)
    return tuple(row for row in _SYSTEMS.values() if row.served or unserved)


def _row(name: str) -> System | None:
    if name not in _SYSTEMS:
        importlib.import_module(UNSERVED)
    return _SYSTEMS.get(name)


def resolve(name: str) -> System:
    """Return the row called ``name``, or the composition ``A+B``.

    Each named system contributes the axes in which it differs from ``fcfs``, and its gates.

    Raises:
        ConfigError: a name is unknown, or two systems set the same axis or gate differently.
    """
    parts = name.split("+")
    for part in parts:
        if _row(part) is None:
            raise ConfigError(
                "system", name, f"one of {', '.join(known())}, or several joined by '+'{did_you_mean(part, known())}"
            )
    if len(parts) == 1:
        return _SYSTEMS[name]
    base = _SYSTEMS["fcfs"]
    rows = [_SYSTEMS[part] for part in parts]
    chosen: dict[str, tuple[str, Any]] = {}
    for row in rows:
        for axis in AXES:
            setting = _setting(getattr(row, axis), row, axis)
            if setting == _setting(getattr(base, axis), base, axis):
                continue
            if axis in chosen and chosen[axis][1] != setting:
                both = _joined(chosen[axis][1], setting)
                if both is None:
                    allowed = f"systems that set different policies; {chosen[axis][0]} and {row.name} both set {axis}"
                    raise ConfigError("system", name, allowed)
                setting = both
            chosen[axis] = (row.name, setting)
    gates = _joined_gates(name, rows)
    parameters = {axis: dict(given) for axis, (_, (_, given)) in chosen.items() if given}
    for given in gates.values():
        parameters.setdefault("admission", {}).update(given)
    return dataclasses.replace(
        base,
        name=name,
        oracle=any(row.oracle for row in rows),
        paper="; ".join(row.paper for row in rows if row.paper),
        summary=" + ".join(row.summary for row in rows if row.summary),
        parameters={axis: given for axis, given in parameters.items() if given},
        gates=tuple(gates),
        **{axis: factory for axis, (_, (factory, _)) in chosen.items()},
    )


def _joined_gates(name: str, rows: list[System]) -> dict[Any, Mapping[str, Any]]:
    """Return the gates of all rows, each once, with what is set of their fields."""
    gates: dict[Any, tuple[str, Mapping[str, Any]]] = {}
    for row in rows:
        for factory in row.gates:
            given = _setting(factory, row, "admission")[1]
            other, same = gates.setdefault(factory, (row.name, given))
            if same != given:
                allowed = f"systems whose gates agree; {other} and {row.name} set {factory.__name__} differently"
                raise ConfigError("system", name, allowed)
    return {factory: given for factory, (_, given) in gates.items()}


def _setting(factory: Any, row: System, axis: str) -> tuple[Any, Mapping[str, Any]]:
    """Return a factory and what its row sets of its fields."""
    fields = fields_of(factory)
    given = row.parameters.get(axis, {})
    return factory, {name: value for name, value in given.items() if name in fields} if fields else given


def _joined(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """Return one setting for two, with the parameters of both, if one of the policies names it, else None."""
    for (mine, given), (its, more) in ((one, other), (other, one)):
        both = getattr(mine, "joined", {}).get(its)
        if both is not None:
            return both, {**given, **more}
    return None


def build(config: ExtConfig) -> Policies:
    """Return the policies of ``config.system`` with the parameters the configuration gives.

    Raises:
        ConfigError: unknown system, module or file that can't be imported, unknown parameter or bad value, or an oracle
            without permission.
    """
    for module in config.modules:
        try:
            importlib.import_module(module)
        except ConfigError:
            raise
        except Exception as error:  # whatever the module's own code raises
            allowed = f"a module that can be imported ({type(error).__name__}: {error})"
            raise ConfigError("modules", module, allowed) from error
    system = with_own(resolve(config.system), config.policies)
    if system.oracle and not config.allow_oracle:
        raise ConfigError(
            "system",
            system.name,
            "reads true output lengths, which only offline benchmarks may: set allow_oracle there",
        )
    given = {axis: {**system.parameters.get(axis, {}), **getattr(config, axis)} for axis in AXES}
    for axis in AXES:
        _check_names(axis, given[axis], system)
    built = {axis: _construct(getattr(system, axis), axis, given[axis]) for axis in AXES}
    gates = tuple(_construct(factory, "admission", given["admission"]) for factory in system.gates)
    for axis, policy in (*built.items(), *(("gates", gate) for gate in gates)):
        if not isinstance(policy, BASES[axis]):
            allowed = f"a subclass of vllm_ext.contract.{BASES[axis].__name__}"
            raise ConfigError(f"system.{axis}", type(policy).__name__, allowed)
    shadow = None if config.shadow is None else _shadow(config.shadow, built["ordering"])
    return Policies(system=system, gates=gates, shadow=shadow, **built)


def _shadow(name: str, served: Ordering) -> Ordering:
    """Return the ordering of a system that is compared with the one that serves.

    Raises:
        ConfigError: the system is unknown, reads true output lengths, or has that order itself.
    """
    try:
        system = resolve(name)
    except ConfigError as error:
        raise ConfigError("shadow", name, error.allowed) from error
    found = _own_ordering(system)
    if system.oracle or _alike(found, served):
        others = ", ".join(row.name for row in table() if not (row.oracle or _alike(_own_ordering(row), served)))
        why = "reads true output lengths" if system.oracle else "serves in the order that is served already"
        raise ConfigError("shadow", name, f"{why}; systems with another order: {others}")
    return found


def _own_ordering(system: System) -> Ordering:
    found: Ordering = _construct(system.ordering, "ordering", system.parameters.get("ordering", {}))
    return found


def _alike(one: Ordering, other: Ordering) -> bool:
    """Whether requests wait in the same order; who runs may be ordered differently."""
    return one == other or type(one).rank is type(other).rank is Arrival.rank


def _check_names(axis: str, given: Mapping[str, Any], system: System) -> None:
    """Raise ConfigError for a parameter that none of an axis' policies has."""
    there = _parameters(system, axis)
    for name, value in given.items():
        if name not in there:
            its = ", ".join(there) or "none"
            having = ", ".join(row.name for row in table() if name in _parameters(row, axis))
            others = f"; systems that have it: {having}" if having else did_you_mean(name, there)
            raise ConfigError(f"{axis}.{name}", value, f"no parameter of {system.name}, whose {axis} has {its}{others}")


def _parameters(system: System, axis: str) -> list[str]:
    """Return the parameters of an axis' policies, gates among those of the admission."""
    factories = (getattr(system, axis), *(system.gates if axis == "admission" else ()))
    return list(dict.fromkeys(name for factory in factories for name in fields_of(factory)))


def _construct(factory: Any, axis: str, given: Mapping[str, Any]) -> Any:
    fields = fields_of(factory)
    parameters = {name: value for name, value in given.items() if name in fields}
    for name, value in parameters.items():
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
