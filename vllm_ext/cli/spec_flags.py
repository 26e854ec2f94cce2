"""Flags made of the fields of models, and what the commands that simulate make of theirs."""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from vllm_ext.cli.command import Parser, UsageError
from vllm_ext.config import flags
from vllm_ext.config.model import Flag, flagged
from vllm_ext.report.results import Result, Workload, without_folder

if TYPE_CHECKING:  # not imported by commands that do not simulate
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.workloads.build import GeneratedWorkload

SYSTEMS = "--system"
SPEC = "spec."
"""In front of the dotted paths under which flags that set fields stand in the parsed arguments."""
_POLICIES = "engine.options.policies"
_SLO_NAMES = ("ttft", "tbt", "e2e")


def add_flags(
    parser: Parser, model: type[BaseModel], prefix: str, title: str = "run", fields: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Add the flags of a model; see `given`.

    Args:
        parser: Gets them.
        model: Its nested models are groups of their own.
        prefix: Before the dotted path under which a flag's value stands in the parsed arguments.
        title: Of the group of the model's own fields.
        fields: Those that get a flag, whose name is theirs; by default the fields that are marked with one.
        defaults: What the command takes where the field has another default, by the field's path: for the help.
    """
    groups: dict[str, Any] = {}
    defaults = defaults or {}
    for path, flag, field in (
        ((name, Flag(), model.model_fields[name]) for name in fields) if fields else flagged(model)
    ):
        name = path.rpartition(".")[0]
        if name not in groups:
            groups[name] = parser.add_argument_group(name or title)
        names = flags.names_of(path, flag)
        shown = copy.copy(field)
        shown.default = defaults.get(path, field.default)
        groups[name].add_argument(*names, **flags.argument(flag, shown) | {"dest": prefix + path})
        parser.flag_of |= dict.fromkeys((path, prefix + path), names[0])


def given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """Return what the flags under a prefix set: dotted path -> value."""
    return {
        dest.removeprefix(prefix): value
        for dest, value in vars(args).items()
        if dest.startswith(prefix) and value is not None
    }


def add_arguments(parser: Parser, *, systems: bool = True, defaults: Mapping[str, Any] | None = None) -> None:
    """Add the flags of a description; none of them has a default of its own.

    Args:
        parser: Gets them.
        systems: Whether the user says which systems run.
        defaults: As of `add_flags`.
    """
    from vllm_ext.simulation.spec import SimulationSpec

    general = parser.add_argument_group("description of the run")
    general.add_argument("--spec", type=Path, metavar="FILE", help="JSON description, all fields of it optional")
    add_set(general, "engine.options.ordering.theta=0.0")
    general.add_argument("--print-spec", action="store_true", help="print the description as JSON and stop")
    if systems:
        general.add_argument(
            SYSTEMS, "--scheduler-cls", dest="systems", metavar="A,B",
            help="systems to compare: upstream-fcfs or upstream-priority for vLLM alone, or what --scheduler-cls takes",
        )  # fmt: skip
    general.add_argument(
        "--policy", "--ext-policy", dest=f"{SPEC}{_POLICIES}", action="append", metavar="FILE.py:CLASS",
        help="a policy of your own, which takes its axis of every system but vLLM alone; repeatable",
    )  # fmt: skip
    general.add_argument(
        "--slo", dest=f"{SPEC}workload.tiers", type=slo, metavar="ttft=S,tbt=S,e2e=S",
        help="objectives of every request in seconds: first token, every gap between tokens, last token",
    )  # fmt: skip
    add_flags(parser, SimulationSpec, SPEC, defaults=defaults)
    parser.flag_of |= {"engine.system": SYSTEMS, "workload.tiers": "--slo", _POLICIES: "--policy"}


def add_set(parser: argparse._ActionsContainer, example: str) -> None:
    """Add ``--set``, for fields without a flag of their own; see `set_by`."""
    parser.add_argument("--set", action="append", default=[], metavar="PATH=JSON",
                        help=f"set any field by its dotted path, such as {example}; repeatable")  # fmt: skip


def set_by(args: argparse.Namespace, taken: Container[str]) -> dict[str, Any]:
    """Return what ``--set`` sets: dotted path -> value; a path that is ``taken`` by a flag is a `UsageError`."""
    values: dict[str, Any] = {}
    for text in args.set:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {text}: must be PATH=JSON, such as workload.cv=2.0")
        if path in taken or path in values:
            raise UsageError(f"--set {text}: {path} is set by another flag already")
        values[path] = json_or_text(value)
    return values


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags and ``--set`` change: dotted path -> value."""
    values = given(args, SPEC)
    policies = values.pop(_POLICIES, None)
    if "cost.file" in values:
        values.setdefault("cost.kind", "fitted")
    values |= set_by(args, values)
    # after --set, which may bring other options
    return values | ({_POLICIES: policies} if policies else {})


def base_spec(args: argparse.Namespace) -> SimulationSpec:
    """Return what `described` does, and say what a reader should know of its step times."""
    spec = described(args)
    if not args.print_spec:
        say_costs(spec)
    return spec


def described(args: argparse.Namespace) -> SimulationSpec:
    """Return the description of ``--spec`` with what the flags set; the systems are left to the caller."""
    from vllm_ext.simulation.spec import SimulationSpec, parse, with_values

    spec = SimulationSpec() if args.spec is None else parse(SimulationSpec, read_json(args.spec, "--spec"))
    return with_values(spec, changes(args))


def say_costs(spec: SimulationSpec) -> None:
    """Print on stderr what a reader should know of the step times, if a file tells them."""
    from vllm_ext.simulation.cost.spec import notes

    print(*(f"{note}\n" for note in notes(spec.hardware, spec.cost)), sep="", end="", file=sys.stderr)


def systems_of(args: argparse.Namespace, spec: SimulationSpec) -> list[str]:
    """Return the systems to run: those of the flag, else the description's."""
    if args.systems is None:
        return [spec.engine.system]
    systems = [name.strip() for name in args.systems.split(",")]
    if not all(systems) or len(set(systems)) < len(systems):
        raise UsageError(f"{SYSTEMS} {args.systems}: must name every system once, separated by commas")
    return systems


def read_json(path: Path, flag: str) -> dict[str, Any]:
    """Read a JSON object from a file; a `UsageError` names the flag, the file and the line."""
    try:
        if isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            return found
        problem = "must hold an object"
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}: not JSON: {error.msg}"
    except RecursionError as error:
        problem = f"nested too deep: {error}"
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error}"
    raise UsageError(f"{flag} {path}: {problem}")


