"""How every command is run: its common flags end its help, and what goes wrong is a line and a status."""

from __future__ import annotations

import argparse
from typing import NoReturn

import pytest

from vllm_ext.cli.command import Failed, Parser, UsageError, guarded
from vllm_ext.config.errors import ConfigError
from vllm_ext.report import common_flags


def parser() -> Parser:
    made = Parser(prog="vllm-ext x")
    common_flags.add(made, "seed", quiet="say nothing")
    made.add_argument("--own")
    made.flag_of["width"] = "--own"
    return made


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("two\nlines"), 2, "vllm-ext x: two lines\n"),
        (ConfigError("width", 3, "must be 4", ""), 2, "vllm-ext x: --own: width=3: must be 4\n"),
        (Failed("in\nfull"), 3, "vllm-ext x: in\nfull\n"),
        (ArithmeticError("of work"), 3, "vllm-ext x: of work\n"),
        (KeyboardInterrupt(), 130, "\nvllm-ext x: interrupted; again with 5\n"),
    ],
    ids=["value", "field", "failed", "failure of the work", "Ctrl-C"],
)
def test_error_is_told_with_its_status(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(_: argparse.Namespace) -> NoReturn:
        raise error

    assert guarded(parser(), body, ["--own", "5"], failures=(ArithmeticError,), again="again with {own}") == status
    assert capsys.readouterr().err == said


def test_wrong_usage_stays_so_where_every_value_error_is_a_failure() -> None:
    def body(_: argparse.Namespace) -> NoReturn:
        raise UsageError("--own: must be 1")

    assert guarded(parser(), body, [], failures=(ValueError,)) == 2


def test_common_flags_have_a_group_of_their_own_and_texts_for_the_command() -> None:
    own, common = parser().format_help().split("common flags:")
    assert [line.split()[0] for line in common.splitlines() if line] == ["--quiet", "--seed"]
    assert "say nothing" in common
    assert "--own" in own
