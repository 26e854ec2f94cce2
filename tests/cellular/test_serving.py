"""The server: answers, streams, sessions, and what malformed, impatient and too many clients get."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from prometheus_client import CollectorRegistry

from tests.cellular.plain import Plain, listening, lively
from tests.cellular.test_engine import Held
from tests.support.extent import HANG_S
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphed import GraphedCells
from vllm_ext.cellular.graphs import CellGraph
from vllm_ext.cellular.metrics import EngineMetrics
from vllm_ext.cellular.models import Model, Parsed, build
from vllm_ext.cellular.models.lstm import Lstm
from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cellular.serving import create_app


@asynccontextmanager
async def server(
    model: Model, *, hold: bool = False, app: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, CellularEngine, Held]]:
    """A real server on a free port, in this process; with ``hold`` no cell is computed before it is let."""
    compute = Held()
    if not hold:
        compute.go.set()
    engine = CellularEngine(model, EngineOptions(**options), compute=compute)
    config = uvicorn.Config(create_app(engine, **(app or {})), port=0, log_level="warning", timeout_graceful_shutdown=5)
    serving = uvicorn.Server(config)
    serving.install_signal_handlers = lambda: None
    task = asyncio.create_task(serving.serve())
    while not serving.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    port = serving.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
            yield client, engine, compute
    finally:
        compute.go.set()
        serving.should_exit = True
        await task
        engine.close()


async def until(reached: Any) -> None:
    while not reached():
        await asyncio.sleep(0.01)


async def test_concurrent_clients_get_the_answers_of_each_alone() -> None:
    model = build("lstm")
    requests = [{"tokens": list(range(1, 2 + place % 17))} for place in range(40)]
    async with server(model) as (client, *_):
        answers = await asyncio.gather(*(client.post("/v1/infer", json=request) for request in requests))
        labels = [answer.json()["label"] for answer in answers]
        metrics = (await client.get("/metrics")).text
        assert (await client.get("/health")).status_code == 200
    assert labels == [int(Plain(model).scores(request).argmax()) for request in requests]
    assert "vllm_ext:cell_latency_seconds_count 40.0" in metrics
    assert 'vllm_ext:cell_ready_nodes{cell="step"} 0.0' in metrics
    assert 'vllm_ext:cell_task_cpu_seconds_total{cell="step"}' in metrics
    assert "vllm_ext:cell_uncaptured_batches_total 0.0" in metrics
    assert 'vllm_ext:cell_batch_nodes_bucket{cell="head",le="+Inf"}' in metrics


async def test_a_stream_has_each_token_and_then_the_whole() -> None:
    model = lively(build("seq2seq", seed=3, vocabulary=8))
    want = Plain(model, torch.float32).translate([1, 2, 3], 9)
    async with server(model) as (client, *_):
        answer = await client.post("/v1/infer", json={"tokens": [1, 2, 3], "max_steps": 9, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert [json.loads(event) for event in events] == [
        *({"output": token} for token in want),
        {"tokens": want, "finish_reason": "stop" if want[-1] == 1 else "length"},
    ]


async def test_a_session_is_opened_used_and_closed() -> None:
    async with server(build("rnnt"), app={"max_sessions": 1}) as (client, *_):
        name = (await client.post("/v1/sessions")).json()["session"]
        assert (await client.post("/v1/sessions")).status_code == 503
        chunk = {"audio": [[0.5] * 128] * 4, "session": name}
        assert (await client.post("/v1/infer", json=chunk)).json().keys() == {"tokens"}
        assert (await client.delete(f"/v1/sessions/{name}")).status_code == 200
        answer = await client.post("/v1/infer", json=chunk)
        assert (answer.status_code, answer.json()["error"]["message"][:8]) == (400, "session=")
        assert (await client.post("/v1/infer", json={"audio": [[0.5] * 128] * 4})).status_code == 400


async def test_requests_of_a_session_that_is_closed_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async with server(build("rnnt"), hold=True) as (client, engine, _):
        name = (await client.post("/v1/sessions")).json()["session"]
        chunk = {"audio": [[0.5] * 128] * 4, "session": name}
        kept = []
        for place, stream in enumerate((False, True, False, True)):
            kept.append(asyncio.create_task(client.post("/v1/infer", json=chunk | {"stream": stream})))
            await until(lambda: engine.open_requests == place + 1)  # noqa: B023 - called at once
        assert (await client.delete(f"/v1/sessions/{name}")).status_code == 200
        answers = await asyncio.gather(*kept)
    for answer in answers[::2]:
        assert (answer.status_code, answer.json()["error"]["message"]) == (409, "the session is closed")
    for answer in answers[1::2]:
        assert answer.text == 'data: {"error": "the session is closed"}\n\ndata: [DONE]\n\n'
    assert not caplog.records


async def test_a_stream_of_a_chunk_has_the_symbols_of_its_answer_and_no_blank() -> None:
    model = listening()
    audio = np.random.default_rng(0).normal(size=(12, 4, 128)).astype(np.float32)
    async with server(model) as (client, *_):
        name = (await client.post("/v1/sessions")).json()["session"]
        events = []
        for chunk in audio.tolist():
            answer = await client.post("/v1/infer", json={"audio": chunk, "session": name, "stream": True})
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            events.append([json.loads(line) for line in lines[:-1]])
    want = Plain(model, torch.float32).transcribe(audio)
    assert [] in want
    assert any(want)
    assert events == [[*({"output": token} for token in tokens), {"tokens": tokens}] for tokens in want]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "body: must be a JSON object"),
        ("[1]", "not list"),
        ('{"tokens": [NaN]}', "NaN is no JSON number"),
        ('{"tokens": [[1]]}', "tokens=[[1]]: must be a list"),
        ('{"tokens": [1], "stream": 1}', "stream=1: must be true or false"),
        ('{"tokens": [1], "stream": true}', "results of lstm do not grow"),
        ('{"tokens": [1], "session": "x"}', "session='x'"),
        ('{"tokens": [1], "vllm_xargs": 3}', "vllm_xargs=3"),
        ('{"tokens": [1], "vllm_xargs": {"jct_slo_ms": -3}}', "jct_slo_ms=-3"),
        ('{"tokens": [1], "tokens": [2]}', "body: must be a JSON object: 'tokens' is given more than once"),
        ('{"words": [1]}', "words=[1]: must be left out"),
        ("[" * 100_000, "body: must be a JSON object"),
    ],
)
async def test_malformed_requests_get_400_and_the_field(body: str, said: str) -> None:
    async with server(build("lstm")) as (client, *_):
        answer = await client.post("/v1/infer", content=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


async def test_a_body_without_end_is_refused() -> None:
    async with server(build("lstm")) as (client, *_):
        assert (await client.post("/v1/infer", content=b" " * (9 << 20))).status_code == 413


async def test_overload_gets_503_and_when_to_come_back() -> None:
    async with server(build("lstm"), hold=True, max_requests=2) as (client, engine, compute):
        kept = [asyncio.create_task(client.post("/v1/infer", json={"tokens": [1]})) for _ in range(2)]
        await until(lambda: engine.open_requests == 2)
        answer = await client.post("/v1/infer", json={"tokens": [1]})
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["Retry-After"]) <= 61
        compute.go.set()
        assert [one.status_code for one in await asyncio.gather(*kept)] == [200, 200]


class SlowToRead(Lstm):
    """A model whose requests are laid out only when it is let."""

    def __init__(self) -> None:
        super().__init__({"hidden": 8})
        self.reached, self.go = threading.Event(), threading.Event()
        for module in self.modules.values():
            module.requires_grad_(False)

    def unfold(self, parsed: Parsed) -> CellGraph:
        self.reached.set()
        assert self.go.wait(HANG_S)
        return super().unfold(parsed)


async def test_others_are_answered_while_a_large_request_is_laid_out() -> None:
    model = SlowToRead()
    async with server(model, max_requests=1) as (client, *_):
        large = asyncio.create_task(client.post("/v1/infer", json={"tokens": [1]}))
        await until(model.reached.is_set)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/infer", json={"tokens": [1]})).status_code == 503, "it counts as open"
        model.go.set()
        assert (await large).status_code == 200
        assert (await client.post("/v1/infer", json={"tokens": [1]})).status_code == 200, "its place was given back"


async def test_a_full_server_refuses_requests_unread() -> None:
    async with server(build("lstm"), hold=True, max_requests=1) as (client, engine, compute):
        kept = asyncio.create_task(client.post("/v1/infer", json={"tokens": [1]}))
        await until(lambda: engine.open_requests == 1)
        assert (await client.post("/v1/infer", content="{")).status_code == 503
        compute.go.set()
        assert (await kept).status_code == 200
        assert (await client.post("/v1/infer", content="{")).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_request_along(stream: bool) -> None:
    model = lively(build("seq2seq"))
    async with server(model, hold=True) as (client, engine, compute):
        body = {"tokens": [1] * 30, "stream": stream}
        leaving = asyncio.create_task(client.post("/v1/infer", json=body))
        await until(lambda: engine.open_requests == 1)
        await asyncio.sleep(0.05)
        leaving.cancel()
        await until(lambda: engine.open_requests == 0)
        compute.go.set()
        await until(lambda: not engine._stored)
        assert (await client.post("/v1/infer", json={"tokens": [1], "max_steps": 2})).status_code == 200


async def test_an_engine_that_lost_its_workers_is_not_healthy() -> None:
    async with server(build("lstm"), max_restarts=0) as (client, engine, compute):
        compute.fail = lambda *_: exec("raise SystemExit")  # noqa: S102 - a lambda cannot raise
        answer = await client.post("/v1/infer", json={"tokens": [1]})
        assert (answer.status_code, "died" in answer.json()["error"]["message"]) == (500, True)
        await asyncio.to_thread(engine._threads[0].join, HANG_S)
        assert (await client.get("/health")).status_code == 503
        assert threading.active_count() >= 1


async def test_objectives_come_from_body_header_and_default() -> None:
    async with server(build("lstm"), app={"default_slo_ms": 1e6}) as (client, *_):
        await client.post("/v1/infer", json={"tokens": [1]})
        await client.post("/v1/infer", json={"tokens": [1], "vllm_xargs": {"jct_slo_ms": 1e-6}})
        await client.post("/v1/infer", json={"tokens": [1]}, headers={"x-llm-d-slo-ttft-ms": "0.000001"})
        metrics = (await client.get("/metrics")).text
    assert 'vllm_ext:cell_objectives_total{met="yes"} 1.0' in metrics
    assert 'vllm_ext:cell_objectives_total{met="no"} 2.0' in metrics


def test_batches_for_which_no_graph_was_captured_are_counted() -> None:
    def refused(*_: object) -> Any:
        raise RuntimeError("injected: no capture")

    with CellularEngine(build("lstm"), compute=GraphedCells("cpu", refused)) as engine:
        registry = CollectorRegistry()
        EngineMetrics(engine, registry)
        engine.submit({"tokens": [1, 2, 3]}).result(HANG_S)
        assert registry.get_sample_value("vllm_ext:cell_uncaptured_batches_total") == 4, "three steps and the head"


async def test_a_result_that_json_cannot_hold_is_an_error_that_says_so() -> None:
    model = build("lstm")
    async with server(model) as (client, *_):
        model.modules["head"].bias.fill_(float("nan"))  # type: ignore[operator, union-attr]
        answer = await client.post("/v1/infer", json={"tokens": [1]})
    assert (answer.status_code, "not finite" in answer.json()["error"]["message"]) == (500, True)
