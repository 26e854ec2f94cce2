"""The command's table of subcommands."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from vllm_ext.cli.main import COMMANDS, main, module_of


@pytest.mark.parametrize("name", COMMANDS)
def test_target_of_each_command_exists(name: str) -> None:
    """Read from the source: importing them all would import vLLM."""
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert [name for name, text in COMMANDS.items() if f"{name} " in shown and text in shown] == [*COMMANDS]


def test_arguments_after_the_name_belong_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--help"])
    assert stopped.value.code == 0
    assert "usage: vllm-ext doctor" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["docter"]], ids=["none", "unknown"])
def test_missing_or_unknown_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
