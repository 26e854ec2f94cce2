"""`vllm-ext options`: every option, the flag that sets it, what is allowed, and what it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_ext.cli.command import Parser
from vllm_ext.config.flags import FLAGS, help_of, names_of
from vllm_ext.config.options import ExtConfig
from vllm_ext.report.table import Table

_HEAD = """# All options

<!-- Written by `vllm-ext options --markdown`. -->

An option is set by its flag, or by its name in `--additional-config '{"vllm_ext": {...}}'`, where a dot is an object in
an object: `{"vllm_ext": {"kv_tier": {"gib": 8}}}`. The flag wins. A value that is not allowed ends the start with one
line that names it.
"""
_KINDS = {bool: "true, false", int: "whole number", float: "number", str: "text", dict: "object", tuple: "list"}
_VLLM = {"system": "--scheduler-cls"}
"""Options that a flag of vLLM's sets."""
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class Option(NamedTuple):
    """An option, or an entry of one that is an object and has a flag of its own."""

    name: str
    flags: str
    allowed: str
    default: str
    meaning: str


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0."""
    parser = Parser(prog="vllm-ext options", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print docs/options.md")
    if parser.parse_args(argv).markdown:
        print(_HEAD)
        rows = [[f"`{one.name}`", ", ".join(f"`{flag}`" for flag in one.flags.split(", ") if flag),
                 one.allowed, one.default, one.meaning.replace("``", "`")]
                for one in options()]  # fmt: skip
        print(Table(("option", "flag", "allowed", "default", "what it does"), rows).markdown(), end="")
        return 0
    for one in options():
        first = f"{one.name}  ({one.allowed}; default {one.default})" if one.default else f"{one.name}  ({one.allowed})"
        print("\n    ".join(filter(None, [first, one.flags, one.meaning.replace("``", "")])))
    return 0


def options(model: type[BaseModel] = ExtConfig, prefix: str = "") -> Iterator[Option]:
    """Yield all options of a model and of the models within it, each followed by its entries that have a flag."""
    for name, field in model.model_fields.items():
        path, inner = f"{prefix}{name}", field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from options(inner, f"{path}.")
            continue
        flags = ", ".join(names_of(path, FLAGS[path][0])) if path in FLAGS else _VLLM.get(path, "")
        yield Option(path, flags, allowed(field), _default(field), " ".join((field.description or "").split()))
        for entry, (flag, of) in FLAGS.items():
            if flag.key and entry == f"{path}.{flag.key}":
                choices = ", ".join(f"{text} ({value:g})" for text, value in (flag.choices or {}).items())
                kind = choices or next((word for kind, word in _KINDS.items() if kind is flag.type), "text")
                yield Option(entry, ", ".join(names_of(entry, flag)), kind, "", help_of(flag, of))


def allowed(field: FieldInfo) -> str:
    """Return in words what a field may hold."""
    bounds = [
        f"{sign} {getattr(mark, bound):g}"
        for mark in field.metadata
        for bound, sign in _BOUNDS.items()
        if getattr(mark, bound, None) is not None
    ]
    return " ".join([", ".join(dict.fromkeys(_kinds(field.annotation))), " and ".join(bounds)]).strip()


def _kinds(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation))
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _kinds(inner)
    elif annotation is not NoneType:
        yield _KINDS[get_origin(annotation) or annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, "", (), {}):
        return ""
    return (
        str(value).lower() if isinstance(value, bool) else ", ".join(value) if isinstance(value, tuple) else str(value)
    )