def json_or_text(text: str) -> Any:
    """Read a value as JSON; what is none is a text, so that names need no quotes."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text


def result(
    name: str, words: Sequence[str], spec: SimulationSpec, made: GeneratedWorkload, config: Mapping[str, Any],
    metrics: Mapping[str, float], baselines: Mapping[str, Mapping[str, float]] | None = None,
) -> Result:  # fmt: skip
    """Return the result of runs of ``spec`` on what was ``made``; ``words`` are the command that repeats them."""
    return Result(
        name=name, command=command_line(words), config=public(config), seed=spec.workload.seed, metrics=metrics,
        workload=Workload(name=Path(made.name).name, rows=made.rows, sha256=made.sha256), baselines=baselines or {},
    )  # fmt: skip


def public(value: Any) -> Any:
    """Return plain data with absolute paths cut to their last part, as results have it."""
    if isinstance(value, Mapping):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def command_line(words: Sequence[str]) -> str:
    """Return the command to repeat a run; absolute paths are cut to their last part."""
    return shlex.join(map(without_folder, words))


def slo(text: str) -> list[dict[str, Any]]:
    """The objectives of ``--slo`` as one class of service that all requests belong to."""
    tier: dict[str, Any] = {"name": "all"}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name.strip() not in _SLO_NAMES or not seconds > 0 or name.strip() in tier:
            allowed = f"must be {'=S, '.join(_SLO_NAMES)}=S, each at most once, with seconds above 0"
            raise argparse.ArgumentTypeError(f"{text}: {allowed}")
        tier[name.strip()] = {"base_s": seconds}
    return [tier]
