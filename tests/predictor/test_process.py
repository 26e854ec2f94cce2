"""The owner of the predictor's process: starts it, starts it again after growing pauses, and lets it go."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_ext.config import PredictorConfig
from vllm_ext.predictor import process as process_module
from vllm_ext.predictor.process import (
    CANNOT_START,
    TAKEN,
    PredictorProcess,
    WorkerOptions,
    remove_dead_sockets,
    socket_path,
    take,
)

from .parts import alive, make_config, until

IGNORE = "import signal, time; signal.signal(15, signal.SIG_IGN); "


class Scripted(PredictorProcess):
    """Runs a line of Python instead of a predictor."""

    def __init__(
        self, folder: Path, line: str = "import time; time.sleep(3600)", *, shared: bool = False, **config: Any
    ) -> None:
        super().__init__(make_config(**config), folder, folder / "place" / "s", shared=shared)
        self.line = line

    @property
    def command(self) -> Sequence[str]:
        return [sys.executable, "-S", "-E", "-c", self.line]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Scripted]]:
    """Makes processes that don't outlive the test."""
    processes = list[Scripted]()

    def make(*args: Any, **config: Any) -> Scripted:
        processes.append(Scripted(tmp_path, *args, **config))
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
        process.close()


def gone(process: PredictorProcess, now: float) -> bool:
    """Whether it is known at that time that the process ended."""
    process.ensure(now)
    return process.pid is None


def test_it_is_started_once_and_left_alone_while_it_runs(made: Callable[..., Scripted]) -> None:
    process = made()
    assert (process.pid, process.starts) == (None, 0)
    process.ensure(0.0)
    pid = process.pid
    assert pid is not None
    for now in (0.0, 1.0, 1e6):
        process.ensure(now)
    assert (process.pid, process.starts) == (pid, 1)


