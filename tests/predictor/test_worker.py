"""The predictor's process on its own: it answers, learns, survives what it is told, and ends when it is to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from vllm_ext.predictor.messages import Answer, Ask
from vllm_ext.predictor.process import CANNOT_START, TAKEN

from .parts import QUANTILES, alive, child_environment, noted, prompt, until
from .worker_parts import FrontEnd, WorkerProcess, worker_command

Start = Callable[..., WorkerProcess]


def test_questions_are_answered_and_what_ended_is_learned_and_judged(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    front.ask("a")
    front.ask("b", "unknown")
    assert front.answer_to("a") == Answer("a", QUANTILES, "retrieval")
    assert front.answer_to("b") == Answer("b", source="unknown")
    front.end(1, predicted=7)
    front.end(2, predicted=7)
    front.end(9)
    until(lambda: front.status().taken == 9, "it to be learned")
    status = front.status()
    assert (status.learned, status.entries, status.examples, status.errors) == (3, 3, 11, 0)
    assert (status.judged, status.coverage) == (2, 1.0)
    assert [entry[1] for entry in worker.noted("learned")] == [1, 2, 9]


def test_front_ends_share_it_and_hear_of_their_own_questions_alone(start: Start) -> None:
    worker = start()
    one, other = worker.connect().ready(), worker.connect().ready()
    one.ask("same name")
    other.ask("same name", "unknown")
    one.end(5)
    assert one.answer_to("same name").source == "retrieval"
    assert other.answer_to("same name").source == "unknown"
    until(lambda: one.status().taken == 5, "it to be learned")
    assert (other.status().taken, other.status().learned) == (0, 1)
    other.close()
    one.ask("next")
    assert one.answer_to("next").source == "retrieval"


def test_questions_that_come_together_are_predicted_together(start: Start) -> None:
    worker = start(factory="fake_predictors:SlowStart", batch_size=4)
    front = worker.connect()
    for name in "abcdef":
        front.ask(name, name)
    assert not front.status().ready
    assert front.status().waiting == 6
    (worker.folder / "kept" / "go").touch()
    front.answer_to("f")
    assert worker.noted("asked") == [["a", "b", "c", "d"], ["e", "f"]]


def test_what_has_no_room_is_told_so_while_the_model_is_loaded(start: Start) -> None:
    worker = start(factory="fake_predictors:HangingStart", queue_limit=1)
    front = worker.connect()
    front.send(Ask("a", prompt()), Ask("b", prompt()))
    assert front.answer_to("b").source == "overload"
    assert front.status().busy_s > 0


def test_malformed_messages_are_counted_and_nothing_else(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    front.send(b"", b"garbage", Answer("a", QUANTILES, "an answer is no question"))
    front.socket.send_multipart([b"two", b"parts"])
    front.ask("a")
    assert front.answer_to("a").source == "retrieval"
    assert front.status().errors == 3
    assert worker.log.count("failed in reading a message") == 1


@pytest.mark.parametrize(("text", "status"), [("exit", 3), ("kill", -9), ("sys.exit", 4)])
def test_a_predictor_may_take_its_process_along(start: Start, text: str, status: int) -> None:
    worker = start()
    worker.connect().ready().ask("a", text)
    assert worker.ended() == status


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_is_obeyed_after_the_last_words_were_learned(start: Start, number: signal.Signals) -> None:
    worker = start(patch="learner.EVERY_S = 3600; worker._LAST_WORDS_MS = 2000")
    front = worker.connect().ready()
    worker.process.send_signal(signal.SIGSTOP)
    for count in range(1, 101):
        front.end(count)
    worker.process.send_signal(number)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.ended() == 0
    assert worker.noted("closed") == [100]
    assert not worker.socket.parent.exists()


def test_ctrl_c_does_not_end_it_before_the_front_end(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    for i in range(3):
        worker.process.send_signal(signal.SIGINT)
        front.ask(f"r{i}")
        front.answer_to(f"r{i}")
    assert worker.terminate() == 0


def test_it_ends_while_its_model_is_still_loaded(start: Start) -> None:
    """A download that hangs once kept it for ever."""
    worker = start(factory="fake_predictors:HangingStart", patch="worker._LAST_S = 0.1")
    until(lambda: worker.noted("pid"), "the model to be loaded")
    assert worker.terminate() == 0


def test_what_hangs_does_not_keep_it_from_its_end(start: Start) -> None:
    worker = start(patch="worker._LAST_S = 0.1")
    front = worker.connect().ready()
    front.end(1, "learn hangs")
    for i in range(5):
        front.ask(f"r{i}")
        assert front.answer_to(f"r{i}").source == "retrieval", "predictions go on"
    assert worker.terminate() == 0


def test_a_prediction_that_hangs_does_not_keep_it_from_learning_and_its_end(start: Start) -> None:
    worker = start(batch_size=1, patch="learner.GRACE_S = 0.1")
    front = worker.connect().ready()
    front.end(1)
    front.ask("a", "hang")
    until(lambda: worker.noted("asked"), "it to hang")
    assert worker.terminate() == 1
    assert worker.noted("closed") == [1]


FRONT_END = """
import os, subprocess, sys, time
worker = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if os.fork():
    print(worker.pid, flush=True)
