"""Front end, process and a fake predictor together, on a clock of the test's: nothing is lost but predictions."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.predictor import client
from vllm_ext.predictor.client import PredictionClient
from vllm_ext.predictor.messages import Answer
from vllm_ext.predictor.process import PredictorProcess

from .fake_predictors import ODD
from .parts import LIMIT_S, QUANTILES, Clock, Recorder, alive, child_environment, make_config, noted, prompt, until


class Served:
    """A client that owns a real process. Its clock stands still unless told to go on."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder / "kept"
        self.clock, self.metrics = Clock(), Recorder()
        self.config, self.path = make_config(**config), folder / "p" / "s"
        self.process = PredictorProcess(self.config, self.folder, self.path)
        self.service = self.client(self.process)
        self.answers: list[Answer] = []
        self.asked = 0

    def client(self, process: PredictorProcess | None) -> PredictionClient:
        metrics: Any = self.metrics
        return PredictionClient(self.config, self.path, process, metrics, self.clock)

    def poll(self) -> bool:
        """Poll, and see to the process though the clock stands still; returns whether the predictor is ready."""
        self.service._next_tend_s = self.service._next_ping_s = 0.0
        self.answers += self.service.poll()
        return self.service.ready

    def ready(self) -> Served:
        """Wait for the predictor, over the pauses between its starts."""

        def reached() -> bool:
            if self.process.pid is None:
                self.clock.now += 0.1
            return self.poll()

        until(reached, "the predictor")
        return self

    def ask(self, *texts: str) -> list[str]:
        """Returns the ids of the requests."""
        first, self.asked = self.asked, self.asked + len(texts)
        ids = [f"r{number}" for number in range(first, self.asked)]
        for req_id, text in zip(ids, texts, strict=True):
            self.service.ask(req_id, prompt(text))
        self.clock.now += client.GATHER_S
        self.poll()
        return ids

    def settle(self) -> None:
        """Wait until nothing is owed."""
        until(lambda: (self.poll() or True) and not self.service.waiting, "all answers")

    def lose(self) -> None:
        until(lambda: not self.poll(), "its end to be known")

    def learned(self, count: int) -> list[Any]:
        """Wait until so many requests were learned."""
        until(lambda: self.ready() and len(noted(self.folder, "learned")) >= count, f"{count} to be learned")
        return noted(self.folder, "learned")

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@pytest.fixture
def serve(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])
    made = list[Served]()

    def begin(**config: Any) -> Served:
        made.append(Served(short, **config))
        return made[-1]

    yield begin
    for served in made:
        served.process.kill()
        served.service.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_predictions_come_and_what_ended_is_learned_aborted_or_not(serve: Callable[..., Served]) -> None:
    served = serve().ready()
    ids = served.ask("a", "unknown", "c")
    served.settle()
    assert served.answers == [Answer("r0", QUANTILES, "retrieval"), Answer("r2", QUANTILES, "retrieval")]
    assert served.metrics.counted == {"predicted": 2, "unknown": 1}
    served.service.ended(ids[0], 12)
    served.service.ended(ids[1], 3, aborted=True)
    assert served.learned(2) == [["a", 12, False], ["unknown", 3, True]]
    pid = served.pid
    served.service.close()
    until(lambda: not alive(pid), "its end")
    assert noted(served.folder, "closed") == [2]
    assert served.metrics.started == 1


