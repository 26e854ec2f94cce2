"""Dotted paths into a description of a run: ``engine.system``, ``workload.rate_per_s``, ``engine.options.modules``.

A wrong path, value, system or option is an error here, before anything is run. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_ext import config, systems
from vllm_ext.simulation.spec import SimulationSpec

_Model = TypeVar("_Model", bound=BaseModel)

UPSTREAM = ("upstream-fcfs", "upstream-priority")
"""vLLM's own schedulers, which take no options of vllm_ext."""


class SpecError(ValueError):
    """A field of a description is unknown or has a value that is not allowed.

    Attributes:
        field: Dotted path.
        value: What was given.
        allowed: What would have been right.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


def with_values(spec: SimulationSpec, values: Mapping[str, Any]) -> SimulationSpec:
    """Return the description with other values at dotted paths; they are checked together, at the end.

    Raises:
        SpecError: an unknown path, or a value that is not allowed there.
    """
    # What was not set stays so: defaults may depend on other fields, as the rate's does on the kind of arrivals.
    data = spec.model_dump(mode="json", exclude_unset=True)
    for path, value in values.items():
        _assign(data, path, value)
    return parse(SimulationSpec, data)


def parse(model: type[_Model], data: object) -> _Model:
    """Build a description from plain data.

    Raises:
        SpecError: the first thing that is wrong, with what is allowed.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or model.__name__
        message = first["msg"].removeprefix("Value error, ")
        allowed = message[:1].lower() + message[1:]
        if first["type"] == "extra_forbidden":
            allowed = _unknown(model, field)
        raise SpecError(field, first["input"], allowed) from error


def checked(spec: SimulationSpec) -> SimulationSpec:
    """Return a description whose system and options are known to fit each other.

    Options are dropped for vLLM's own schedulers, so that one description serves all systems of a comparison.

    Raises:
        SpecError: the system is unknown, or refuses an option.
    """
    engine = spec.engine
    if engine.system in UPSTREAM:
        return spec.model_copy(update={"engine": engine.model_copy(update={"options": {}})})
    try:
        options = config.parse({**engine.options, "system": engine.system, "allow_oracle": True})
        systems.build(options)
    except config.ConfigError as error:
        if error.field == "system":
            if all(part in systems.known() for part in engine.system.split("+")):
                raise SpecError("engine.system", error.value, error.allowed) from error
            allowed = f"must be one of {', '.join((*UPSTREAM, *systems.known()))}, or several of the latter joined by +"
            raise SpecError("engine.system", error.value, allowed) from error
        raise SpecError(f"engine.options.{error.field}", error.value, error.allowed) from error
    return spec


def _assign(data: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for depth, name in enumerate(parents, start=1):
        if isinstance(data, list):
            data = data[_index(data, path, name, value)]
            continue
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
        if not isinstance(data, (dict, list)):
            raise SpecError(path, value, f"{'.'.join(parents[:depth])} is {data!r} and has no fields of its own")
    data[_index(data, path, last, value) if isinstance(data, list) else last] = value


def _index(items: list[Any], path: str, name: str, value: object) -> int:
    if not name.isdigit() or int(name) >= len(items):
        raise SpecError(path, value, f"no entry {name}; there are {len(items)}, counted from 0")
    return int(name)


def _unknown(model: type[BaseModel], field: str) -> str:
    """What to say of a field that is not there: which there are, where the path leads through plain models."""
    *parents, _ = field.split(".")
    known: Any = model().model_dump()
    for name in parents:
        known = known.get(name) if isinstance(known, dict) else None
    where = f"the fields of {'.'.join(parents)}" if parents else "the fields"
    return f"unknown field; {where} are {', '.join(known)}" if known else "unknown field"
