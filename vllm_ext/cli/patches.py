"""`vllm-ext patches`: which symbols of vLLM are hooked, why, and whether the vLLM installed is a verified one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import groupby

from vllm_ext.cli.command import Parser
from vllm_ext.hooks import registry
from vllm_ext.hooks.errors import installed_vllm
from vllm_ext.hooks.patch import Hook
from vllm_ext.hooks.registry import HookStatus
from vllm_ext.report import common_flags
from vllm_ext.report.table import Table

_HEAD = """# Hooks into vLLM

<!-- Written by `vllm-ext patches --markdown`; a test compares. -->

vllm-ext runs on an unmodified vLLM. Most of it uses supported seams: a scheduler class, plugins, `additional_config`.
What is left is listed here. Nothing below has an effect until a system is chosen with `--scheduler-cls NAME` or in
`additional_config`; then every hook is compared with the code it was verified with, and a vLLM that differs is refused.

A *patch* wraps a function and calls the original; an *addition* adds a function under our name; a *reliance* changes
nothing: it insists that the code our scheduler builds on is what was read, as every method that a class of ours
overrides. *Verified* means that the code in that version was read and the hook is right for it;
`vllm-ext patches --check` compares with the version installed. The fingerprints of a version are in
`vllm_ext/hooks/verified/VERSION.json`; `python -m vllm_ext.hooks --source SOURCE --write VERSION` writes them.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0, or 1 with ``--check`` if a hook does not fit the vLLM installed."""
    parser = Parser(prog="vllm-ext patches", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    common_flags.add(form, json="print the state of each hook as JSON")
    form.add_argument("--markdown", action="store_true", help="print docs/patches.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every hook fits the vLLM installed")
    args = parser.parse_args(argv)
    if args.markdown and args.check:
        parser.error("--markdown says nothing about the vLLM installed; leave out --check")
    if args.markdown:
        print(markdown(), end="")
        return 0
    statuses = registry.report()
    print(as_json(statuses) if args.json else as_text(statuses))
    return 1 if args.check and any(status.status != "verified" for status in statuses) else 0


def as_json(statuses: Sequence[HookStatus]) -> str:
    """Return the report as one JSON object."""
    hooks = [dataclasses.asdict(status) for status in statuses]
    return json.dumps({"vllm": installed_vllm(), "hooks": hooks}, indent=2)


def as_text(statuses: Sequence[HookStatus]) -> str:
    """Return the report as a table, with the remedy below each hook that does not fit."""
    width = max(len(status.target) for status in statuses)
    lines = [f"vLLM {installed_vllm()}"]
    for status in statuses:
        lines.append(f"{status.status:11}  {status.kind:8}  {status.target:{width}}  {status.feature}")
        if status.status != "verified":
            lines.append(f"             {status.detail}")
            lines.append(f"             remedy: {status.remedy}")
    return "\n".join(lines)


def markdown() -> str:
    """Return the documentation page, made from the hooks alone."""
    parts = [_HEAD]
    for name in registry.GROUPS:
        for _, hooks in groupby(registry.group(name), key=_facts):
            parts.append(_section(name, list(hooks)))
    return "\n".join(parts)


def _facts(hook: Hook) -> tuple[str, ...]:
    return hook.feature, hook.breaks_without, hook.remove_when, hook.leave_out


def _section(group: str, hooks: Sequence[Hook]) -> str:
    """Return the section of neighbours in a group that are for the same feature."""
    feature, breaks_without, remove_when, leave_out = _facts(hooks[0])
    rows = [
        f"## {feature} (group `{group}`)\n",
        f"- without it: {breaks_without}",
        f"- can go when {remove_when}",
        f"- to run without it, leave out {leave_out}\n",
    ]
    facts = [
        (hook.kind, f"`{hook.target.removeprefix('vllm.')}`", hook.why, ", ".join(hook.versions) or "any")
        for hook in hooks
    ]
    return "\n".join([*rows, Table(["", "of `vllm.`", "why", "verified with vLLM"], facts).markdown()])
