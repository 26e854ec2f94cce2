"""The check of a machine with a GPU: limits, what is kept of commands that fail, and the report."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.extent import HANG_S

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_check")


def command(gpu_check: ModuleType, name: str, text: str, **options: Any) -> Any:
    """A command that runs some Python, in which ``out`` is the file that it may write."""
    arguments = ("-c", f"import json, sys, time; out = sys.argv[1]; folder = sys.argv[2]\n{text}", "{out}", "{folder}")
    return gpu_check.Command(name=name, arguments=arguments, needs=options.pop("needs", ""), **options)


def write(value: object) -> str:
    return f"open(out, 'w').write(json.dumps({value!r}))"


@pytest.fixture
def run(gpu_check: ModuleType, tmp_path: Path) -> Any:
    """Runs parts of commands; returns the check, with the folder of its files."""

    def checked(*parts: Any, total_s: float = 600.0) -> Any:
        scratch, out = tmp_path / "scratch", tmp_path / "out"
        scratch.mkdir()
        out.mkdir()
        runner = gpu_check.Runner(environment={}, modules=frozenset(), scratch=scratch, dry=False)
        check = gpu_check.Check(runner=runner, out=out, about={"commit": "abc"}, total_s=total_s)
        check.run(parts)
        return check

    return checked


def test_each_part_makes_a_file_and_the_summary_says_what_became_of_it(gpu_check: ModuleType, run: Any) -> None:
    part = gpu_check.Part(
        name="one",
        limit_s=600.0,
        commands=(
            command(gpu_check, "writes", write({"ms": 3})),
            command(gpu_check, "prints", "print('noise'); print(json.dumps([1, 2]))", at_once=True),
            command(gpu_check, "fails", "print('why', file=sys.stderr); sys.exit(2)"),
        ),
    )
    check = run(part)
    found = json.loads((check.out / "one.json").read_text())
    assert found["commit"] == "abc"
    assert found["runs"]["writes"]["result"] == {"ms": 3}
    assert found["runs"]["prints"]["result"] == [1, 2]
    assert (found["runs"]["fails"]["status"], found["runs"]["fails"]["tail"]) == (2, "why")
    summary = json.loads((check.out / "summary.json").read_text())
    assert summary["parts"]["one"]["writes"]["status"] == 0
    assert check.status() == gpu_check.FAILED


def test_a_command_beyond_its_limit_is_ended_with_its_children_and_what_it_wrote_is_kept(
    gpu_check: ModuleType, tmp_path: Path
) -> None:
    child = f"[sys.executable, '-c', 'import time; time.sleep({HANG_S})']"
    text = f"""
import os, subprocess
pid = subprocess.Popen({child}).pid
open(out + ".new", "w").write(json.dumps(pid))
os.replace(out + ".new", out)
time.sleep({HANG_S})"""
    hangs = command(gpu_check, "hangs", text)
    part = gpu_check.Part(name="slow", limit_s=600.0, commands=(hangs,))
    runner = gpu_check.Runner(environment={}, modules=frozenset(), scratch=tmp_path, dry=False)
    process, began = runner.start(part, hangs)
    while not (tmp_path / "slow" / "hangs.json").exists():
        time.sleep(0.01)
    found = runner.ended(part, hangs, process, began, limit_s=0.0)
    assert found["status"] == -signal.SIGKILL
    status = Path(f"/proc/{found['result']}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_parts_for_which_no_time_is_left_are_named(gpu_check: ModuleType, run: Any) -> None:
    part = gpu_check.Part(name="late", limit_s=600.0, commands=(command(gpu_check, "never", write(1)),))
    check = run(part, total_s=1.0)
    assert check.found["late"] == {"never": {"left out": "no time is left"}}
    assert check.status() == gpu_check.FAILED


def test_what_goes_on_in_the_background_sees_its_parts_files_and_is_waited_for(gpu_check: ModuleType, run: Any) -> None:
    reads = f"time.sleep(0.2); {write(1)}; open(out, 'w').write(open(folder + '/first.json').read())"
    part = gpu_check.Part(
        name="both",
        limit_s=600.0,
        commands=(command(gpu_check, "first", write(7)), command(gpu_check, "behind", reads, background=True)),
    )
    other = gpu_check.Part(name="other", limit_s=600.0, commands=(command(gpu_check, "runs", write(1)),))
    check = run(part, other)
    assert list(check.found) == ["both", "other"]
    assert json.loads((check.out / "both.json").read_text())["runs"]["behind"]["result"] == 7
    assert check.status() == gpu_check.DONE


def test_wrong_results_and_failures_have_statuses_of_their_own(gpu_check: ModuleType, run: Any) -> None:
    part = gpu_check.Part(name="one", limit_s=600.0, commands=(command(gpu_check, "wrong", "sys.exit(1)"),))
    assert run(part).status() == gpu_check.WRONG


def test_what_needs_a_module_that_is_not_there_is_left_out(gpu_check: ModuleType, run: Any) -> None:
    part = gpu_check.Part(name="one", limit_s=600.0, commands=(command(gpu_check, "engine", "1/0", needs="vllm"),))
    check = run(part)
    assert "bring the bundle" in check.found["one"]["engine"]["left out"]
    assert check.status() == gpu_check.FAILED


def test_all_results_are_at_most_eight_files(gpu_check: ModuleType) -> None:
    """As many as come back from some machines: one for each part, the profile and the summary."""
    assert len(gpu_check.PARTS) + 2 <= 8
    assert sum(part.limit_s for part in gpu_check.PARTS[:4]) <= 480


def test_scripts_of_all_commands_exist(gpu_check: ModuleType) -> None:
    for part in gpu_check.PARTS:
        for one in part.commands:
            named = [argument for argument in one.arguments if argument.endswith(".py")]
            assert named
            assert all((gpu_check.ROOT / path).is_file() for path in named), one


def test_a_commit_that_is_given_goes_before_the_repositorys(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_COMMIT", "1234abcd")
    assert gpu_check.commit() == "1234abcd"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "nonsense", "--dry-run"], "--parts=nonsense: nonsense unknown, must be of right, token_budget"),
        ([], "--out=: must be the folder of the results"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("OUT", "BUNDLE")}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=variables)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_a_try_imports_everything_and_understands_all_arguments(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(list(tmp_path.glob("*.json"))) == len(summary["parts"]) + 1
    assert all(one["status"] == 0 for runs in summary["parts"].values() for one in runs.values())
