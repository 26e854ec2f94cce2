"""The issue on vLLM's main branch: opened once, rewritten while something differs, closed when nothing does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import nightly_issue

DIFFERENCE = """\
3c3
< vllm.a:f  1111
---
> vllm.a:f  2222
7,8c7,8
< vllm.a:g  3333
< vllm.b:C.h  4444+x
---
> vllm.a:g  absent: vllm.a has no g
> vllm.b:C.h  5555
"""
LINES = [
    "- `vllm.a:f`: changed (1111 -> 2222)",
    "- `vllm.a:g`: gone (3333 -> absent: vllm.a has no g)",
    "- `vllm.b:C.h`: changed (4444+x -> 5555)",
]


class Forge:
    """What `gh` would do to a project's issues."""

    def __init__(self, *open_issues: int) -> None:
        self.open = list(open_issues)
        self.calls: list[tuple[str, ...]] = []
        self.text = ""

    def __call__(self, *arguments: str, text: str | None = None) -> str:
        self.calls.append(arguments)
        self.text = text or self.text
        return json.dumps([{"number": number} for number in self.open]) if arguments[1] == "list" else ""

    def done(self) -> list[str]:
        return [" ".join(call[:2]) for call in self.calls]


def test_each_function_that_differs_has_a_line() -> None:
    assert nightly_issue.changed(DIFFERENCE) == LINES
    assert nightly_issue.changed("") == []


@pytest.mark.parametrize(
    ("open_issues", "lines", "done"),
    [
        ((), LINES, ["issue list", "label create", "issue create"]),
        ((7,), LINES, ["issue list", "issue edit"]),
        ((7,), [], ["issue list", "issue close"]),
        ((), [], ["issue list"]),
    ],
    ids=["opened", "rewritten", "closed", "nothing"],
)
def test_there_is_one_issue_while_something_differs(
    open_issues: tuple[int, ...], lines: list[str], done: list[str]
) -> None:
    forge = Forge(*open_issues)
    nightly_issue.keep(lines, "abc", forge)
    assert forge.done() == done
    if lines:
        assert all(line in forge.text for line in lines)
