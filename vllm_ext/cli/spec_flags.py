"""Flags that describe a simulation, shared by `vllm-ext simulate` and `vllm-ext sweep`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
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
    metavar: str = "N"
    help: str = ""
    group: str = "engine"

    @property
    def dest(self) -> str:
        """Name of the attribute in the parsed arguments."""
        return "spec_" + self.path.replace(".", "_")


def _flag(group: str, names: str, path: str, kind: Callable[[str], Any], metavar: str, help: str) -> SpecFlag:
    return SpecFlag(names=tuple(names.split()), path=path, type=kind, metavar=metavar, help=help, group=group)


FLAGS: tuple[SpecFlag, ...] = (
    _flag("hardware", "--model", "hardware.model", str, "NAME", "model of the table, or folder with a config.json"),
    _flag("hardware", "--device", "hardware.device", str, "NAME", "device of the table"),
    _flag(
        "hardware", "--tensor-parallel-size -tp", "hardware.tensor_parallel", int, "N", "devices that share the model"
    ),
    _flag(
        "hardware",
        "--gpu-memory-utilization",
        "hardware.gpu_memory_utilization",
        float,
        "SHARE",
        "share of the device's memory",
    ),
    _flag("hardware", "--cost", "cost.kind", str, "KIND", "roofline, fitted or constant"),
    _flag("hardware", "--cost-file", "cost.file", str, "FILE", "profile for --cost fitted (which it implies)"),
    _flag("engine", "--max-num-seqs", "engine.max_num_seqs", int, "N", "requests running at once"),
    _flag("engine", "--max-num-batched-tokens", "engine.max_num_batched_tokens", int, "N", "tokens computed per step"),
    _flag("engine", "--max-model-len", "engine.max_model_len", int, "N", "longest sequence, in tokens"),
    _flag("engine", "--block-size", "engine.block_size", int, "N", "tokens per KV block"),
    _flag(
        "engine",
        "--num-blocks --num-gpu-blocks-override",
        "engine.num_blocks",
        int,
        "N",
        "KV blocks (default: what the device's memory holds)",
    ),
    _flag(
        "engine", "--watermark", "engine.watermark", float, "SHARE", "KV blocks kept free when requests are admitted"
    ),
    _flag("engine", "--async-scheduling", "engine.async_scheduling", bool, "", "schedule a step while one is computed"),
    _flag("engine", "--prefix-caching", "engine.prefix_caching", bool, "", "reuse the KV of equal prefixes"),
    _flag("engine", "--profiled", "engine.profiled", bool, "", "start from a profile of the simulated hardware"),
    _flag("workload", "--dataset --source", "workload.source", str, "FILE", "preset of lengths, or a file"),
    _flag("workload", "--format", "workload.format", str, "NAME", "format of the file"),
    _flag(
        "workload",
        "--arrivals",
        "workload.arrivals",
        str,
        "KIND",
        "poisson, gamma, recorded, closed-loop or at-once",
    ),
    _flag("workload", "--rate", "workload.rate_per_s", float, "R", "mean arrivals per second"),
    _flag("workload", "--clients", "workload.clients", int, "N", "clients of a closed loop"),
    _flag("workload", "--duration", "workload.duration_s", float, "S", "no new requests from this time on, in seconds"),
    _flag("workload", "--num-requests", "workload.num_requests", int, "N", "requests in all"),
    _flag("workload", "--announce-slo", "workload.announce_slo", bool, "", "clients tell their objectives"),
    _flag("workload", "--seed", "workload.seed", int, "N", "seed of lengths and arrivals"),
    _flag("workload", "--max-time", "max_time_s", float, "S", "stop at this virtual time, in seconds"),
)
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
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(flag.group for flag in FLAGS)}
    for flag in FLAGS:
        options: dict[str, Any] = {"type": flag.type, "metavar": flag.metavar}
        if flag.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        groups[flag.group].add_argument(*flag.names, dest=flag.dest, default=None, help=flag.help, **options)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags set: dotted path -> value.

    Raises:
        UsageError: ``--set`` or ``--slo`` cannot be read, or a field is set twice.
    """
    values = {flag.path: value for flag in FLAGS if (value := getattr(args, flag.dest)) is not None}
    if "cost.file" in values:
        values.setdefault("cost.kind", "fitted")
    if args.slo is not None:
        values["workload.tiers"] = [{"name": "all", **_slo(args.slo)}]
    if args.policy:
        values["engine.options.policies"] = args.policy
    for text in args.set:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {text}: must be PATH=JSON, such as workload.cv=2.0")
        if path in values:
            raise UsageError(f"--set {text}: {path} is set by another flag already")
        values[path] = json_or_text(value)
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
    flags = {flag.path: flag.names[0] for flag in FLAGS} | {
        "engine.system": SYSTEMS,
        "workload.tiers": "--slo",
        "engine.options.policies": POLICY,
    }
    flag = flags.get(getattr(error, "field", ""))
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
