"""Front end, process and a fake predictor together, on a clock of the test's: nothing is lost but predictions."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.prediction.service.client import LateHint, PredictionService
from vllm_ext.prediction.service.process import PredictorProcess

from .fake_predictors import ODD
from .parts import LIMIT_S, Clock, Recorder, make_config, until
from .worker_parts import HERE, noted


class Served:
    """A service that owns a real process. Its clock stands still unless told to go on."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder / "kept"
        self.clock, self.metrics = Clock(), Recorder()
        made = make_config(**config)
        self.process = PredictorProcess(made, self.folder, folder / "s")
        self.service = PredictionService(made, folder / "s", self.process, self.metrics, self.clock)
        self.hints: list[LateHint] = []
        self.asked = 0
        self.paused_s = 0.0
        """Time without a process."""

    def poll(self) -> bool:
        """Returns whether the predictor is ready."""
        self.hints += self.service.poll()
        return self.service.ready

    def ready(self) -> Served:
        """Wait for the predictor, over the pauses between its starts."""

        def reached() -> bool:
            if self.service.link is None:
                self.clock.now += 0.2
                self.paused_s += 0.2 * (self.process.pid is None)
            return self.poll()

        until(reached, "the predictor")
        return self

    def ask(self, *texts: str) -> None:
        for text in texts:
            self.service.ask(f"r{self.asked}", text, 50, "m", 4)
            self.asked += 1

    def settle(self) -> None:
        """Wait until nothing is owed."""
        until(lambda: (self.poll() or True) and not self.service.waiting, "all answers")

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@pytest.fixture
def serve(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made = list[Served]()

    def begin(**config: Any) -> Served:
        made.append(Served(short, **config))
        return made[-1]

    yield begin
    for served in made:
        served.process.kill()
        served.service.close()


def test_predictions_become_hints_and_what_finishes_is_learned(serve: Callable[..., Served]) -> None:
    served = serve().ready()
    served.ask("a", "unknown", "c")
    served.settle()
    assert served.hints == [LateHint("r0", 7, 9, "retrieval"), LateHint("r2", 7, 9, "retrieval")]
    assert served.metrics.counted == {"predicted": 2, "unknown": 1}
    served.service.finished("r0", 12)
    served.service.gone("r1")
    until(lambda: (served.poll() or True) and noted(served.folder, "learned"), "it to be learned")
    assert noted(served.folder, "learned") == [[["a", 50, "m", 4, 12]]]
    served.service.close()
    until(lambda: noted(served.folder, "saved"), "a save")
    assert served.metrics.started == 1


def test_whatever_it_predicts_each_question_has_one_outcome_and_there_is_one_warning(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(batch_size=1).ready()
    texts = ["hello", *ODD, "raise", "unknown", "hello"]
    served.ask(*texts)
    served.settle()
    assert served.metrics.counted == {"predicted": 2, "error": len(ODD) + 1, "unknown": 1}
    assert len(served.hints) == 2
    until(lambda: (served.poll() or True) and warnings(caplog), "the warning")
    served.ask("raise")
    served.settle()
    assert len(warnings(caplog)) == 1
    assert "raises errors" in warnings(caplog)[0]
    assert served.metrics.started == 1


def test_one_that_crashes_is_started_again_and_predicts(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(batch_size=1).ready()
    served.ask("a")
    served.settle()
    served.ask("kill", "b", "c")
    served.settle()
    assert served.metrics.counted == {"predicted": 1, "lost": 3}
    assert served.metrics.statuses[-1] is None
    served.ask("while it is gone")
    served.ready()
    served.ask("again")
    served.settle()
    assert served.metrics.counted == {"predicted": 2, "lost": 3, "not-ready": 1}
    assert served.metrics.started == 2
    assert len(warnings(caplog)) == 1


def test_one_killed_from_outside_is_started_again(serve: Callable[..., Served]) -> None:
    served = serve().ready()
    os.kill(served.pid, signal.SIGKILL)
    until(lambda: not served.poll(), "its end")
    served.ready()
    assert served.metrics.started == 2
    served.ask("a")
    served.settle()
    assert served.metrics.counted == {"predicted": 1}


def test_one_that_hangs_is_killed_after_its_time_and_started_again(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(batch_size=1).ready()
    served.ask("hang", "b")
    hanging = served.pid
    until(lambda: noted(served.folder, "asked"), "it to hang")
    served.service.gone("r0")  # the client has no patience either
    statuses = len(served.metrics.statuses)
    until(lambda: served.poll() and len(served.metrics.statuses) > statuses + 1, "statuses, which it goes on to send")
    served.clock.now += LIMIT_S
    served.poll()
    assert served.pid == hanging
    served.clock.now += 0.1
    served.poll()
    served.ready()
    assert served.pid != hanging
    served.ask("c")
    served.settle()
    assert served.metrics.counted == {"late": 1, "timeout": 1, "predicted": 1}
    assert [hint.req_id for hint in served.hints] == ["r2"]
    assert len(warnings(caplog)) == 1
    assert "has not answered for 35 s" in warnings(caplog)[0]


def test_one_that_is_stopped_whole_is_killed_as_well(serve: Callable[..., Served]) -> None:
    """As by a debugger, or a call that never lets go of the interpreter: not even its event loop runs."""
    served = serve().ready()
    stopped = served.pid
    os.kill(stopped, signal.SIGSTOP)
    served.ask(*["x" * 10_000] * 100)  # more than the socket takes
    for i in range(100):
        served.service.finished(f"r{i}", 3)
    assert served.metrics.counted == {"late": 100}
    served.clock.now += LIMIT_S + 1
    served.poll()
    served.ready()
    assert served.pid != stopped
    served.ask("a")
    served.settle()
    assert served.metrics.counted == {"late": 100, "predicted": 1}


def test_one_that_cannot_start_is_told_once_and_not_tried_again(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(factory="fake_predictors:missing_package")
    served.ask("a")

    def given_up() -> bool:
        served.clock.now += 0.2
        served.poll()
        return served.process.given_up

    until(given_up, "it to be given up")
    for _ in range(10):
        served.ask("b")
        served.clock.now += 100
        served.poll()
    assert served.metrics.started == 1
    (warning,) = warnings(caplog)
    assert "can't start: ModuleNotFoundError: No module named 'sentence_transformers'" in warning
    assert sum(served.metrics.counted.values()) == 11
    assert set(served.metrics.counted) <= {"not-ready", "lost"}


def test_one_that_crashes_over_every_prompt_is_started_less_and_less_often(serve: Callable[..., Served]) -> None:
    """It is ready each time, which was once enough for the next start to follow after a second."""
    served, pauses = serve(), list[float]()
    for _ in range(3):
        before = served.paused_s
        served.ready()
        pauses.append(served.paused_s - before)
        served.ask("exit")
        served.settle()
    assert served.metrics.counted == {"lost": 3}
    assert pauses[1:] == pytest.approx([1, 2], abs=0.4)


def test_a_slow_one_delays_nobody_and_all_its_answers_count(serve: Callable[..., Served]) -> None:
    served = serve(batch_size=1).ready()
    served.ask("slow", "slow", "slow")
    assert served.service.poll() == []
    served.service.finished("r1", 3)
    served.settle()
    assert served.metrics.counted == {"predicted": 2, "late": 1}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
