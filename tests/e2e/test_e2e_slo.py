"""Objectives on a real server: what its metrics count, what it reports in ``usage``, and whom it turns away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from forks import ForkServer
from servers import HANG_S, MODEL, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

AGES_MS = 1e6
NOTHING_MS = 1e-3
OBJECTIVES = {"ttft": "ttft_slo_ms", "tbt": "tbt_slo_ms", "jct": "jct_slo_ms"}
ROUTES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "one two three", "max_tokens": 12},
    "chat/completions": {"messages": [{"role": "user", "content": "one two three"}], "max_completion_tokens": 12},
}
routes = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def server(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with one seat, a class of requests that can't miss, and load shedding."""
    classes = {"gold": {"ttft_ms": AGES_MS, "tbt_ms": AGES_MS, "jct_ms": AGES_MS}}
    args = ["--scheduler-cls", "fcfs", "--ext-shed", "--ext-metrics-interval-s", "0.1", "--max-num-seqs", "1"]
    args += ["--additional-config", json.dumps({"vllm_ext": {"slo": {"classes": classes}}})]
    log = tmp_path_factory.mktemp("slo") / "server.log"
    with Served(llama, args, log_path=log, forks=forks, modules=["turnstile"]) as running:
        yield running


def body(route: str, hints: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "ignore_eos": True, "vllm_xargs": hints, **ROUTES[route], **more}


