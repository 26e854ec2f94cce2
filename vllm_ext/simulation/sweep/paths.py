"""Dotted paths into a description of a run: ``engine.system``, ``workload.rate_per_s``, ``engine.options.modules``.

A wrong path, value, system or option is an error here, before anything is run. Nothing here imports vLLM.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin

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
        _check_path(path, value)
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


def _check_path(path: str, value: object) -> None:
    annotation: Any = SimulationSpec
    done: list[str] = []
    for name in path.split("."):
        choices = _choices(annotation)
        models = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        if any(choice is Any or get_origin(choice) in (dict, Mapping) or choice is dict for choice in choices):
            return
        fields = {key: field.annotation for model in models for key, field in model.model_fields.items()}
        items = [get_args(choice)[0] for choice in choices if get_origin(choice) in (list, tuple, Sequence)]
        if name in fields:
            annotation = fields[name]
        elif items and name.isdigit():
            annotation = items[0]
        elif fields:
            raise SpecError(path, value, f"unknown field {name!r}; {_known('.'.join(done), fields)}")
        elif items:
            raise SpecError(path, value, f"{'.'.join(done)} is a list: a number must follow, found {name!r}")
        else:
            raise SpecError(path, value, f"{'.'.join(done)} has no fields of its own")
        done.append(name)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, those of nested ones and of ``Annotated`` included."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for member in get_args(annotation) for choice in _choices(member))
    if hasattr(annotation, "__metadata__"):
        return _choices(get_args(annotation)[0])
    return (annotation,)


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
    """What to say of a field that is not there: which there are, as far as the path leads through plain models."""
    *parents, _ = field.split(".")
    current: type[BaseModel] = model
    for name in parents:
        field_info = current.model_fields.get(name)
        inner = [c for c in _choices(field_info.annotation) if hasattr(c, "model_fields")] if field_info else []
        if len(inner) != 1:
            return "unknown field"
        current = inner[0]
    return f"unknown field; {_known('.'.join(parents), current.model_fields)}"


def _known(where: str, fields: Mapping[str, Any]) -> str:
    return f"{f'the fields of {where}' if where else 'the fields'} are {', '.join(fields)}"
