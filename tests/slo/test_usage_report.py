"""The report in ``usage``: what it says, and how it gets into vLLM's own responses and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse, UsageInfo

from vllm_ext.contract.objective import NO_SLO, Slo
from vllm_ext.slo import usage_report
from vllm_ext.slo.outcome import SloOutcome
from vllm_ext.slo.usage_report import Report, along, asked, expect

PROMISED = Slo(ttft_s=0.5, tbt_s=0.1)
USAGE = UsageInfo(prompt_tokens=3, completion_tokens=5, total_tokens=8)


def request(**xargs: Any) -> Any:
    return SimpleNamespace(vllm_xargs=xargs or None)


def judged(slo: Slo = PROMISED, *, ttft_s: float = 0.25, gap_s: float | None = 0.02, left: int = 0) -> SloOutcome:
    found = SloOutcome(None, slo, "gold", left)  # type: ignore[arg-type]
    found.ttft_s, found.max_tbt_s, found.jct_s = ttft_s, gap_s, ttft_s + 1
    return found


def report(*requests: SloOutcome) -> Report:
    found = Report()
    for one in requests:
        found.add(one)
    return found


EXPECTED = {
    "ttft_ms": 250.0,
    "max_tbt_ms": 20.0,
    "jct_ms": 1250.0,
    "slo": {
        "ttft": {"objective_ms": 500.0, "met": True},
        "tbt": {"objective_ms": 100.0, "met": True},
        "met": True,
    },
    "tier": "gold",
}


def test_a_report_says_what_was_measured_and_what_was_met() -> None:
    assert report(judged()).usage() == EXPECTED


def test_a_missed_objective_is_missed_over_all() -> None:
    usage = report(judged(gap_s=0.2)).usage()
    assert usage is not None
    assert (usage["slo"]["ttft"]["met"], usage["slo"]["tbt"]["met"], usage["slo"]["met"]) == (True, False, False)


def test_without_objectives_only_times_are_told() -> None:
    usage = report(judged(NO_SLO, gap_s=None)).usage()
    assert usage == {"ttft_ms": 250.0, "max_tbt_ms": None, "jct_ms": 1250.0, "slo": {}, "tier": "gold"}


def test_of_several_prompts_the_worst_is_told() -> None:
    """The second is slower, but its longer prompt allows more; the first is the one nearest to its bound."""
    usage = report(judged(Slo(ttft_s=0.2)), judged(Slo(ttft_s=2.0), ttft_s=0.4)).usage()
    assert usage is not None
    assert usage["ttft_ms"] == 400.0
    assert usage["slo"] == {"ttft": {"objective_ms": 200.0, "met": False}, "met": False}


def test_nothing_is_told_of_what_has_not_ended() -> None:
    assert report(judged(), judged(left=1)).usage() is None
    assert report().usage() is None


def whole() -> CompletionResponse:
    choice = CompletionResponseChoice(index=0, text="x", finish_reason="stop")
    return CompletionResponse(model="m", choices=[choice], usage=USAGE.model_copy())


def test_a_response_gets_the_report_into_its_usage() -> None:
    sent = along(whole(), report(judged())).model_dump()
    assert sent["usage"]["vllm_ext"] == EXPECTED
    assert sent["usage"]["completion_tokens"] == 5


def test_a_response_for_which_none_was_asked_is_not_touched() -> None:
    answer = whole()
    assert along(answer, None) is answer
    assert along(answer, report()).model_dump() == whole().model_copy(update={"id": answer.id}).model_dump()


def test_an_error_has_no_usage_and_is_passed_on() -> None:
    error = ErrorResponse(error=ErrorInfo(message="no", type="x", code=400))
    assert along(error, report(judged())) is error


def stream_of(kind: str) -> list[str]:
    """A stream as vLLM writes it, with the usage beside each choice as well."""
    if kind == "chat":
        end: Any = ChatCompletionStreamResponse(model="m", choices=[], usage=USAGE.model_copy())
        first = 'data: {"id":"c","choices":[{"index":0,"delta":{"content":"é \\"choices\\":[] x"}}],"usage":null}\n\n'
        last = end.model_dump_json(exclude_unset=True, exclude_none=True)
    else:
        choice = CompletionResponseStreamChoice(index=0, text='é "choices":[] x')
        chunk = CompletionStreamResponse(model="m", choices=[choice], usage=USAGE.model_copy())
        first = f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        end = CompletionStreamResponse(model="m", choices=[], usage=USAGE.model_copy())
        last = end.model_dump_json(exclude_unset=False, exclude_none=True)
    return [first, f"data: {last}\n\n", "data: [DONE]\n\n"]


async def streamed(chunks: list[str]) -> AsyncGenerator[str, None]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_stream_gets_the_report_into_its_last_chunk_and_nowhere_else(kind: str) -> None:
    chunks = stream_of(kind)
    sent = [chunk async for chunk in along(streamed(chunks), report(judged()))]
    assert (sent[0], sent[2]) == (chunks[0], chunks[2])
    before, after = (json.loads(text.removeprefix("data: ")) for text in (chunks[1], sent[1]))
    assert after["usage"].pop("vllm_ext") == EXPECTED
    assert after == before
    assert sent[1].endswith("}\n\n")


async def test_a_stream_that_is_left_is_closed() -> None:
    closed = False

    async def endless() -> AsyncGenerator[str, None]:
        nonlocal closed
        try:
            while True:
                yield "data: {}\n\n"
        finally:
            closed = True

    answer = along(endless(), report(judged()))
    await anext(answer)
    await answer.aclose()
    assert closed


async def test_the_request_is_found_in_the_task_that_handles_it() -> None:
    async def handle(**xargs: Any) -> list[SloOutcome]:
        found = asked(request(**xargs))
        expect(judged())
        return [] if found is None else found._outcomes

    assert len(await asyncio.create_task(handle(slo_report=True))) == 1
    assert await asyncio.create_task(handle(slo_report=False)) == []
    assert await asyncio.create_task(handle()) == []


async def test_a_stream_finds_it_in_the_task_in_which_it_is_read() -> None:
    one = judged()

    async def answer() -> AsyncGenerator[str, None]:
        expect(one)  # the engine is first called when the stream is first read
        yield stream_of("chat")[1]

    async def handle() -> Any:
        return along(answer(), asked(request(slo_report=True)))

    async def read(stream: Any) -> str:
        return "".join([chunk async for chunk in stream])

    stream = await asyncio.create_task(handle())
    assert '"vllm_ext":{"ttft_ms":250.0' in await asyncio.create_task(read(stream))


async def test_a_task_s_next_request_does_not_get_into_the_report_of_the_one_before() -> None:
    async def handle() -> Report | None:
        first = asked(request(slo_report=True))
        asked(request())
        expect(judged())
        return first

    first = await asyncio.create_task(handle())
    assert first is not None
    assert first._outcomes == []
    assert usage_report._report.get() is None
