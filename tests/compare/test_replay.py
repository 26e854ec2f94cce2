"""What is sent to a server over HTTP, and that what comes back is read as `vllm bench serve` reads it."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics

from vllm_ext.compare.observed import measured
from vllm_ext.compare.replay import observed, prompt_of, sent
from vllm_ext.compare.servers import served_model
from vllm_ext.compare.talk import conversed
from vllm_ext.contract.objective import Slo
from vllm_ext.demo.server import ServerError
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import SimRequest, all_requests
from vllm_ext.simulation.workloads.spec import SloTarget, TierSpec, WorkloadSpec


def request(name: str, **changes: Any) -> SimRequest:
    values = {"req_id": name, "arrival_s": 0.0, "prompt_tokens": 6, "output_tokens": 3, "max_tokens": 40, **changes}
    return SimRequest(**values)


class Endpoint:
    """A server that answers each request with as many tokens as its hidden length says, else with two."""

    def __init__(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.url = ""

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        self.ready.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 512}]})

    async def _complete(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        self.bodies[asked.headers["x-request-id"]] = body
        if body["prompt"] == "refuse":
            return web.json_response({"error": "no"}, status=400)
        count = body.get("vllm_xargs", {}).get("bench_output_len", 2)
        answer = web.StreamResponse()
        await answer.prepare(asked)
        for number in range(count):
            choice = {"text": "so "} | ({"token_ids": [1000 + number]} if body.get("return_token_ids") else {})
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0.02)
        usage = {"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": 6}}
        await answer.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return answer


class Silent(Endpoint):
    """One that tells no token ids."""

    async def _complete(self, asked: web.Request) -> web.StreamResponse:
        text = (await asked.text()).replace("return_token_ids", "unknown")
        asked._read_bytes = text.encode()  # what `json` reads
        return await super()._complete(asked)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    yield from running(Endpoint())


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    yield from running(Silent())


def running(made: Endpoint) -> Iterator[Endpoint]:
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    assert made.ready.wait(30)
    yield made
    made.loop.call_soon_threadsafe(made.loop.stop)
    thread.join()


def test_lengths_are_hidden_from_schedulers_and_times_are_those_of_vllms_client(endpoint: Endpoint) -> None:
    late = Slo(ttft_s=1e-9)
    requests = [
        request("a", output_tokens=3),
        request("b", arrival_s=0.05, output_tokens=5, extra_args={"osl": 7}, priority=2, slo=Slo(e2e_s=1e9)),
        request("c", arrival_s=0.06, output_tokens=4, slo=late),
        request("d", arrival_s=0.07, prompt="refuse", slo=Slo(e2e_s=1e9)),
    ]
    found = sent(endpoint.url, "tiny", requests, forced=True, log=io.StringIO())
    bodies = endpoint.bodies
    assert {body["max_tokens"] for body in bodies.values()} == {40}, "the same for all"
    assert bodies["b"]["vllm_xargs"] == {"osl": 7, "bench_output_len": 5}
    assert bodies["b"]["priority"] == 2
    assert "priority" not in bodies["a"]
    assert all(body["ignore_eos"] for body in bodies.values())
    assert all(10 <= token < 250 for token in bodies["a"]["prompt"])
    run = observed(found, requests)
    assert run.failed == 1
    answered = ~np.isnan(run.e2e_s)
    assert run.output_tokens[answered].tolist() == [3, 5, 4]
    late_s = np.array(found["queue_times"])[answered]
    assert 1000 * (run.ttft_s[answered] - late_s).mean() == pytest.approx(
        1000 * np.mean([one for one, error in zip(found["ttfts"], found["errors"], strict=True) if not error])
    )
    assert 1000 * (run.e2e_s[answered] - late_s).mean() == pytest.approx(found["mean_e2el_ms"])
    assert np.isnan(run.on_time[0])
    assert run.on_time[1:].tolist() == [1.0, 0.0, 0.0], "who has no answer has missed its objective"


def test_ttft_tpot_and_e2e_are_those_of_vllms_own_aggregator() -> None:
    """Whose TPOT leaves out requests of a single token, as ours does, and whose TTFT does not."""
    made = np.random.default_rng(3)
    gaps = [made.uniform(0.01, 0.2, count).tolist() for count in (0, 1, 7, 30)]
    first = made.uniform(0.1, 2.0, len(gaps)).tolist()
    outputs = [
        RequestFuncOutput(success=True, ttft=ttft, itl=itl, latency=ttft + sum(itl), output_tokens=len(itl) + 1,
                          prompt_len=6)
        for ttft, itl in zip(first, gaps, strict=True)
    ]  # fmt: skip
    theirs, _ = calculate_metrics([], outputs, 10.0, None, [50.0, 90.0, 99.0], {})
    found = {
        "ttfts": first, "itls": gaps, "latencies": [one.latency for one in outputs], "errors": [""] * len(gaps),
        "output_lens": [one.output_tokens for one in outputs], "input_lens": [6] * len(gaps),
    }  # fmt: skip
    ours = measured(observed(found, [request(str(at)) for at in range(len(gaps))]))
    assert 1000 * ours["mean TTFT"] == pytest.approx(theirs.mean_ttft_ms)
    assert 1000 * ours["P90 TTFT"] == pytest.approx(dict(theirs.percentiles_ttft_ms)[90.0])
    assert 1000 * ours["mean TPOT"] == pytest.approx(theirs.mean_tpot_ms)
    assert 1000 * ours["mean e2e"] == pytest.approx(theirs.mean_e2el_ms)
    assert 1000 * ours["P99 e2e"] == pytest.approx(dict(theirs.percentiles_e2el_ms)[99.0])


def test_a_server_that_nobody_forced_gets_no_hidden_length(endpoint: Endpoint) -> None:
    sent(endpoint.url, "tiny", [request("a", prompt="Hello")], forced=False, log=io.StringIO())
    body = endpoint.bodies["a"]
    assert body["prompt"] == "Hello"
    assert "vllm_xargs" not in body
    assert not body.get("ignore_eos")


TALKS = WorkloadSpec(
    source="pensieve-sharegpt", scale_prompt=0.02, scale_output=0.02, min_turns=3, max_turns=3, think_s=0.05,
    num_requests=2, rate_per_s=50.0, max_model_len=400,
    tiers=(TierSpec(name="chat", e2e=SloTarget(base_s=1e9)),),
)  # fmt: skip


def test_a_next_turn_follows_the_answer_and_begins_with_all_that_was_said(endpoint: Endpoint) -> None:
    requests = all_requests(build(TALKS))
    assert [one.req_id for one in requests] == ["r0.0", "r0.1", "r0.2", "r1.0", "r1.1", "r1.2"]
    found = conversed(endpoint.url, "tiny", build(TALKS), forced=True)
    run = observed(found, requests)
    assert run.failed == 0
    assert run.on_time.tolist() == [1.0] * 6
    assert run.output_tokens.tolist() == [one.output_tokens for one in requests]
    for first, after in ((0, 1), (1, 2), (3, 4), (4, 5)):
        before, now = (endpoint.bodies[requests[at].req_id] for at in (first, after))
        answer = [1000 + number for number in range(requests[first].output_tokens)]
        said = before["prompt"] + answer
        assert now["prompt"][: len(said)] == said, "the answer as it came"
        assert len(now["prompt"]) == requests[after].prompt_tokens
        assert run.arrival_s[after] > run.arrival_s[first] + run.e2e_s[first] - 0.01, "whoever thinks has the answer"


def test_a_conversation_ends_with_a_turn_that_failed(silent: Endpoint) -> None:
    requests = all_requests(build(TALKS))
    found = conversed(silent.url, "tiny", build(TALKS), forced=True)
    assert len(found["errors"]) == 2
    assert all("no token ids" in error for error in found["errors"])
    run = observed(found, requests)
    assert run.failed == 6, "later turns were never sent"
    assert run.on_time.tolist() == [0.0] * 6


def test_no_run_finds_the_kv_of_another_nor_a_tenant_that_of_another(endpoint: Endpoint) -> None:
    salts = []
    for _ in range(2):
        requests = [request("a", tenant="x"), request("b", tenant="x"), request("c", tenant="y")]
        sent(endpoint.url, "tiny", requests, forced=True, log=io.StringIO())
        salts.append([endpoint.bodies[name]["cache_salt"] for name in "abc"])
    (a, b, c), again = salts
    assert a == b != c
    assert not {a, c} & {*again}


def test_prompts_share_what_the_recorded_ones_share() -> None:
    first, second = (request(name, token_ids=[5, 900, 900, at]) for name, at in (("a", 1), ("b", 2)))
    assert prompt_of(first)[:3] == prompt_of(second)[:3]
    assert prompt_of(first) != prompt_of(second)
    assert prompt_of(request("a", token_ids=[5, 50_000], recorded_ids=True)) == [5, 50_000], "as it was"
    assert prompt_of(request("a")) == prompt_of(request("a")) != prompt_of(request("b"))


def test_the_served_model_is_asked_for(endpoint: Endpoint) -> None:
    assert served_model(endpoint.url) == ("tiny", 512)
    with pytest.raises(ServerError, match=r"http://127.0.0.1:1/v1/models: "):
        served_model("http://127.0.0.1:1")
