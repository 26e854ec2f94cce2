"""The front end's poller on a stand-in of AsyncLLM: what is fetched, logged, survived; e2e runs the real one."""

from __future__ import annotations

import asyncio
import gc
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext.config import ExtConfig
from vllm_ext.metrics import frontend, json_lines
from vllm_ext.metrics.frontend import Poller, ensure_poller

from .test_engine import record, state

INTERVAL_S = 0.001


class Client:
    """The part of vLLM's engine-core client that the poller uses; each engine has its own book of records."""

    def __init__(self, engines: int = 1) -> None:
        self.client_index = 0
        self.core_engines = [bytes([i]) for i in range(engines)]
        self.books: dict[bytes, list[dict[str, Any]]] = {identity: [] for identity in self.core_engines}
        self.calls: list[tuple[str, int, bytes]] = []
        self.before: Callable[[bytes], None] = lambda identity: None
        self.measured: tuple[dict[str, Any], list[Any]] | None = None

    def finish(self, req_id: str, engine: int = 0) -> None:
        book = self.books[self.core_engines[engine]]
        book.append(record(req_id=req_id, seq=len(book)))

    async def _call_utility_async(self, method: str, since: int, *, engine: bytes) -> dict[str, Any]:
        self.calls.append((method, since, engine))
        await asyncio.sleep(0)
        self.before(engine)
        book = self.books[engine]
        found = state(records=book[since:], next_record=len(book))
        return found if self.measured is None else {**found, "steps_measured": self.measured}


class Engine:
    def __init__(self, client: Client, **options: Any) -> None:
        self.engine_core = client
        names = options.pop("served_model_name", "poller-test")
        self.vllm_config = types.SimpleNamespace(
            additional_config={"vllm_ext": {"metrics_interval_s": INTERVAL_S, "system": "alise", **options}},
            model_config=types.SimpleNamespace(served_model_name=names),
        )


def config(path: Path | None = None) -> ExtConfig:
    return ExtConfig(metrics_interval_s=INTERVAL_S, request_log=None if path is None else str(path))


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n"), "lines are appended whole"
    return [json.loads(line) for line in text.splitlines()]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(INTERVAL_S)


async def polls(client: Client, count: int) -> None:
    goal = len(client.calls) + count
    await until(lambda: len(client.calls) >= goal)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def note(message: str, *args: object) -> None:
        found.append(message % args)

    monkeypatch.setattr(frontend.logger, "exception", note)
    monkeypatch.setattr(json_lines.logger, "error", note)
    return found


async def test_each_finished_request_becomes_one_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "requests.jsonl"
    client = Client()
    engine = Engine(client, request_log=str(path))
    ensure_poller(engine)  # type: ignore[arg-type]
    client.finish("a")
    client.finish("b")
    await until(path.exists)
    client.finish("c")
    await until(lambda: len(lines(path)) == 3)
    await polls(client, 3)
    task = engine._vllm_ext_poller  # type: ignore[attr-defined]
    task.cancel()
    assert [(line["req_id"], line["engine"]) for line in lines(path)] == [("a", 0), ("b", 0), ("c", 0)]
    assert {call[0] for call in client.calls} == {"vllm_ext_state"}
    assert client.calls[-1][1] == 3, "asks from where it stopped"


async def test_measured_steps_are_written_where_they_were_asked_for(tmp_path: Path) -> None:
    path, client = tmp_path / "steps.jsonl", Client()
    client.measured = ({"format": "a"}, [[1, 0, 9, 0.0, 0.5]])
    engine = Engine(client)
    poller = Poller(engine, ExtConfig(metrics_interval_s=INTERVAL_S, step_record=str(path)))  # type: ignore[arg-type]
    for _ in range(2):
        await poller._fetch(engine)  # type: ignore[arg-type]
    client.measured = None
    await poller._fetch(engine)  # type: ignore[arg-type]
    assert path.read_text() == '{"format": "a"}\n' + "[1, 0, 9, 0.0, 0.5]\n" * 2


async def test_engines_are_asked_in_turn_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "log"
    client = Client(2)
    engine = Engine(client)
    poller = Poller(engine, config(path))  # type: ignore[arg-type]
    client.finish("a", 0)
    client.finish("b", 1)
    await poller._fetch(engine)  # type: ignore[arg-type]
    client.finish("c", 1)
    await poller._fetch(engine)  # type: ignore[arg-type]
    assert [(line["req_id"], line["engine"]) for line in lines(path)] == [("a", 0), ("b", 1), ("c", 1)]