time.sleep(3600)  # a process that was forked from it lives on
"""


@pytest.mark.parametrize("factory", ["Obedient", "HangingStart"])
def test_a_front_end_that_is_killed_takes_it_along(short: Path, factory: str) -> None:
    """Also while the model is loaded, when it was once left behind for ever."""
    command = worker_command(short, factory=f"fake_predictors:{factory}", patch="worker._LAST_S = 0.1")
    front_end = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, *command],
        stdout=subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,
        text=True,
    )
    front = FrontEnd(short / "p" / "s")
    try:
        assert front_end.stdout is not None
        pid = int(front_end.stdout.readline())
        front.status()
        until(lambda: noted(short / "kept", "pid"), "the model to be loaded")
        front.end(1)
        front_end.kill()
        front_end.wait(HANG_S)
        until(lambda: not alive(pid), "its end")
        assert noted(short / "kept", "closed") == ([1] if factory == "Obedient" else [])
        assert not (short / "p").exists()
    finally:
        front.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(front_end.pid, signal.SIGKILL)
        front_end.communicate()


@pytest.mark.parametrize("factory", ["missing_package", "wrong_option", "nobody"])
def test_a_start_that_cannot_succeed_is_told_as_such(start: Start, factory: str) -> None:
    worker = start(factory=f"fake_predictors:{factory}")
    assert worker.ended() == CANNOT_START
    assert worker.log.count("can't start: ") == 1
    assert "Traceback" not in worker.log


def test_a_start_that_fails_for_another_reason_may_be_tried_again(start: Start) -> None:
    worker = start(factory="fake_predictors:CrashingStart")
    assert worker.ended() == 1
    assert "RuntimeError: this time" in worker.log


def test_a_place_where_no_socket_can_be_is_a_reason_to_give_up(start: Start) -> None:
    worker = start(name="n" * 200)
    assert worker.ended() == CANNOT_START
    assert worker.log.count("can't listen") == 1
    assert "Traceback" not in worker.log


def test_others_cannot_enter_where_it_listens(start: Start) -> None:
    worker = start()
    worker.connect().ready()
    assert worker.socket.parent.stat().st_mode & 0o777 == 0o700


def test_neither_side_of_the_service_imports_what_is_heavy() -> None:
    """The scheduler's process may hold a front end, too: the model is loaded in the predictor's process alone."""
    names = ("client", "messages", "process", "chat_messages", "worker")
    program = f"import sys, {', '.join(f'vllm_ext.predictor.{name}' for name in names)}\n"
    program += "print([m for m in ('torch', 'faiss', 'vllm', 'sentence_transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.strip() == "[]"


def test_of_several_for_one_place_the_first_serves_and_the_next_when_it_is_gone(start: Start) -> None:
    first = start(shared=True)
    front = first.connect().ready()
    assert start(shared=True).ended() == TAKEN
    first.process.send_signal(signal.SIGKILL)
    first.ended()
    front.close()
    again = start(shared=True).connect().ready()
    again.ask("a")
    assert again.answer_to("a").source == "retrieval"
