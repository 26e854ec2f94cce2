"""Which messages of commits the hook lets pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_commit_message as hook

WHY = "\n\nA reader wants to know why.\n"


@pytest.mark.parametrize(
    "message",
    [
        "kv: bound copies by bytes" + WHY,
        "scheduling, kv: seed the queue" + WHY,
        "# a comment of git's\nkv/cuda: bound copies" + WHY + "# more\n",
        "Merge branch 'x'",
        "fixup! kv: bound copies",
    ],
)
def test_message_that_says_what_and_why_passes(message: str, tmp_path: Path) -> None:
    (tmp_path / "message").write_text(message, encoding="utf-8")
    assert hook.problem(message) is None
    assert hook.main([str(tmp_path / "message")]) == 0


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "must be 'area: imperative'"),
        ("Copies are bounded" + WHY, "must be 'area: imperative'"),
        ("kv: bound copies." + WHY, "without a full stop"),
        ("kv: bounded copies" + WHY, "verb='bounded'"),
        ("kv: bounding copies" + WHY, "verb='bounding'"),
        ("kv: " + "b" * 80 + WHY, "first line has 84 characters: at most 72"),
        ("kv: bound copies\nby bytes" + WHY, "second line: must be empty"),
        ("kv: bound copies\n\n# only a comment\n", "body: must say why"),
    ],
)
def test_other_message_is_refused_in_one_line(
    message: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "message").write_text(message, encoding="utf-8")
    assert hook.main([str(tmp_path / "message")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
