"""`ServerProcess` on programs that misbehave; `tests/cli/test_demo.py` runs it on a real `vllm serve`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.extent import HANG_S
from vllm_ext.demo.server import ServerError, ServerProcess, free_port, group_members

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child", os.fork(), flush=True)
time.sleep(600)
"""
"""Two processes that never answer and ignore SIGTERM."""


class Program(ServerProcess):
    """Runs a Python program in the place of `vllm serve`."""

    def __init__(self, program: str, log_path: Path, *, startup_timeout_s: float = HANG_S) -> None:
        super().__init__("model", log_path=log_path, startup_timeout_s=startup_timeout_s, stop_grace_s=0.5)
        self.program = program

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


def test_server_that_never_answers_is_given_up_and_killed_with_its_children(tmp_path: Path) -> None:
    groups: list[int] = []
    server = Program(STUBBORN, tmp_path / "log")

    def lose_patience(waited_s: float) -> None:
        groups.append(server.pid)
        if (tmp_path / "log").read_text().count("child") == 2:
            server._startup_timeout_s = 0.5

    server.on_progress = lose_patience
    with pytest.raises(ServerError, match=r"did not answer within 0\.5 s"):
        server.start()
    assert (tmp_path / "log").read_text().count("child") == 2
    assert group_members(groups[0]) == []
    assert not server.is_running()


def test_interruption_of_the_start_stops_the_server(tmp_path: Path) -> None:
    groups: list[int] = []
    server = Program(STUBBORN, tmp_path / "log")

    def interrupt(waited_s: float) -> None:
        groups.append(server.pid)
        raise KeyboardInterrupt

    server.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert group_members(groups[0]) == []


def test_interruption_while_the_process_is_being_started_stops_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a signal used to raise before the new process was known: nobody stopped that."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    popen = subprocess.Popen
    server = Program(STUBBORN, tmp_path / "log")
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert group_members(started[0].pid) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_server_that_exits_is_reported_with_its_code_and_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"exited with code 1 .*\n.*no such thing"):
        Program("exit('no such thing')", tmp_path / "log").start()


def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    server = ServerProcess("model", log_path=tmp_path / "log")
    server.stop()
    assert not server.is_running()
    with pytest.raises(ServerError, match="not started"):
        _ = server.pid


def test_command_is_the_plain_vllm_of_this_environment(tmp_path: Path) -> None:
    server = ServerProcess("model", ["--seed", "3"], log_path=tmp_path / "log", port=12345)
    assert server.base_url == "http://127.0.0.1:12345"
    assert server.command[-7:] == ["model", "--host", "127.0.0.1", "--port", "12345", "--seed", "3"]
    assert server.command[-8] == "serve"


def test_free_ports_are_not_always_the_same() -> None:
    assert len({free_port() for _ in range(5)}) > 1


def test_group_members_leaves_out_processes_that_have_ended() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert group_members(process.pid) == [process.pid]
        process.kill()
        deadline = time.monotonic() + HANG_S
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.returncode is None, "nobody has waited for it yet"
        assert group_members(process.pid) == []
    finally:
        process.kill()
        process.wait()
