"""What `vllm-ext doctor` prints: a line per feature, all checks, or one JSON object."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ext.cli.diagnosis import HOOKS, PREDICTION, Finding, State
from vllm_ext.cli.features import Availability, Verdict, feature_reports

_INSTALLATION = "installation"
_HINT = "--verbose lists all checks and hooks; --json is for bug reports."


def as_lines(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return the report with one line per feature, remedies below what they are for."""
    rows: list[tuple[str, str, str, tuple[str, ...]]] = []
    for finding in findings:
        if finding.area in (HOOKS, PREDICTION) or not finding.remedy:
            continue
        bears = Availability.NOT_AVAILABLE if finding.state is State.FAIL else Availability.OPTIONAL
        rows.append((bears.value, _INSTALLATION, f"{finding.area}: {finding.name}: {finding.value}", (finding.remedy,)))
    if not any(finding.state is State.FAIL for finding in findings if not finding.feature):
        rows.insert(0, (Availability.OK.value, _INSTALLATION, _summary(findings), ()))
    rows.extend((r.state.value, r.name, r.detail, r.remedies) for r in feature_reports(findings))
    states, names = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines: list[str] = []
    for state, name, detail, remedies in rows:
        lines.append(f"{state:{states}}  {name:{names}}  {detail}")
        for remedy in remedies:
            lines += _wrapped(remedy, indent=states + 2)
    lines += ["", *(f"{verdict.feature}: {_says(verdict)}" for verdict in verdicts), _HINT]
    return "\n".join(lines)


def as_table(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """Return all findings, one block per area, remedies below what they are for."""
    rows = [(f.area, f.state, f.name, f.value, f.remedy) for f in findings]
    for verdict in verdicts:
        state = State.OK if verdict.works else State.FAIL
        rows.append(("chosen features", state, verdict.feature, _says(verdict), ""))
    lines: list[str] = []
    for area, group in itertools.groupby(rows, key=lambda row: row[0]):
        members = list(group)
        width = max(len(name) for _, _, name, _, _ in members)
        lines += ["", area]
        for _, state, name, value, remedy in members:
            lines.append(f"  {state.value:4}  {name:{width}}  {value}".rstrip())
            if remedy:
                lines += _wrapped(remedy, indent=8)
    return "\n".join(lines[1:])


def as_json(findings: Sequence[Finding], verdicts: Sequence[Verdict], versions: dict[str, str | None]) -> str:
    """Return the report as one JSON object, without the user's home folder in it.

    Args:
        findings: All of them.
        verdicts: Of the chosen features.
        versions: Of the distributions that matter; None for one that is not installed.
    """
    reports = feature_reports(findings)
    report = {
        "ok": all(verdict.works for verdict in verdicts),
        "versions": {"python": platform.python_version(), **versions},
        "platform": platform.platform(),
        "chosen": [dataclasses.asdict(verdict) for verdict in verdicts],
        "features": [
            {
                "name": r.name,
                "state": r.state.value,
                "detail": r.detail,
                "remedies": list(r.remedies),
                "hooks": [_plain(hook) for hook in r.hooks],
            }
            for r in reports
        ],
        "checks": [{"area": f.area, **_plain(f)} for f in findings if f.area != HOOKS],
    }
    return json.dumps(report, indent=1).replace(json.dumps(str(Path.home()))[1:-1], "~")


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "state": finding.state.value,
        "value": finding.value,
        "remedy": finding.remedy,
    }


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


def _says(verdict: Verdict) -> str:
    return ", ".join(filter(None, ["can work" if verdict.works else "can't work", verdict.reason]))


def _wrapped(remedy: str, *, indent: int) -> list[str]:
    return textwrap.wrap(
        f"-> {remedy}", 118, initial_indent=" " * indent, subsequent_indent=" " * (indent + 3), break_on_hyphens=False
    )
