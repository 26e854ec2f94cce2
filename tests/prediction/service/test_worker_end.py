"""How the predictor's process ends: with its front end, however that goes, having saved; and not at Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extent import HANG_S
from vllm_ext.prediction.service.messages import Finished

from .parts import until
from .worker_parts import FrontEnd, WorkerProcess, child_environment, noted, worker_command

Start = Callable[..., WorkerProcess]


def learn(front: FrontEnd) -> None:
    """Let it know of a finished request that is not saved yet."""
    front.ask("a")
    front.answer_to("a")
    front.send(Finished("a", 3))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_is_obeyed_after_saving(start: Start, number: signal.Signals) -> None:
    worker = start()
    front = worker.connect().ready()
    learn(front)
    front.ask("b")
    front.answer_to("b")  # so that it heard of the end of the first
    worker.signal(number)
    assert worker.ended() == 0
    assert worker.noted("saved") == [1]


def test_the_end_of_the_front_end_is_obeyed_after_saving(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    learn(front)
    front.link.close()
    worker.end_input()
    assert worker.ended() == 0
    assert worker.noted("saved") == [1]


def test_ctrl_c_does_not_end_it_before_the_front_end(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    for i in range(3):
        worker.signal(signal.SIGINT)
        front.ask(f"r{i}")
        assert front.answer_to(f"r{i}").source == "retrieval"
    assert worker.process.poll() is None
    worker.end_input()
    assert worker.ended() == 0


@pytest.mark.parametrize("by_signal", [True, False])
def test_it_ends_while_its_model_is_still_loaded(start: Start, by_signal: bool) -> None:
    """A download that hangs once kept it for ever, after everybody had gone."""
    worker = start(factory="fake_predictors:HangingStart")
    worker.connect()
    until(lambda: worker.noted("loading"), "the model to be loaded")
    if by_signal:
        worker.signal(signal.SIGTERM)
    else:
        worker.end_input()
    assert worker.ended() == 0
    assert worker.noted("saved") == []


def test_it_saves_from_time_to_time(start: Start) -> None:
    worker = start(patch="worker._SAVE_S = 0.01")
    front = worker.connect().ready()
    learn(front)
    until(lambda: 1 in worker.noted("saved"), "a save")


FRONT_END = """
import os, subprocess, sys, time
command = sys.argv[2:]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
if sys.argv[1] == "forks" and os.fork() == 0:
    time.sleep(3600)  # as another process of the engine: it has our end of the pipe too
print(worker.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["alone", "forks"])
def test_a_front_end_that_is_killed_takes_it_along(short: Path, how: str) -> None:
    """Also where a process that was forked from the front end lives on, and keeps its standard input open."""
    front_end = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, how, *worker_command(short)],
        stdout=subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,
        text=True,
    )
    try:
        assert front_end.stdout is not None
        pid = int(front_end.stdout.readline())
        learn(FrontEnd(short / "s").ready())
        front_end.kill()
        front_end.wait(HANG_S)
        until(lambda: not _runs(pid), "its end")
        assert noted(short / "kept", "saved") == [1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(front_end.pid, signal.SIGKILL)
        front_end.communicate()


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