async def test_a_failing_engine_does_not_lose_the_records_of_the_others(tmp_path: Path, messages: list[str]) -> None:
    path = tmp_path / "log"
    client = Client(2)
    engine = Engine(client, request_log=str(path))
    failures = iter([True])

    def fail_once(identity: bytes) -> None:
        if identity == client.core_engines[1] and next(failures, False):
            raise RuntimeError("busy")

    client.before = fail_once
    client.finish("a", 0)
    ensure_poller(engine)  # type: ignore[arg-type]
    await polls(client, 8)
    engine._vllm_ext_poller.cancel()  # type: ignore[attr-defined]
    assert path.exists()
    assert [line["req_id"] for line in lines(path)] == ["a"]


@pytest.mark.parametrize("kind", ["folder in its place", "parent is a file"])
async def test_a_log_that_can_t_be_written_is_reported_once_and_survived(
    kind: str, tmp_path: Path, messages: list[str]
) -> None:
    path = tmp_path / "log" / "file"
    if kind == "folder in its place":
        path.mkdir(parents=True)
    else:
        path.parent.write_text("")
    client = Client()
    engine = Engine(client, request_log=str(path), served_model_name=tmp_path.name)
    ensure_poller(engine)  # type: ignore[arg-type]
    for number in range(3):
        client.finish(f"r{number}")
        await polls(client, 2)
    task = engine._vllm_ext_poller  # type: ignore[attr-defined]
    assert not task.done()
    task.cancel()
    assert len(messages) == 1
    assert f"request_log={path}" in messages[0]
    labels = {"model_name": tmp_path.name, "engine": "0"}
    assert REGISTRY.get_sample_value("vllm_ext:request_log_lost_lines_total", labels) == 3


async def test_a_dead_engine_ends_the_task(messages: list[str]) -> None:
    client = Client()
    engine = Engine(client)

    def die(identity: bytes) -> None:
        raise EngineDeadError()

    client.before = die
    ensure_poller(engine)  # type: ignore[arg-type]
    await asyncio.wait_for(engine._vllm_ext_poller, 10)  # type: ignore[attr-defined]
    assert len(client.calls) == 1
    assert messages == []


async def test_a_failure_is_logged_once_and_the_task_goes_on(messages: list[str]) -> None:
    client = Client()
    engine = Engine(client)

    def fail(identity: bytes) -> None:
        raise ValueError("not today")

    client.before = fail
    ensure_poller(engine)  # type: ignore[arg-type]
    await polls(client, 5)
    assert len(messages) == 1
    assert not engine._vllm_ext_poller.done()  # type: ignore[attr-defined]
    engine._vllm_ext_poller.cancel()  # type: ignore[attr-defined]


async def test_only_the_first_api_server_polls() -> None:
    client = Client()
    client.client_index = 1
    engine = Engine(client)
    ensure_poller(engine)  # type: ignore[arg-type]
    assert getattr(engine, "_vllm_ext_poller", None) is None


async def test_it_is_started_once() -> None:
    engine = Engine(Client())
    ensure_poller(engine)  # type: ignore[arg-type]
    task = engine._vllm_ext_poller  # type: ignore[attr-defined]
    ensure_poller(engine)  # type: ignore[arg-type]
    assert engine._vllm_ext_poller is task  # type: ignore[attr-defined]
    task.cancel()


@pytest.mark.parametrize("options", [{"metrics_interval_s": 0}, None], ids=["switched off", "not ours"])
async def test_nothing_is_fetched_unless_asked_for(options: dict[str, Any] | None) -> None:
    engine = Engine(Client(), **(options or {}))
    if options is None:
        engine.vllm_config.additional_config = {}
    ensure_poller(engine)  # type: ignore[arg-type]
    assert getattr(engine, "_vllm_ext_poller", None) is None


def test_without_a_running_loop_nothing_happens_and_it_can_start_later() -> None:
    engine = Engine(Client())
    ensure_poller(engine)  # type: ignore[arg-type]
    assert getattr(engine, "_vllm_ext_poller", None) is None

    async def later() -> None:
        ensure_poller(engine)  # type: ignore[arg-type]
        engine._vllm_ext_poller.cancel()  # type: ignore[attr-defined]

    asyncio.run(later())


async def test_the_task_does_not_keep_the_engine_alive() -> None:
    client = Client()
    engine = Engine(client)
    poller = Poller(engine, config())  # type: ignore[arg-type]
    task = asyncio.get_running_loop().create_task(poller.run())
    await polls(client, 2)
    del engine
    gc.collect()
    await asyncio.wait_for(task, 10)


def test_the_first_served_name_labels_the_metrics() -> None:
    poller = Poller(Engine(Client(), served_model_name=["first", "second"]), config())  # type: ignore[arg-type]
    assert poller._model_name == "first"
