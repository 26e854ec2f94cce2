"""What the commands that simulate share: flags that describe a run, checked paths, and how errors are told."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel

from vllm_ext.config import flags
from vllm_ext.config.model import flagged
from vllm_ext.report.results import Workload, without_folder

if TYPE_CHECKING:  # not imported by commands that do not simulate
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.workloads.build import GeneratedWorkload

SYSTEMS = "--system"
SPEC = "spec."
"""In front of the dotted paths under which flags that set fields stand in the parsed arguments."""
_OWN_NAMES = {"engine.system": SYSTEMS, "workload.tiers": "--slo", "engine.options.policies": "--policy"}
"""Fields whose flags are more than the text of a value."""
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


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, model: type[BaseModel], prefix: str) -> None:
    """Add the flags of a model, the nested ones in groups; see `given`."""
    groups: dict[str, Any] = {}
    for path, flag, field in flagged(model):
        name = path.rpartition(".")[0]
        if name not in groups and isinstance(parser, Parser):
            groups[name] = parser.add_argument_group(name or "run")
        options = flags.argument(flag, field) | {"dest": prefix + path}
        groups.get(name, parser).add_argument(*flags.names_of(path, flag), **options)


def given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """Return what the flags under a prefix set: dotted path -> value."""
    return {
        dest.removeprefix(prefix): value
        for dest, value in vars(args).items()
        if dest.startswith(prefix) and value is not None
    }


def add_arguments(parser: Parser, *, systems: bool = True) -> None:
    """Add the flags of a description; none of them has a default of its own.

    Args:
        parser: Gets them.
        systems: Whether the user says which systems run.
    """
    from vllm_ext.simulation.spec import SimulationSpec

    general = parser.add_argument_group("description of the run")
    general.add_argument("--spec", type=Path, metavar="FILE", help="JSON description, all fields of it optional")
    general.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=JSON",
        help="set any field by its dotted path, such as engine.options.ordering.theta=0.0; repeatable",
    )
    general.add_argument("--print-spec", action="store_true", help="print the description as JSON and stop")
    if systems:
        general.add_argument(
            SYSTEMS,
            "--scheduler-cls",
            dest="systems",
            metavar="A,B",
            help="systems to compare: upstream-fcfs or upstream-priority for vLLM alone, or what --scheduler-cls takes",
        )
    general.add_argument(
        "--policy",
        "--ext-policy",
        dest=f"{SPEC}engine.options.policies",
        action="append",
        metavar="FILE.py:CLASS",
        help="a policy of your own, which takes its axis of every system but vLLM alone; repeatable",
    )
    general.add_argument(
        "--slo",
        dest=f"{SPEC}workload.tiers",
        type=_slo,
        metavar="ttft=S,tbt=S,e2e=S",
        help="objectives of every request in seconds: first token, every gap between tokens, last token",
    )
    add_flags(parser, SimulationSpec, SPEC)


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags and ``--set`` change: dotted path -> value.

    Raises:
        UsageError: ``--set`` cannot be read, or a field is set twice.
    """
    values = given(args, SPEC)
    policies = values.pop("engine.options.policies", None)
    if "cost.file" in values:
        values.setdefault("cost.kind", "fitted")
    for text in args.set:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {text}: must be PATH=JSON, such as workload.cv=2.0")
        if path in values:
            raise UsageError(f"--set {text}: {path} is set by another flag already")
        values[path] = json_or_text(value)
    if policies:  # after --set, which may bring other options
        values["engine.options.policies"] = policies
    return values


def base_spec(args: argparse.Namespace) -> SimulationSpec:
    """Return the description of ``--spec`` with what the flags set; the systems are left to the caller.

    Raises:
        UsageError: a file, flag or field is wrong.
    """
    from vllm_ext.simulation.spec import SimulationSpec, parse, with_values

    spec = SimulationSpec() if args.spec is None else parse(SimulationSpec, read_json(args.spec, "--spec"))
    return with_values(spec, changes(args))


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
    except RecursionError as error:
        raise UsageError(f"{flag} {path}: nested too deep: {error}") from error


def json_or_text(text: str) -> Any:
    """Read a value as JSON; what is none is a text, so that names need no quotes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def guarded(prog: str, run: Callable[[], int], *, again: str = "") -> int:
    """Run a command; 2 and one line where a flag, a field or a file is wrong, 130 and how to go on after Ctrl-C."""
    try:
        return run()
    except ModuleNotFoundError:  # `cli.main` says what to install
        raise
    except (ValueError, OSError, ImportError) as error:
        return complain(prog, error)
    except KeyboardInterrupt:
        if not again:
            raise
        print(f"\n{prog}: interrupted; {again}", file=sys.stderr)
        return 130


def complain(prog: str, error: Exception) -> int:
    """Print one line, with the flag that sets the field in question, and return the exit status."""
    from vllm_ext.simulation.spec import SimulationSpec

    named = {path: flags.names_of(path, flag)[0] for path, flag, _ in flagged(SimulationSpec)} | _OWN_NAMES
    flag = named.get(getattr(error, "field", ""))
    text = " ".join(str(error).split())
    print(f"{prog}: {f'{flag}: ' if flag else ''}{text}", file=sys.stderr)
    return 2


def workload_of(made: GeneratedWorkload) -> Workload:
    """Return name, size and checksum of a run's workload, for a result."""
    return Workload(name=Path(made.name).name, rows=made.rows, sha256=made.sha256)


def public(value: Any) -> Any:
    """Return plain data with absolute paths cut to their last part, as results have it."""
    if isinstance(value, Mapping):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def command_line(prog: str, argv: Sequence[str]) -> str:
    """Return the command to repeat a run; absolute paths are cut to their last part."""
    return " ".join([prog, shlex.join(map(without_folder, argv))]).strip()


def _slo(text: str) -> list[dict[str, Any]]:
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
