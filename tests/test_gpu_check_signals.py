"""The check of a machine with a GPU is told to end: nothing goes on, nothing is left, and what it had found is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from tests.support.processes import is_gone, until

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

HANGS = f"""
import json, os, subprocess, sys, time
out = sys.argv[1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({HANG_S})"])
with open(out + ".new", "w") as file:
    json.dump([os.getpid(), child.pid], file)
os.replace(out + ".new", out)
time.sleep({HANG_S})
"""
CHECK = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import gpu_check
from gpu_parts import Command, Part, Share

def command(name, text, **options):
    share = Share(least_s=0.0, most_s={HANG_S}.0)
    return Command(name=name, arguments=("-c", text, "{{out}}"), needs="", share=share, **options)

gpu_check.PARTS = (
    Part(name="first", commands=(
        command("done", "print('{{}}')"), command("behind", {HANGS!r}, background=True),
    )),
    Part(name="second", commands=(
        command("one", {HANGS!r}, at_once=True), command("other", {HANGS!r}, at_once=True), command("after", "1 / 0"),
    )),
    Part(name="third", commands=(command("never", "1 / 0"),)),
)
gpu_check.asked = lambda *_: ({{"gpu": "fake"}}, frozenset())
gpu_check.environment = lambda *_: {{"VLLM_EXT_COMMIT": "abc"}}
sys.exit(gpu_check.main())
"""
ASKS = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import gpu_check
gpu_check.environment = lambda *_: {{"VLLM_EXT_COMMIT": "abc", "PYTHONPATH": sys.argv[-1]}}
sys.exit(gpu_check.main(sys.argv[1:-1]))
"""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


def started(tmp_path: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    """A check whose temporary files lie in ``temporary``."""
    (tmp_path / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", text, "--out", str(tmp_path / "out"), "--total-s", str(2 * HANG_S), *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    process.send_signal(number)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 3
    return said


@SIGNALS
def test_all_that_runs_is_ended_and_noted(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path, CHECK)
    marks = [f"gpu-check-*/{name}.json" for name in ("first/behind", "second/one", "second/other")]
    until(lambda: all([*(tmp_path / "temporary").glob(mark)] for mark in marks))
    pids = [json.loads(next((tmp_path / "temporary").glob(mark)).read_text()) for mark in marks]
    said = end(process, number)
    assert f"gpu-check: interrupted by {number.name}" in said
    assert "Traceback" not in said
    for pid in (pid for pair in pids for pid in pair):
        until(lambda pid=pid: is_gone(pid))
    assert list((tmp_path / "temporary").iterdir()) == []
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["parts"]
    assert {part: {name: one["outcome"] for name, one in runs.items()} for part, runs in summary.items()} == {
        "first": {"done": "done", "behind": "interrupted"},
        "second": {"one": "interrupted", "other": "interrupted", "after": "not begun"},
        "third": {"never": "not begun"},
    }
    second = json.loads((tmp_path / "out" / "second.json").read_text())["runs"]
    assert [second[name]["result"] for name in ("one", "other")] == pids[1:]


@SIGNALS
def test_during_the_set_up_it_is_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """PyTorch takes its time to import."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()))\n"
        f"os.replace({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep({HANG_S})"
    )
    process = started(tmp_path, ASKS, str(tmp_path))
    until((tmp_path / "pid").exists)
    assert end(process, number) == f"gpu-check: interrupted by {number.name} before anything was run\n"
    until(lambda: is_gone(int((tmp_path / "pid").read_text())))
    assert list((tmp_path / "temporary").iterdir()) == []