def test_pauses_between_starts_grow_to_a_minute_and_are_short_again_after_it_worked(
    made: Callable[..., Scripted],
) -> None:
    process = made("raise SystemExit(3)")
    now, pauses = 0.0, list[float]()
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        assert not gone(process, now)
        until(partial(gone, process, now), "its end")
        assert gone(process, now + pause - 0.01), "not before the pause is over"
        pauses.append(pause)
        now += pause
    assert process.starts == len(pauses)
    process.ensure(now)
    process.works()
    until(lambda: gone(process, now), "its end")
    process.ensure(now + 1)
    assert process.pid is not None, "a second, as at first"
    assert not process.given_up


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "import os; os.kill(os.getpid(), 9)", "import no_such_module"])
def test_however_it_ends_it_is_started_again(
    made: Callable[..., Scripted], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = made(line)
    process.ensure(0.0)
    until(lambda: gone(process, 0.0), "its end")
    process.ensure(1.0)
    assert process.starts == 2
    assert not process.given_up
    assert not [record for record in caplog.records if record.levelno > 20], "whoever asks it warns, once"


def test_one_that_cannot_start_is_not_started_again(made: Callable[..., Scripted]) -> None:
    process = made(f"raise SystemExit({CANNOT_START})")
    process.ensure(0.0)
    until(lambda: gone(process, 0.0), "its end")
    assert process.given_up
    for now in (1.0, 100.0, 1e6):
        process.ensure(now)
    assert (process.pid, process.starts) == (None, 1)


def test_a_program_that_is_not_there_is_tried_again_later(
    made: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = made()
    monkeypatch.setattr(Scripted, "command", ["/no/such/program"])
    process.ensure(0.0)
    process.ensure(0.5)
    assert (process.pid, process.starts) == (None, 1)
    monkeypatch.undo()
    process.ensure(1.0)
    assert process.pid is not None


def test_closing_returns_at_once_ends_it_and_leaves_no_socket(made: Callable[..., Scripted], tmp_path: Path) -> None:
    process = made()
    process.ensure(0.0)
    pid, socket = process.pid, tmp_path / "place" / "s"
    assert pid is not None
    socket.parent.mkdir()
    socket.touch()
    process.close()
    assert process.pid is None
    until(lambda: not alive(pid), "its end")
    until(lambda: not socket.parent.exists(), "the socket's end")
    process.ensure(1e6)
    assert process.starts == 1, "a closed one is not started again"


def test_one_that_does_not_end_is_killed_in_the_end(
    made: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process_module, "_GRACE_S", 0.05)
    ready = tmp_path / "ready"
    process = made(f"{IGNORE} open({str(ready)!r}, 'x'); time.sleep(3600)")
    process.ensure(0.0)
    pid = process.pid
    assert pid is not None
    until(ready.exists, "it to ignore signals")
    process.close()
    until(lambda: not alive(pid), "its end")


@pytest.mark.parametrize("started", [False, True])
def test_closing_one_that_does_not_run_keeps_it_from_being_started(
    made: Callable[..., Scripted], started: bool
) -> None:
    process = made("raise SystemExit(1)")
    if started:
        process.ensure(0.0)
        until(lambda: gone(process, 0.0), "its end")
    for _ in range(2):
        process.close()
    process.ensure(1e6)
    assert process.starts == started


def test_it_inherits_the_environment_but_no_gpu_and_not_every_core(
    made: Callable[..., Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
    out = tmp_path / "environment"
    process = made(
        f"import os; open({str(out)!r} + '~', 'w').write('|'.join(os.environ[n] for n in {names}));"
        f"os.rename({str(out)!r} + '~', {str(out)!r})",
        threads=3,
    )
    process.ensure(0.0)
    until(out.exists, "what it inherits")
    assert out.read_text() == "|3|somewhere"


def test_its_options_arrive_as_they_were_set(tmp_path: Path) -> None:
    config = PredictorConfig(factory=None, timeout_s=12.5, seed=3, keep_prompts=True, folder="a folder")
    process = PredictorProcess(config, tmp_path / "kept", tmp_path / "s")
    options = msgspec.json.decode(process.command[-1], type=WorkerOptions)
    assert (options.socket, options.folder) == (str(tmp_path / "s"), str(tmp_path / "kept"))
    assert options.parent == os.getpid()
    assert PredictorConfig(**options.config) == config  # type: ignore[arg-type]  # that is the question


@pytest.mark.parametrize("place", ["/tmp/short", f"/{'deep/' * 30}"])
def test_the_path_of_a_socket_is_short_wherever_files_are_kept(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(process_module.tempfile, "gettempdir", lambda: place)
    assert len(str(socket_path("0123456789abcdef"))) < 107


def test_sockets_of_killed_predictors_are_removed_and_no_others(tmp_path: Path) -> None:
    def listening(name: str) -> tuple[Path, socket.socket]:
        folder = tmp_path / f"vllm-ext-{name}"
        folder.mkdir()
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(folder / "predictor"))
        bound.listen()
        return folder, bound

    (dead, gone), (served, kept), (young, also_gone) = listening("dead"), listening("alive"), listening("young")
    foreign = tmp_path / "vllm-ext-other"
    foreign.mkdir()
    (foreign / "predictor").write_text("no socket")
    for closed in (gone, also_gone):
        closed.close()
    for folder in (dead, served, foreign):
        os.utime(folder / "predictor", (1.0, 1.0))
    remove_dead_sockets(tmp_path)
    assert not dead.exists()
    assert (served / "predictor").exists()
    assert (foreign / "predictor").exists()
    assert (young / "predictor").exists(), "somebody may be about to listen there"
    kept.close()


def test_where_engines_share_it_one_starts_it_and_another_when_that_is_gone(
    made: Callable[..., Scripted], tmp_path: Path
) -> None:
    """The place is held by the process itself; here by the test."""
    process, place = made(shared=True), tmp_path / "place" / "s"
    held = take(place)
    assert held is not None
    assert take(place) is None
    for now in (0.0, 1.0, 1e6):
        process.ensure(now)
    assert (process.pid, process.starts) == (None, 0)
    place.touch()
    process.close()
    assert place.exists(), "it is another one's"
    os.close(held)
    again = made(shared=True)
    again.ensure(0.0)
    assert again.pid is not None


def test_who_came_too_late_is_no_failure(made: Callable[..., Scripted]) -> None:
    process = made(f"raise SystemExit({TAKEN})", shared=True)
    process.ensure(0.0)
    until(lambda: gone(process, 0.0), "its end")
    assert (process.starts, process.given_up) == (0, False)


def test_a_place_that_cannot_be_made_is_tried_again_later(made: Callable[..., Scripted], tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file")
    process = made(shared=True)
    process.ensure(0.0)
    assert (process.pid, process.given_up) == (None, False)
    (tmp_path / "place").unlink()
    process.ensure(1e6)
    assert process.pid is not None