def post(server: Served, route: str, hints: dict[str, Any], **more: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v1/{route}", json=body(route, hints, **more), timeout=HANG_S)


def usage_of(server: Served, route: str, hints: dict[str, Any], *, stream: bool, **more: Any) -> dict[str, Any]:
    """The usage of an answer; of a stream, that of its one chunk that has any."""
    if not stream:
        answer = post(server, route, hints, **more)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()["usage"]
        return whole
    answer = post(server, route, hints, stream=True, stream_options={"include_usage": True}, **more)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    (last,) = [chunk for chunk in chunks if chunk.get("usage")]
    assert last is chunks[-1]
    streamed: dict[str, Any] = last["usage"]
    return streamed


def counted(server: Served, name: str, **labels: str) -> float:
    try:
        return server.metric(f"vllm_ext:slo_{name}_total", **labels)
    except LookupError:
        return 0.0


@routes
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_usage_reports_what_was_asked_for(server: Served, route: str, stream: bool) -> None:
    hints = {"slo_report": True, "tag": "gold", "tbt_slo_ms": NOTHING_MS}
    usage = usage_of(server, route, hints, stream=stream)
    assert usage["completion_tokens"] == 12
    report = usage["vllm_ext"]
    assert 0 < report["ttft_ms"] < report["jct_ms"]
    assert 0 < report["max_tbt_ms"] < report["jct_ms"]
    assert report["tier"] == "gold"
    assert report["slo"] == {
        "ttft": {"objective_ms": AGES_MS, "met": True},
        "tbt": {"objective_ms": NOTHING_MS, "met": False},
        "jct": {"objective_ms": AGES_MS, "met": True},
        "met": False,
    }


@routes
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_usage_is_as_upstream_has_it_where_nothing_was_asked(server: Served, route: str, stream: bool) -> None:
    plain = usage_of(server, route, {}, stream=stream)
    declined = usage_of(server, route, {"slo_report": False, "tag": "gold"}, stream=stream)
    assert plain.keys() == declined.keys()
    assert "vllm_ext" not in plain


def test_a_report_covers_all_samples_and_prompts(server: Served) -> None:
    """Two prompts with two samples each, and one seat: the last to begin waits for the others, and for this test."""
    more = {"max_tokens": 60, "prompt": ["one two three", "four five six"], "n": 2, "temperature": 1}
    sent = time.monotonic()
    with ThreadPoolExecutor() as pool, server.turnstile.closed():
        answer = pool.submit(usage_of, server, "completions", {"slo_report": True}, stream=False, **more)
        server.wait_for_queue(4)
        server.turnstile.let(3 * 60)
        all_but_one = time.monotonic()
        held_up_s = 1.1 * (all_but_one - sent)  # longer than any of the others waited
        time.sleep(held_up_s)
    usage = answer.result()
    assert usage["completion_tokens"] == 4 * 60
    assert usage["vllm_ext"]["slo"] == {}
    assert usage["vllm_ext"]["ttft_ms"] > 1e3 * held_up_s


@routes
@pytest.mark.parametrize("value", [1, 0, "true", 1.0], ids=repr)
def test_a_report_is_asked_for_with_true_and_nothing_else(server: Served, route: str, value: Any) -> None:
    answer = post(server, route, {"slo_report": value})
    assert answer.status_code == 400
    assert "slo_report" in answer.json()["error"]["message"]


def test_met_and_missed_objectives_and_goodput_are_counted(server: Served) -> None:
    hints = {"tag": "counted", "ttft_slo_ms": AGES_MS, "jct_slo_ms": AGES_MS}
    for _ in range(2):
        usage_of(server, "completions", hints, stream=False)
    usage_of(server, "completions", {**hints, "jct_slo_ms": NOTHING_MS}, stream=True)

    def requests(objective: str, outcome: str) -> float:
        return counted(server, "requests", tier="counted", objective=objective, outcome=outcome)

    wait_until(lambda: requests("all", "met") + requests("all", "missed") == 3, "three judged requests")
    assert [requests(name, "met") for name in ("ttft", "tbt", "jct", "all")] == [3, 0, 2, 2]
    assert [requests(name, "missed") for name in ("ttft", "tbt", "jct", "all")] == [0, 0, 1, 1]
    assert counted(server, "output_tokens", tier="counted", outcome="met") == 24
    assert counted(server, "output_tokens", tier="counted", outcome="missed") == 12


def test_a_client_that_leaves_is_counted_by_itself(server: Served) -> None:
    async def leave() -> None:
        request = body("completions", {"tag": "leaver", "jct_slo_ms": AGES_MS}, max_tokens=400, stream=True)
        url = f"{server.base_url}/v1/completions"
        async with (
            httpx.AsyncClient(timeout=HANG_S) as client,
            client.stream("POST", url, json=request) as answer,
        ):
            await asyncio.to_thread(server.wait_for_queue, 1)
            await asyncio.to_thread(server.turnstile.let, 3)
            await anext(answer.aiter_lines())

    def judged(outcome: str) -> float:
        return counted(server, "requests", tier="leaver", objective="all", outcome=outcome)

    with server.turnstile.closed():
        asyncio.run(leave())
        wait_until(lambda: judged("aborted") == 1, "the request of a client that left")
    assert judged("met") + judged("missed") == 0


def test_requests_without_objectives_are_not_counted(server: Served) -> None:
    usage_of(server, "completions", {"tag": "silent"}, stream=False)
    usage_of(server, "completions", {"tag": "silent", "slo_report": True}, stream=False)
    assert counted(server, "requests", tier="silent") == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_can_not_be_met_is_refused_with_503_while_others_queue(server: Served, stream: bool) -> None:
    """Long requests wait for one seat; a new one with an objective is turned away at once, one without is queued."""
    hurried = {"tag": f"hurried-{stream}", "ttft_slo_ms": 1}

    async def scene() -> httpx.Response:
        url = f"{server.base_url}/v1/completions"
        async with httpx.AsyncClient(timeout=HANG_S) as client:
            with server.turnstile.closed():
                long = body("completions", {}, max_tokens=200)
                queued = [asyncio.create_task(client.post(url, json=long)) for _ in range(4)]
                await asyncio.to_thread(server.wait_for_queue, len(queued))
                await asyncio.to_thread(server.turnstile.let, 100)  # half of one: the pace of a long queue
                probes: list[asyncio.Task[httpx.Response]] = []
                refused: list[httpx.Response] = []
                while not refused:
                    # Not waited for: what comes before the server has read its queue again is let pass, and queues.
                    probe = client.post(url, json=body("completions", hurried, stream=stream))
                    probes.append(asyncio.create_task(probe))
                    await asyncio.sleep(0.1)
                    refused = [done.result() for done in probes if done.done() and done.result().status_code == 503]
            answers = await asyncio.gather(*queued)
            statuses = {answer.status_code for answer in await asyncio.gather(*probes)}
        assert [answer.status_code for answer in answers] == [200] * 4
        assert statuses <= {200, 503}
        return refused[0]

    refused = asyncio.run(scene())
    assert refused.json()["error"]["code"] == 503
    assert "objective of 0.001 s" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 600
    wait_until(lambda: counted(server, "shed_requests", tier=hurried["tag"]) >= 1, "the refusal in /metrics")

    shed = counted(server, "shed_requests")
    wait_until(lambda: server.metric("vllm:num_requests_waiting") == 0, "the queue has drained")
    wait_until(lambda: post(server, "completions", hurried, stream=stream).status_code == 200, "it is let pass again")
    assert post(server, "completions", hurried, stream=stream).status_code == 200, "an empty queue sheds nobody"
    assert counted(server, "shed_requests") >= shed