def test_whatever_it_predicts_each_question_has_one_outcome_and_there_is_one_warning(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(batch_size=1).ready()
    served.ask("hello", *ODD, "raise", "unknown", "hello")
    served.settle()
    assert served.metrics.counted == {"predicted": 2, "error": len(ODD) + 1, "unknown": 1}

    until(lambda: (served.poll() or True) and warnings(caplog), "the warning")
    served.ask("raise")
    served.settle()
    assert len(warnings(caplog)) == 1
    assert "raises errors" in warnings(caplog)[0]
    assert served.metrics.started == 1


@pytest.mark.parametrize("how", ["crash", "kill -9"])
def test_one_that_ends_is_started_again_and_predicts(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    served = serve(batch_size=1).ready()
    first = served.ask("a")
    served.settle()
    if how == "crash":
        served.ask("exit", "b")
    else:
        os.kill(served.pid, signal.SIGKILL)
    served.lose()
    assert served.metrics.statuses[-1] is None
    served.ask("while it is gone")
    served.service.ended(first[0], 5)
    served.ready()
    served.ask("again")
    served.settle()
    # It may be gone before the second of two questions is sent, which is then not lost but never asked.
    allowed = [{"lost": 2, "not-ready": 1}, {"lost": 1, "not-ready": 2}] if how == "crash" else [{"not-ready": 1}]
    assert served.metrics.counted in [{"predicted": 2, **counts} for counts in allowed]
    assert served.learned(1) == [["a", 5, False]]
    assert served.metrics.started == 2
    assert len(warnings(caplog)) == 1


def test_what_ended_survives_a_predictor_that_dies_of_it_once(serve: Callable[..., Served]) -> None:
    """What it took along is sent to the next one, once: what kills each that learns it must not kill all."""
    served = serve().ready()
    for req_id, text in zip(served.ask("learn exits", "a"), ("learn exits", "a"), strict=True):
        served.service.ended(req_id, len(text))
    for _ in range(2):
        served.lose()
        served.ready()
    (last,) = served.ask("b")
    served.service.ended(last, 3)
    assert served.learned(1) == [["b", 3, False]]
    assert served.metrics.drops["finished"] == 2
    assert served.metrics.started == 3


@pytest.mark.parametrize("how", ["hang in predict", "SIGSTOP"])
def test_one_that_is_silent_is_killed_after_its_time_and_started_again(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    served = serve(batch_size=1).ready()
    hanging = served.pid
    if how == "SIGSTOP":
        os.kill(hanging, signal.SIGSTOP)
        ids = served.ask(*["x" * 10_000] * 100)  # more than the socket takes
    else:
        ids = served.ask("hang", "b")
        until(lambda: noted(served.folder, "asked"), "it to hang")
    served.service.ended(ids[0], 4)
    served.poll()  # a ping
    served.clock.now += LIMIT_S + 1
    served.lose()
    served.ready()
    assert not alive(hanging)
    served.ask("c")
    served.settle()
    assert served.metrics.counted == {"late": 1, "timeout": len(ids) - 1, "predicted": 1}
    assert served.learned(1)[0][1:] == [4, False], "it waited for the next predictor"
    assert len(warnings(caplog)) == 1
    assert "has not answered for 35 s" in warnings(caplog)[0]


def test_one_that_hangs_while_it_learns_is_killed_though_it_predicts(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve().ready()
    monkeypatch.setattr(client, "BUSY_S", 0.3)
    hanging = served.pid
    (req_id,) = served.ask("learn hangs")
    served.settle()
    served.service.ended(req_id, 3)

    def dead() -> bool:
        served.ask("b")
        served.settle()
        return not alive(hanging)

    until(dead, "it to be killed")
    assert any("has been at learning for 0.3 s" in text for text in warnings(caplog))
    assert served.metrics.outcomes["predicted"] >= 2


def test_one_that_cannot_start_is_told_once_and_not_tried_again(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(factory="fake_predictors:missing_package")

    until(lambda: (served.poll() or True) and served.process.given_up, "it to be given up")
    for _ in range(10):
        served.ask("b")
        served.clock.now += 100
        served.poll()
    assert served.metrics.started == 1
    (warning,) = warnings(caplog)
    assert "the length predictor" in warning
    assert served.metrics.counted == {"not-ready": 10}


def test_one_that_crashes_over_every_prompt_is_started_less_and_less_often(serve: Callable[..., Served]) -> None:
    """It is ready each time, which was once enough for the next start to follow after a second."""
    served, pauses = serve().ready(), list[float]()
    for _ in range(3):
        served.ask("exit")
        served.lose()
        until(lambda: served.poll() or served.process.pid is None, "its end")
        pause = 0.0
        while served.process.pid is None:
            served.clock.now += 0.1
            pause += 0.1
            served.poll()
        pauses.append(pause)
        served.ready()
    assert served.metrics.counted == {"lost": 3}
    assert pauses == pytest.approx([1, 2, 4], abs=0.3)


def test_several_clients_share_one_predictor(serve: Callable[..., Served]) -> None:
    served = serve().ready()
    other = served.client(None)

    def connected() -> bool:
        other._next_tend_s = other._next_ping_s = 0.0
        other.poll()
        return other.ready

    until(connected, "the other one's connection")
    other.ask("o", prompt("of the other"))
    served.ask("a")
    other.poll()
    served.settle()
    until(lambda: [answer.req_id for answer in other.poll()] == ["o"], "its answer")
    other.ended("o", 8)
    assert served.learned(1) == [["of the other", 8, False]]
    other.close()
    served.ask("b")
    served.settle()
    assert served.metrics.counted == {"predicted": 3}
    assert served.metrics.started == 1
