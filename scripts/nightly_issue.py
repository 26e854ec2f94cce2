#!/usr/bin/env python3
"""Keep one issue of what vLLM's main branch changed of what we hook into: open it, rewrite it, close it.

    python scripts/nightly_issue.py CHANGED CHECKOUT

CHANGED is a difference of two outputs of ``python -m vllm_ext.hooks --all``, CHECKOUT a clone of vLLM. It calls
GitHub's ``gh``, with whatever token that has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

LABEL = "vllm-main"
TITLE = "vLLM's main branch changed functions that we hook into"
Run = Callable[..., str]


def gh(*arguments: str, text: str | None = None) -> str:
    """Run GitHub's command and return what it prints."""
    return subprocess.run(["gh", *arguments], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def changed(difference: str) -> list[str]:
    """Return a line for each function that differs, from the output of ``diff``."""
    sides: dict[str, dict[str, str]] = {"<": {}, ">": {}}
    for line in difference.splitlines():
        if line[:2] in ("< ", "> "):
            target, _, found = line[2:].partition("  ")
            sides[line[0]][target] = found
    told = []
    for target in sorted({**sides["<"], **sides[">"]}):
        before, after = (sides[side].get(target, "not listed") for side in "<>")
        told.append(f"- `{target}`: {'gone' if after.startswith('absent') else 'changed'} ({before} -> {after})")
    return told


def body(lines: Sequence[str], commit: str) -> str:
    """Return the text of the issue."""
    return "\n".join(
        [
            f"Compared with vLLM's main branch at {commit}. What is listed here will make features refuse to start "
            "with the next release, until it is read: docs/new-vllm.md.",
            "",
            *lines,
            "",
        ]
    )


def keep(lines: Sequence[str], commit: str, run: Run = gh) -> str:
    """Open, rewrite or close the issue; return what was done."""
    listed = json.loads(run("issue", "list", "--label", LABEL, "--state", "open", "--json", "number"))
    number = str(listed[0]["number"]) if listed else None
    if not lines:
        if number is None:
            return "nothing differs"
        run("issue", "close", number, "--comment", f"Nothing differs any more, at {commit}.")
        return f"closed #{number}"
    if number is None:
        run("label", "create", LABEL, "--force")
        run("issue", "create", "--title", TITLE, "--label", LABEL, "--body-file", "-", text=body(lines, commit))
        return "opened an issue"
    run("issue", "edit", number, "--body-file", "-", text=body(lines, commit))
    return f"rewrote #{number}"


def main(argv: Sequence[str]) -> int:
    """Read both arguments and keep the issue."""
    parser = argparse.ArgumentParser(description="Keep one issue of what vLLM's main branch changed.")
    parser.add_argument("changed", type=Path)
    parser.add_argument("checkout", type=Path)
    args = parser.parse_args(argv)
    commit = subprocess.run(
        ["git", "-C", str(args.checkout), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(keep(changed(args.changed.read_text(encoding="utf-8")), commit))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
