"""The command's table of subcommands."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from vllm_ext.cli import command
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


@pytest.mark.parametrize("arguments", [["options"], ["repro", "--list"]], ids=" ".join)
def test_output_that_nobody_reads_ends_the_command_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run_into(writer, arguments) == (141, "")


def test_output_that_does_not_fit_is_one_line() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    assert run_into(full, ["options"]) == (3, "vllm-ext: [Errno 28] No space left on device\n")


def run_into(descriptor: int, arguments: list[str]) -> tuple[int, str]:
    """Run the command with its standard output there; return its status and what it said."""
    run = [sys.executable, "-m", "vllm_ext.cli.main", *arguments]
    with os.fdopen(descriptor) as file:
        ended = subprocess.run(run, stdout=file, stderr=subprocess.PIPE, text=True, check=False, timeout=HANG_S)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("arguments", [[], ["docter"]], ids=["none", "unknown"])
def test_missing_or_unknown_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("json.gone", "the json that is installed has no json.gone: install another version"),
        ("no_such_package", "needs no_such_package, which is not installed: "),
        ("no_such_package.part", "needs no_such_package, which is not installed: "),
    ],
)
def test_what_is_not_installed_is_told_from_what_another_version_has(module: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    missing = ModuleNotFoundError(str(caught.value), name=module)
    assert command.told(missing).startswith(said)
