"""Fixtures of the prediction service's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .fake_predictors import Obedient
from .parts import Front
from .worker_parts import WorkerProcess


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, unlike ``tmp_path``, which has the name of the test."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)


@pytest.fixture
def make_front(short: Path) -> Iterator[Callable[..., Front]]:
    made = list[Front]()

    def make(**options: Any) -> Front:
        made.append(Front(short, **options))
        return made[-1]

    yield make
    for front in made:
        front.service.close()
        front.hang_up()


@pytest.fixture
def front(make_front: Callable[..., Front]) -> Front:
    return make_front()


@pytest.fixture
def connected(front: Front) -> Front:
    return front.connect()


@pytest.fixture
def start(short: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts processes with fake predictors, one after the other in one folder; none outlives the test."""
    started = list[WorkerProcess]()

    def begin(**options: Any) -> WorkerProcess:
        started.append(WorkerProcess(short, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def obedient(tmp_path: Path) -> Obedient:
    return Obedient(None, tmp_path)
