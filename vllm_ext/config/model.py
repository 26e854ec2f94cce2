"""What all models of options have in common: strict, read-only, and refused in one line.

A field that has a flag on the command line says so in its annotation: ``Annotated[float, Flag("--kv-tier-gib")]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vllm_ext.config.errors import KEY, ConfigError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
Text = Annotated[str, StringConstraints(pattern=r"\S")]
"""A string that is not empty, nor blank."""

_WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "is_instance_of": "must be an object",
    "mapping_type": "must be an object",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must be a string that is not empty",
    "string_too_short": "must be a string that is not empty",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
}
"""What is allowed, by pydantic's kinds of errors, where its own words are of Python and not of JSON."""


def comma_list(text: str) -> list[str]:
    """Split ``a,b`` at its commas; blanks around an item and a trailing comma do not count."""
    return [item.strip() for item in text.split(",") if item.strip()]


def number_or_text(text: str) -> float | str:
    """Return the number that a text says, or the text."""
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Flag:
    """A flag that sets a field, or an entry of a field that is an object of parameters.

    Type and default of the flag are the field's, its help is the first sentence of the field's docstring.
    """

    names: str = ""
    """As typed, separated by blanks; the first is the one in messages. Empty: the field's name with dashes."""
    key: str = ""
    """Of an entry: its name. Type and help are given then."""
    type: Callable[[str], Any] | None = None
    """Turns the text into a value; None: what the field's annotation says."""
    choices: Mapping[str, Any] | None = None
    """The texts that are allowed, and their values."""
    metavar: str | None = None
    """Placeholder of the text in ``--help``."""
    help: str = ""
    """Instead of the docstring's first sentence."""
    short: str = ""
    """A further name, unless the parser has a flag of that name."""


class Options(BaseModel):
    """A group of options. A value that is not allowed is a `ConfigError`, also where a group is made by hand."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    at: ClassVar[str] = ""
    """Dotted name of the group below the root."""
    root: ClassVar[str] = KEY
    """See `ConfigError`."""

    def __init__(self, **values: Any) -> None:
        """Check the values.

        Raises:
            ConfigError: One is unknown or not allowed.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refusal(error, type(self), at=type(self).at, root=type(self).root) from None

    def changed(self, **values: Any) -> Self:
        """Return the same options with others of some, checked.

        Raises:
            ConfigError: They do not fit together.
        """
        return type(self)(**{**dict(self), **values})


def refusal(error: ValidationError, model: type[BaseModel], *, at: str = "", root: str = KEY) -> ConfigError:
    """Return the first thing that a model refused, with what is allowed.

    Args:
        error: What pydantic says.
        model: The model that was to be made.
        at: Dotted name of the model below the root.
        root: See `ConfigError`.
    """
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "[key]"]
    while path and path[-1].isdigit():  # an item of a list is told by its value
        path.pop()
    value, allowed = first["input"], _allowed(first, model, path, "option" if root else "field")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        path, value, allowed = [*path, *_below(cause, model, path)], cause.value, cause.allowed
    return ConfigError(".".join([*filter(None, [at]), *path]), value, allowed, root)


def first_problem(error: ValidationError, *, skip: int = 0) -> str:
    """Return field, message and value of what is wrong first; ``skip`` outer parts of its path are left out."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"][skip:]))
    where = f"field {field!r}: " if field else ""
    return f"{where}{first['msg'].removeprefix('Value error, ')} (found {first.get('input')!r:.80})"


def _below(cause: ConfigError, model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the field of an error below the group that refused it, which may say its own place."""
    inner = _model_at(model, path)
    place = getattr(inner, "at", "")
    return cause.field.removeprefix(f"{place}.").split(".") if cause.field else []


def _model_at(model: type[BaseModel], path: list[str]) -> Any:
    found: Any = model
    for name in path:
        fields = getattr(found, "model_fields", {})
        if name in fields:
            found = fields[name].annotation
        elif hasattr(found, "__args__"):  # of a mapping: name is a key
            found = found.__args__[-1]
    return found


def _allowed(first: ErrorDetails, model: type[BaseModel], path: list[str], noun: str) -> str:
    kind = first["type"]
    if kind == "extra_forbidden":
        known = list(getattr(_model_at(model, path[:-1]), "model_fields", {}))
        listed = f"; the {noun}s here are {', '.join(known)}" if known else ""
        return f"unknown {noun}{listed}{did_you_mean(path[-1], known)}"
    if kind == "literal_error":
        expected = first["ctx"]["expected"].replace("True", "true").replace("False", "false")  # as JSON has them
        known = expected.replace("'", "").replace(" or ", ", ").split(", ")
        return f"must be one of {', '.join(known)}{did_you_mean(first['input'], known)}"
    if kind in _WORDS:
        return _WORDS[kind]
    message = first["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|Dictionary|List|Tuple) should", "must", message)
    return message[:1].lower() + message[1:]


def made(model: type[Model], data: object, *, root: str = KEY) -> Model:
    """Build a model from plain data.

    Raises:
        ConfigError: The first thing that is wrong, with what is allowed.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise refusal(error, model, root=root) from None


def flagged(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Flag, FieldInfo]]:
    """Yield dotted path, flag and field of each flag: of the fields of a model, and within it."""
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if hasattr(inner, "model_fields"):
            yield from flagged(inner, f"{prefix}{name}.")
        for flag in (mark for mark in field.metadata if isinstance(mark, Flag)):
            yield f"{prefix}{name}{'.' if flag.key else ''}{flag.key}", flag, field
