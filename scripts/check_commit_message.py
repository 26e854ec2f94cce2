#!/usr/bin/env python3
"""Refuse a commit whose message does not say what it does and why: a commit-msg hook of pre-commit.

area: imperative, at most 72 characters

Why, in the body.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST = 72
"""Characters of the first line."""
_SUBJECT = re.compile(r"(?P<area>[\w./*, -]+): (?P<verb>[a-z]+)\b.*[^.]$")
_NO_IMPERATIVE = re.compile(r".*(ed|ing)$")
_IMPERATIVE = {"bring", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "string", "succeed"}
_OF_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")


def problem(message: str) -> str | None:
    """Return what is wrong with a message in one line; None if nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(_OF_GIT):
        return None
    if len(subject) > MOST:
        return f"first line has {len(subject)} characters: at most {MOST}"
    said = _SUBJECT.match(subject)
    if said is None:
        return f"first line={subject!r}: must be 'area: imperative', without a full stop"
    verb = said["verb"]
    if _NO_IMPERATIVE.match(verb) and verb not in _IMPERATIVE:
        return f"verb={verb!r}: must be an imperative, such as 'add' or 'mend'"
    if len(lines) > 1 and lines[1].strip():
        return "second line: must be empty"
    if not any(line.strip() for line in lines[2:]):
        return "body: must say why"
    return None


def main(arguments: list[str]) -> int:
    """Check the file that git hands over."""
    found = problem(Path(arguments[0]).read_text(encoding="utf-8"))
    if found is not None:
        print(f"commit message: {found} (see CONTRIBUTING.md)", file=sys.stderr)
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
