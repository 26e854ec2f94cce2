"""Send the demo's requests with the `openai` client and measure them where a client stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from vllm_ext.demo.workload import DemoRequest, Kind

REQUEST_TIMEOUT_S = 300.0

OWN_CONNECTION = {"Connection": "close"}
"""Headers for a client without retries. A kept connection may be closed by the server, which does so after 5 s without
a request, just as the next request is sent: that one is lost."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a request, as its client saw it."""

    request: DemoRequest
    response_id: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    e2e_s: float = 0.0
    """From sending to the end of the answer."""
    ttft_s: float | None = None
    """From sending to the first text; None if the answer came in one piece or has no text."""
    error: str | None = None
    """Why there is no answer; the numbers are then meaningless."""

    @property
    def normalised_latency_s(self) -> float:
        """End-to-end latency per output token, in seconds; 0 without output."""
        return self.e2e_s / self.output_tokens if self.output_tokens else 0.0


def send_all(
    requests: Sequence[DemoRequest],
    *,
    base_url: str,
    model: str,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Send each request at its time and return the answers in the order of the requests.

    A request that fails becomes an answer with an error; the others go on.

    Args:
        requests: What to send.
        base_url: `http://host:port` of the server.
        model: Name under which it serves the model.
        on_answer: Called with each answer as it comes.
    """
    return asyncio.run(_send_all(requests, base_url, model, on_answer))


async def _send_all(
    requests: Sequence[DemoRequest], base_url: str, model: str, on_answer: Callable[[Answer], None] | None
) -> list[Answer]:
    start = time.perf_counter()

    async def send_at_its_time(request: DemoRequest) -> Answer:
        await asyncio.sleep(max(0.0, request.start_s - (time.perf_counter() - start)))
        answer = await _send(client, model, request)
        if on_answer is not None:
            on_answer(answer)
        return answer

    # no retries: a request sent twice would be two requests to the server
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
        default_headers=OWN_CONNECTION,
    ) as client:
        return list(await asyncio.gather(*map(send_at_its_time, requests)))


async def _send(client: AsyncOpenAI, model: str, request: DemoRequest) -> Answer:
    try:
        if request.stream:
            return await _send_streamed(client, model, request)
        sent = time.perf_counter()
        response = await _create(client, model, request)
        return Answer(
            request=request,
            response_id=response.id,
            prompt_tokens=response.usage.prompt_tokens,
            output_tokens=response.usage.completion_tokens,
            finish_reason=response.choices[0].finish_reason,
            e2e_s=time.perf_counter() - sent,
        )
    except OpenAIError as error:
        cause = f" ({error.__cause__!r})" if error.__cause__ else ""  # "Connection error." alone says too little
        return Answer(request=request, error=f"{type(error).__name__}: {error}{cause}")


async def _send_streamed(client: AsyncOpenAI, model: str, request: DemoRequest) -> Answer:
    sent = time.perf_counter()
    response_id = finish_reason = ""
    ttft_s: float | None = None
    usage: Any = None
    async for chunk in await _create(client, model, request):
        response_id = chunk.id
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if request.kind is Kind.CHAT else choice.text
            if text and ttft_s is None:
                ttft_s = time.perf_counter() - sent
            finish_reason = choice.finish_reason or finish_reason
    e2e_s = time.perf_counter() - sent
    if usage is None:
        return Answer(request=request, response_id=response_id, error="the stream ended before its last chunk")
    return Answer(
        request=request,
        response_id=response_id,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        finish_reason=finish_reason,
        e2e_s=e2e_s,
        ttft_s=ttft_s,
    )


async def _create(client: AsyncOpenAI, model: str, request: DemoRequest) -> Any:
    extra: dict[str, Any] = {"ignore_eos": True}
    if request.hints:
        extra["vllm_xargs"] = dict(request.hints)
    arguments: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": 1.0,  # without a seed, with which vLLM ends on a CPU once a prompt is computed in chunks
        "stream": request.stream,
        "extra_body": extra,
    }
    if request.stop is not None:
        arguments["stop"] = request.stop
    if request.stream:
        arguments["stream_options"] = {"include_usage": True}
    if request.kind is Kind.CHAT:
        arguments["messages"] = [{"role": "user", "content": request.prompt}]
        return await client.chat.completions.create(**arguments)
    return await client.completions.create(prompt=request.prompt, **arguments)
