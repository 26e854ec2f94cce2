"""The flags of `vllm serve` and `vllm bench` that set our options: marks on the fields of `ExtConfig`."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import Flag, flagged
from vllm_ext.config.options import ExtConfig

FLAGS: dict[str, tuple[Flag, FieldInfo]] = {path: (flag, field) for path, flag, field in flagged(ExtConfig)}
"""By the dotted path of the option that each sets; it wins over ``--additional-config``."""


def names_of(path: str, flag: Flag) -> list[str]:
    """Return the names of a flag as they are typed; the first is the one in messages."""
    return flag.names.split() or [f"--{path.rpartition('.')[2].replace('_', '-')}"]


def dest_of(path: str) -> str:
    """Return the attribute of parsed arguments in which the flag of an option stands."""
    return names_of(path, FLAGS[path][0])[0].removeprefix("--").replace("-", "_")


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what our flags set among parsed arguments, by `dest_of`."""
    names = map(dest_of, FLAGS)
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def argument(flag: Flag, field: FieldInfo) -> dict[str, Any]:
    """Return what ``add_argument`` takes for a flag, without its name; one that is not given sets nothing."""
    kind: Any = flag.type or next((arg for arg in get_args(field.annotation) if arg is not NoneType), field.annotation)
    options: dict[str, Any] = {"type": kind, "metavar": flag.metavar or {int: "N", float: "X"}.get(kind, "NAME")}
    if not flag.type and get_args(kind):  # a Literal or None, a Text or None
        kind = get_args(kind)[0]
    if isinstance(kind, str):  # of a Literal
        options = {"type": str, "metavar": flag.metavar or f"{{{','.join(literal_of(field))}}}"}
    elif kind is bool:
        options = {"action": argparse.BooleanOptionalAction}
    shown = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    default = "" if flag.key or shown in (None, "") or kind is bool else f" (default: {shown})"
    text = (help_of(flag, field) + default).replace("%", "%%")
    return {**options, "default": argparse.SUPPRESS, "help": text}  # vLLM's help would show None as another default


def help_of(flag: Flag, field: FieldInfo) -> str:
    """Return the sentence of ``--help``: the flag's own, else the first of the field's docstring."""
    text = " ".join((field.description or "").replace("``", "").split())
    return flag.help or re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]


def literal_of(field: FieldInfo) -> list[str]:
    """Return the values of a field that is a Literal, or that or None."""
    inner = next((arg for arg in get_args(field.annotation) if get_args(arg)), field.annotation)
    return [str(value) for value in get_args(inner)]


def merge_flags(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` overlaid with the flags in ``given``; neither is changed.

    Args:
        options: The dictionary under ``additional_config["vllm_ext"]``.
        given: Parsed arguments by `dest_of`; absent or ``None`` means that the flag was not given.

    Raises:
        ConfigError: The options, or one that must hold others, such as ``ordering``, are no object.
    """
    if not isinstance(options, Mapping):
        raise ConfigError("", options, "must be an object")
    merged = copy.deepcopy(dict(options))
    for path in FLAGS:
        value = given.get(dest_of(path))
        if value is None:
            continue
        node = merged
        *parents, last = path.split(".")
        for depth, key in enumerate(parents, start=1):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ConfigError(".".join(parents[:depth]), node, "must be an object")
        node[last] = value
    return merged


def in_flags(error: ConfigError, given: Mapping[str, Any]) -> str:
    """Return an error as a line for who typed flags: with the flag's name and text, where a flag set the value.

    Args:
        error: Of an option.
        given: Parsed arguments, see `merge_flags`.
    """
    if error.field == "system" and error.value == given.get("scheduler_cls"):
        return f"--scheduler-cls {given['scheduler_cls']}: {error.allowed}"
    if error.field not in FLAGS or given.get(dest_of(error.field)) is None:
        return str(error)
    flag, _ = FLAGS[error.field]
    value = given[dest_of(error.field)]
    name = names_of(error.field, flag)[0]
    if isinstance(value, bool):
        return f"{name if value else name.replace('--', '--no-', 1)}: {error.allowed}"
    texts = {number: text for text, number in (flag.choices or {}).items()}
    shown = ",".join(map(str, value)) if isinstance(value, list) else texts.get(value, value)
    return f"{name} {shown}: {error.allowed}"
