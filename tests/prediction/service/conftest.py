"""Fixtures of the prediction service's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.prediction.service.messages import Status

from .fake_predictors import Obedient
from .parts import Front
from .worker_parts import WorkerProcess


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket, unlike ``tmp_path``, which has the name of the test."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)


@pytest.fixture
def front(short: Path) -> Iterator[Front]:
    made = Front(short)
    yield made
    made.service.close()
    made.stop_listening()


@pytest.fixture
def connected(front: Front) -> Front:
    worker = front.listen()
    front.service.poll()
    worker.say(Status(entries=3))
    front.service.poll()
    assert front.service.ready
    return front


@pytest.fixture
def start(short: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts processes with fake predictors, one after the other in one folder; none outlives the test."""
    started = list[WorkerProcess]()

    def begin(**options: Any) -> WorkerProcess:
        started.append(WorkerProcess(short, **options))
        return started[-1]

    yield begin
    for process in started:
        process.end()


@pytest.fixture
def obedient(tmp_path: Path) -> Obedient:
    return Obedient(None, tmp_path)
