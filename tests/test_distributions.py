"""The package without the rooms of the laboratory: a server, and the commands for it, work all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import rooms  # noqa: E402

from vllm_ext.cli.command import LAB  # noqa: E402
from vllm_ext.cli.main import COMMANDS  # noqa: E402

LATE = {
    "": "the function `simulated`, when it is asked for",
    "plugin": "benchmark modes, by an environment variable",
    "cluster.ray_pool": "a pool for sweeps",
}
"""Modules of a server's rooms that import one of the laboratory's, and what for."""
FOR_SERVERS = {
    "cluster", "doctor", "new-policy", "options", "patches", "predictor", "profile", "tiny-model", "top",
}  # fmt: skip
"""Commands that need nothing of the laboratory."""
BEGIN = {"quality": ["tiny"], "repro": ["--list"], "validate": ["x.jsonl"]}
"""Commands that show their help without it, and arguments with which they would begin."""
_WITHOUT = f"""
import importlib, io, sys
from contextlib import redirect_stderr, redirect_stdout

LAB = {sorted(LAB)}


class Left:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("vllm_ext.") and name.split(".")[1] in LAB:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Left())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[2] in LAB else find(name, *more)
"""


def without_lab(code: str) -> str:
    """Run code where the laboratory is not installed."""
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT + code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_rooms_for_servers_import_nothing_of_the_laboratory() -> None:
    found = {
        name
        for name, targets in rooms.imports().items()
        if rooms.room_of(name) not in {*LAB, "cli"} and LAB & {*map(rooms.room_of, targets)}
    }
    assert found == LATE.keys()


def test_the_hooks_can_be_installed_without_it() -> None:
    said = without_lab("""
from vllm_ext.hooks import registry
from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.kv.connector import tiered
for name in registry.GROUPS:
    print(name, len(registry.group(name)))
registry.install("base")()
""")
    from vllm_ext.hooks import registry

    assert [line for line in said.splitlines() if len(line.split()) == 2][-len(registry.GROUPS) :] == [
        f"{name} {len(registry.group(name))}" for name in registry.GROUPS
    ]


def test_commands_work_or_say_what_is_missing_in_one_line() -> None:
    begin = [[name, *arguments] for name, arguments in BEGIN.items()]
    said = without_lab(
        f"BEGIN = {begin}"
        + """
from vllm_ext.cli.main import COMMANDS, main
for name, *arguments in [*([name, "--help"] for name in COMMANDS), *BEGIN]:
    shown, told = io.StringIO(), io.StringIO()
    with redirect_stdout(shown), redirect_stderr(told):
        try:
            status = main([name, *arguments])
        except SystemExit as left:
            status = left.code
    print(name, *arguments, status or 0, bool(shown.getvalue()), told.getvalue().strip().replace("\\n", "//"), sep="|")
"""
    )
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 4]
    works = {name for name, first, status, shown, _ in rows if (first, status, shown) == ("--help", "0", "True")}
    assert works == FOR_SERVERS | BEGIN.keys()
    refused = [(name, status, told) for name, first, status, _, told in rows if first != "--help" or name not in works]
    assert {name for name, *_ in refused} == COMMANDS.keys() - FOR_SERVERS
    for name, status, told in refused:
        assert status == "3", (name, told)
        assert told.startswith(f"vllm-ext {name}: needs vllm_ext.")
        assert told.endswith("which is not installed: pip install 'vllm-ext[lab]'")
        assert "//" not in told


@pytest.mark.parametrize("name", sorted(LAB))
def test_a_room_of_the_laboratory_is_one(name: str) -> None:
    assert any(rooms.room_of(module) == name for module in rooms.modules())
