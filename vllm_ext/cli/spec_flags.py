"""Flags that describe a simulation, shared by `vllm-ext simulate` and `vllm-ext sweep`."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel

    from vllm_ext.simulation.spec import SimulationSpec

SYSTEMS = "--system"
POLICY = "--policy"


@dataclass(frozen=True, kw_only=True)
class SpecFlag:
    """A flag and the field it sets."""

    names: tuple[str, ...]
    """As typed; the first is the one in messages."""
    path: str
    """Dotted path of the field."""
    type: Callable[[str], Any]
    """Turns the text into a value; ``bool`` stands for a pair ``--x`` / ``--no-x`` without a text."""
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        """Name of the attribute in the parsed arguments."""
        return "spec_" + self.path.replace(".", "_")

    @property
    def group(self) -> str:
        """Section of the description, under which ``--help`` lists the flag."""
        return self.path.rpartition(".")[0] or "run"


@functools.cache
def flags() -> tuple[SpecFlag, ...]:
    """Return a flag for every field of the description that is marked with `Flag`."""
    from vllm_ext.simulation.spec import SimulationSpec

    return tuple(flags_of(SimulationSpec, ""))


def flags_of(model: type[BaseModel], prefix: str) -> Iterator[SpecFlag]:
    """Yield a flag for every field of a model, and of those within it, that is marked with `Flag`."""
    from vllm_ext.simulation.flag import Flag

    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from flags_of(cast("type[BaseModel]", field.annotation), f"{prefix}{name}.")
        for flag in (mark for mark in field.metadata if isinstance(mark, Flag)):
            kind, choices = _kind(field.annotation)
            default = "" if field.default is None or kind is bool else f" (default: {field.default})"
            yield SpecFlag(
                names=tuple(flag.names.split()) or (f"--{name.replace('_', '-')}",),
                path=f"{prefix}{name}",
                type=kind,
                metavar=choices or ("N" if kind is int else "X" if kind is float else "NAME"),
                help=(_first_sentence(field.description or "") + default).replace("%", "%%"),
            )


def _kind(annotation: Any) -> tuple[Callable[[str], Any], str]:
    """The type of a value that is not None, and the allowed texts if there are only some."""
    inner = next((arg for arg in get_args(annotation) if arg is not NoneType), annotation)
    if isinstance(inner, str):  # of a Literal
        return str, f"{{{','.join(get_args(annotation))}}}"
    return inner, ""


def _first_sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", " ".join(text.replace("``", "").split()), maxsplit=1)[0]


_SLO_NAMES = ("ttft", "tbt", "e2e")


class UsageError(ValueError):
    """A flag or a file is wrong; the message is one line that names it."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; abbreviations of flags are not understood."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line on stderr, without argparse's usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a description; none of them has a default of its own."""
    general = parser.add_argument_group("description of the run")
    general.add_argument("--spec", type=Path, metavar="FILE", help="JSON description, all fields of it optional")
    general.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=JSON",
        help="set any field by its dotted path, such as engine.options.ordering.age_limit_s=5; repeatable",
    )
    general.add_argument("--print-spec", action="store_true", help="print the description as JSON and stop")
    general.add_argument(
        SYSTEMS,
        "--scheduler-cls",
        dest="systems",
        metavar="A,B",
        help="systems to compare: upstream-fcfs or upstream-priority for vLLM alone, or what --scheduler-cls takes",
    )
    general.add_argument(
        POLICY,
        "--ext-policy",
        action="append",
        default=[],
        metavar="FILE.py:CLASS",
        help="a policy of your own, which takes its axis of every system but vLLM alone; repeatable",
    )
    general.add_argument(
        "--slo",
        metavar="ttft=S,tbt=S,e2e=S",
        help="objectives of every request in seconds: first token, every gap between tokens, last token",
    )
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(flag.group for flag in flags())}
    for flag in flags():
        add_flag(groups[flag.group], flag)


def add_flag(group: argparse._ArgumentGroup, flag: SpecFlag) -> None:
    """Add a flag; None stands for one that is not given."""
    options: dict[str, Any] = {"type": flag.type, "metavar": flag.metavar}
    if flag.type is bool:
        options = {"action": argparse.BooleanOptionalAction}
    group.add_argument(*flag.names, dest=flag.dest, default=None, help=flag.help, **options)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags set: dotted path -> value.

    Raises:
        UsageError: ``--set`` or ``--slo`` cannot be read, or a field is set twice.
    """
    values = {flag.path: value for flag in flags() if (value := getattr(args, flag.dest)) is not None}
    if "cost.file" in values:
        values.setdefault("cost.kind", "fitted")
    if args.slo is not None:
        values["workload.tiers"] = [{"name": "all", **_slo(args.slo)}]
    for text in args.set:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {text}: must be PATH=JSON, such as workload.cv=2.0")
        if path in values:
            raise UsageError(f"--set {text}: {path} is set by another flag already")
        values[path] = json_or_text(value)
    if args.policy:  # after --set, which may bring other options
        values["engine.options.policies"] = args.policy
    return values


def base_spec(args: argparse.Namespace) -> SimulationSpec:
    """Return the description of ``--spec`` with what the flags set; the systems are left to the caller.

    Raises:
        UsageError: a file, flag or field is wrong.
    """
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.sweep import paths

    spec = SimulationSpec() if args.spec is None else paths.parse(SimulationSpec, read_json(args.spec, "--spec"))
    return paths.with_values(spec, given(args))


def systems_of(args: argparse.Namespace, spec: SimulationSpec) -> list[str]:
    """Return the systems to run: those of the flag, else the description's.

    Raises:
        UsageError: one is named twice, or none.
    """
    if args.systems is None:
        return [spec.engine.system]
    systems = [name.strip() for name in args.systems.split(",")]
    if not all(systems) or len(set(systems)) < len(systems):
        raise UsageError(f"{SYSTEMS} {args.systems}: must name every system once, separated by commas")
    return systems


def read_json(path: Path, flag: str) -> Any:
    """Read a JSON file.

    Raises:
        UsageError: it cannot be read, or is no JSON; names the flag, the file and the line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} {path}: line {error.lineno}: not JSON: {error.msg}") from error


def json_or_text(text: str) -> Any:
    """Read a value as JSON; what is none is a text, so that names need no quotes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def complain(prog: str, error: Exception) -> int:
    """Print one line, with the flag that sets the field in question, and return the exit status."""
    named = {flag.path: flag.names[0] for flag in flags()} | {
        "engine.system": SYSTEMS,
        "workload.tiers": "--slo",
        "engine.options.policies": POLICY,
    }
    flag = named.get(getattr(error, "field", ""))
    text = " ".join(str(error).split())
    print(f"{prog}: {f'{flag}: ' if flag else ''}{text}", file=sys.stderr)
    return 2


def public(value: Any) -> Any:
    """Return plain data with absolute paths cut to their last part, as results have it."""
    if isinstance(value, Mapping):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def command_line(prog: str, argv: Sequence[str]) -> str:
    """Return the command to repeat a run; absolute paths are cut to their last part."""
    cut = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        cut.append(f"{name}={Path(value).name}" if equals and value.startswith("/") else str(public(argument)))
    return " ".join([prog, shlex.join(cut)]).strip()


def _slo(text: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name.strip() not in _SLO_NAMES or not seconds > 0 or name.strip() in found:
            allowed = f"must be {'=S, '.join(_SLO_NAMES)}=S, each at most once, with seconds above 0"
            raise UsageError(f"--slo {text}: {allowed}")
        found[name.strip()] = {"base_s": seconds}
    return found
