"""What clients of a server under alise see: answers, refusals, aborts, restarts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from servers import HANG_S, MAX_MODEL_LEN, MODEL, Served, wait_until

from vllm_ext.demo.server import group_members

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

SEATS = 4
"""Of the server that most tests share."""
BAD_HINTS = {
    "xargs-osl-negative": ("osl", {"vllm_xargs": {"osl": -1}}, {}),
    "xargs-osl-fraction": ("osl", {"vllm_xargs": {"osl": 3.5}}, {}),
    "xargs-slo-zero": ("ttft_slo_ms", {"vllm_xargs": {"ttft_slo_ms": 0}}, {}),
    "xargs-slo-text": ("tbt_slo_ms", {"vllm_xargs": {"tbt_slo_ms": "soon"}}, {}),
    "xargs-slo-list": ("jct_slo_ms", {"vllm_xargs": {"jct_slo_ms": [1, 2]}}, {}),
    "xargs-conversation-too-long": ("conversation_id", {"vllm_xargs": {"conversation_id": "c" * 5000}}, {}),
    "header-slo-text": ("x-llm-d-slo-ttft-ms", {}, {"x-llm-d-slo-ttft-ms": "soon"}),
    "header-slo-nan": ("x-llm-d-slo-ttft-ms", {}, {"x-llm-d-slo-ttft-ms": "nan"}),
    "header-osl-zero": ("x-dynamo-osl", {}, {"x-dynamo-osl": "0"}),
    "nvext-osl-text": ("nvext.agent_hints.osl", {"nvext": {"agent_hints": {"osl": "many"}}}, {}),
    "nvext-no-object": ("nvext", {"nvext": [1]}, {}),
}
GOOD_HINTS = {
    "xargs": (
        {"vllm_xargs": {"conversation_id": "c1", "ttft_slo_ms": 250, "tbt_slo_ms": 50.5, "jct_slo_ms": 9e3, "osl": 7}},
        {},
    ),
    "headers": ({}, {"X-LLM-D-SLO-TTFT-MS": "250.5", "x-dynamo-osl": "7", "X-Session-ID": "c1"}),
    "nvext": ({"nvext": {"agent_hints": {"osl": 7}, "annotations": ["not ours"]}}, {}),
    "foreign-keys": ({"vllm_xargs": {"somebody_elses": "x"}}, {}),
}


def prompt(number: int, words: int = 12) -> str:
    return " ".join(f"item{number}-{i}" for i in range(words))


def complete(server: Served, text: str, max_tokens: int, **kwargs: Any) -> str:
    answer = server.client().completions.create(
        model=MODEL, prompt=text, max_tokens=max_tokens, temperature=0, **kwargs
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    return answer.choices[0].text


def hinted(osl: int) -> dict[str, Any]:
    return {"extra_body": {"vllm_xargs": {"osl": osl}}}


async def whole(client: openai.AsyncOpenAI, text: str, max_tokens: int, **kwargs: Any) -> str:
    """One completion that is not streamed: it costs this process nothing while it runs."""
    answer = await client.completions.create(model=MODEL, prompt=text, max_tokens=max_tokens, temperature=0, **kwargs)
    return answer.choices[0].text


async def stream(
    client: openai.AsyncOpenAI, text: str, max_tokens: int, started: asyncio.Event | None = None, **kwargs: Any
) -> str:
    """Stream one completion to its end; sets ``started`` at its first chunk."""
    pieces = []
    chunks = await client.completions.create(
        model=MODEL, prompt=text, max_tokens=max_tokens, temperature=0, stream=True, **kwargs
    )
    async for chunk in chunks:
        pieces.append(chunk.choices[0].text)
        if started is not None:
            started.set()
    return "".join(pieces)


def test_completion_and_its_stream_agree(alise: Served) -> None:
    whole = complete(alise, prompt(0), 20)

    async def streamed() -> str:
        async with alise.async_client() as client:
            return await stream(client, prompt(0), 20)

    assert len(whole) >= 20
    assert asyncio.run(streamed()) == whole


def test_chat_and_its_stream_agree(alise: Served) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt(1)}],
        "max_completion_tokens": 20,
        "temperature": 0,
    }
    whole = alise.client().chat.completions.create(**ask)
    chunks = list(alise.client().chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == streamed
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_3_each_of_64_concurrent_requests_gets_its_own_answer(alise: Served) -> None:
    """Eight prompts, eight times each, half of them streamed; sent at once they are answered as when sent alone."""
    lengths = {number: 4 + 6 * number for number in range(8)}
    alone = {number: complete(alise, prompt(number), length) for number, length in lengths.items()}
    assert len(set(alone.values())) == len(alone)

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[int, str]:
        number = i % 8
        text, length = prompt(number), lengths[number]
        if i < 32:
            return number, await stream(client, text, length, **hinted(length))
        return number, await whole(client, text, length)

    async def together() -> list[tuple[int, str]]:
        async with alise.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    answers = asyncio.run(together())
    assert len(answers) == 64
    assert [(number, text) for number, text in answers if text != alone[number]] == []


def test_4_requests_that_short_ones_preempt_are_answered_unchanged(alise: Served) -> None:
    """Short requests come while long ones have all seats, and take the place of some."""
    alone = {number: complete(alise, prompt(number), 300) for number in range(4)}
    numbers = [0, 1, 2, 3, 0, 1]  # more than there are seats: the short ones never find a free one

    async def scene() -> list[tuple[int, str]]:
        async with alise.async_client() as client:
            with alise.turnstile.closed():
                longs = [asyncio.create_task(whole(client, prompt(n), 300, **hinted(300))) for n in numbers]
                await asyncio.to_thread(alise.wait_for_queue, len(numbers))
                await asyncio.to_thread(alise.turnstile.let, 20)
                shorts = [asyncio.create_task(whole(client, prompt(100 + i), 3, **hinted(3))) for i in range(3)]
                await asyncio.to_thread(alise.wait_for_queue, len(numbers) - SEATS + len(shorts))
            await asyncio.gather(*shorts)
            return list(zip(numbers, await asyncio.gather(*longs), strict=True))

    def of_longs() -> list[dict[str, Any]]:
        return [record for record in alise.records() if record["max_tokens"] == 300]

    wait_until(lambda: len(of_longs()) >= len(alone), "the requests that were served alone, in the request log")
    before, num_logged = policy_preemptions(alise), len(of_longs())
    answers = asyncio.run(scene())
    assert [(number, text) for number, text in answers if text != alone[number]] == []
    wait_until(lambda: len(of_longs()) == num_logged + len(answers), "the long requests in the request log")
    # the metrics of a fetch are there before its records
    assert policy_preemptions(alise) > before
    assert any(record["num_preemptions"] > 0 for record in of_longs()[num_logged:])


def policy_preemptions(server: Served) -> float:
    """How often a better-ranked request took the place of a running one."""
    wait_until(lambda: len(server.our_series()) > 0, "vllm_ext:* in /metrics")
    return server.metric("vllm_ext:preemptions_total", reason="policy")


def test_3_aborted_streams_leave_nothing_behind(alise: Served) -> None:
    """Six clients leave, three in mid-stream and two while their request waits; the seats and KV blocks come back."""

    def named(number: int) -> dict[str, Any]:
        return {"prompt": prompt(number), "stream": True, "extra_headers": {"X-Request-Id": f"leaves-{number}"}}

    def ends() -> list[str]:
        return [record["finish_reason"] for record in alise.records() if "leaves-" in record["req_id"]]

    async def scene() -> None:
        streams = []
        async with alise.async_client() as client:
            create = client.completions.create
            with alise.turnstile.closed():
                for number in range(6):
                    streams.append(await create(model=MODEL, max_tokens=400, temperature=0, **named(number)))
                    await asyncio.to_thread(alise.wait_for_queue, number + 1)
                await asyncio.to_thread(alise.turnstile.let, 3)
                await asyncio.to_thread(alise.wait_for_queue, 6 - SEATS)
                for chunks in streams[:3]:
                    await anext(aiter(chunks))
                for chunks in streams:
                    await chunks.close()
                await asyncio.to_thread(wait_until, lambda: len(ends()) == 6, "six requests whose clients left, ended")

    asyncio.run(scene())
    assert ends() == ["abort"] * 6
    complete(alise, prompt(9), 5)  # the gauges are of the last step, so there must be one after the aborts
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        wait_until(lambda gauge=gauge: alise.metric(gauge) == 0, f"{gauge} back to 0")


def test_over_long_prompt_is_refused_with_400(alise: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        complete(alise, prompt(0, words=2 * MAX_MODEL_LEN), 5)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", list(BAD_HINTS))
def test_bad_hint_is_refused_with_400_and_its_name(alise: Served, case: str, streaming: bool) -> None:
    field, body, headers = BAD_HINTS[case]
    request = {"model": MODEL, "max_tokens": 2, "stream": streaming, **body}
    for route, what in {
        "completions": {"prompt": "x"},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }.items():
        answer = httpx.post(f"{alise.base_url}/v1/{route}", json={**request, **what}, headers=headers, timeout=HANG_S)
        assert answer.status_code == 400, f"{route}: {answer.status_code} {answer.text}"
        assert field in answer.json()["error"]["message"]


def test_bad_hints_leave_other_requests_alone(alise: Served) -> None:
    alone = complete(alise, prompt(2), 120)

    async def scene() -> str:
        async with alise.async_client() as client:
            started = asyncio.Event()
            steady = asyncio.create_task(stream(client, prompt(2), 120, started))
            await started.wait()
            for _ in range(10):
                with pytest.raises(openai.BadRequestError, match="osl"):
                    await stream(client, prompt(3), 5, **hinted(-1))
            return await steady

    assert asyncio.run(scene()) == alone


@pytest.mark.parametrize("case", list(GOOD_HINTS))
def test_good_hints_are_accepted(alise: Served, case: str) -> None:
    body, headers = GOOD_HINTS[case]
    assert complete(alise, prompt(4), 7, extra_body=body, extra_headers=headers)


@pytest.mark.parametrize("case", ["xargs", "headers", "nvext"])
def test_a_length_hint_becomes_the_prediction_in_the_request_log(alise: Served, case: str) -> None:
    """The hint is wrong here: what is logged must be what the client said, not what came of it."""
    body, headers = {
        "xargs": ({"vllm_xargs": {"osl": 2}}, {}),
        "headers": ({}, {"x-dynamo-osl": "2"}),
        "nvext": ({"nvext": {"agent_hints": {"osl": 2}}}, {}),
    }[case]
    name = f"logged-{case}"
    complete(alise, prompt(5), 9, extra_body=body, extra_headers={**headers, "X-Request-Id": name})

    def logged() -> list[dict[str, Any]]:
        return [record for record in alise.records() if name in record["req_id"]]

    wait_until(lambda: len(logged()) > 0, f"{name} in the request log")
    (record,) = logged()
    expected = {"predicted_tokens": 2, "prediction_source": "hint", "output_tokens": 9, "finish_reason": "length"}
    assert {key: record[key] for key in expected} == expected


def test_metrics_of_the_server_include_ours_once(alise: Served) -> None:
    complete(alise, prompt(6), 3)
    wait_until(lambda: len(alise.our_series()) > 0, "vllm_ext:* in /metrics")
    ours = alise.our_series()
    assert len(ours) == len(set(ours))
    assert alise.metric("vllm_ext:system_info", system="alise-published") == 1
    wait_until(lambda: alise.metric("vllm_ext:steps_total") > 0, "steps counted in vllm_ext:*")


def test_server_stops_cleanly_and_serves_again_on_its_port(alise: Served) -> None:
    """The second start is always that of a user: with processes that vLLM spawns, which import everything anew."""
    before = complete(alise, prompt(7), 10)
    group, url = alise.pid, alise.base_url
    alise.stop()
    assert group_members(group) == []
    with pytest.raises(OSError):
        alise.get("/health")
    alise.forks = None
    alise.start()
    assert alise.base_url == url
    assert complete(alise, prompt(7), 10) == before
    wait_until(lambda: alise.metric("vllm_ext:system_info", system="alise-published") == 1, "our metrics")
