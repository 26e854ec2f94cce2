"""Hints over HTTP, with vLLM's own request models, handlers and error bodies; the engine behind them is not needed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError

from vllm_ext.hints import HintError
from vllm_ext.hooks import registry
from vllm_ext.patches.http_hints import add_hints
from vllm_ext.slo import misspelt_hints

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "completion": (CompletionRequest, {"model": "m", "prompt": "x"}),
    "chat": (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "responses": (ResponsesRequest, {"model": "m", "input": "x"}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def make_request(kind: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[Any, Request]:
    """Return the validated request and the raw one, as vLLM's routes hand them to the handler."""
    cls, least = KINDS[kind]
    sent = {**least, **body}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(sent).encode(), "more_body": False}

    encoded = [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    return cls(**sent), Request({"type": "http", "method": "POST", "headers": encoded}, receive)


@kinds
async def test_a_request_without_hints_is_left_untouched(kind: str) -> None:
    request, raw = make_request(kind, {"accept": "*/*"}, unknown_field=3)
    before = request.model_dump()
    await add_hints(request, raw)
    assert request.vllm_xargs is None
    assert request.model_dump() == before


@kinds
async def test_foreign_arguments_are_left_untouched(kind: str) -> None:
    request, raw = make_request(kind, vllm_xargs={"other": 1, "bench_output_len": 3})
    await add_hints(request, raw)
    assert request.vllm_xargs == {"other": 1, "bench_output_len": 3}


@kinds
async def test_headers_and_body_extension_join_the_arguments(kind: str) -> None:
    request, raw = make_request(
        kind, {"X-LLM-D-SLO-TTFT-MS": "250"}, nvext={"agent_hints": {"osl": 9}}, vllm_xargs={"tbt_slo_ms": 50}
    )
    await add_hints(request, raw)
    assert request.vllm_xargs == {"ttft_slo_ms": 250.0, "osl": 9, "tbt_slo_ms": 50}


PRECEDENCE = [
    ({"osl": 1}, {"agent_hints": {"osl": 2}}, 1),
    ({}, {"agent_hints": {"osl": 2}}, 2),
    ({}, None, 3),
]


@pytest.mark.parametrize(("xargs", "nvext", "expected"), PRECEDENCE, ids=["vllm_xargs", "nvext", "header"])
async def test_the_body_wins_over_headers(xargs: dict[str, Any], nvext: Any, expected: int) -> None:
    request, raw = make_request("completion", {"x-dynamo-osl": "3"}, vllm_xargs=xargs, nvext=nvext)
    await add_hints(request, raw)
    assert request.vllm_xargs["osl"] == expected


@kinds
async def test_the_arguments_reach_the_sampling_parameters(kind: str) -> None:
    request, raw = make_request(kind, {"x-dynamo-osl": "3"})
    await add_hints(request, raw)
    params = request.to_sampling_params(16, {})
    assert params.extra_args == {"osl": 3}


MALFORMED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "negative": ({}, {"vllm_xargs": {"ttft_slo_ms": -1}}, "ttft_slo_ms"),
    "zero": ({}, {"vllm_xargs": {"tbt_slo_ms": 0}}, "tbt_slo_ms"),
    "not a number": ({}, {"vllm_xargs": {"jct_slo_ms": math.nan}}, "jct_slo_ms"),
    "infinite": ({}, {"vllm_xargs": {"jct_slo_ms": math.inf}}, "jct_slo_ms"),
    "text": ({}, {"vllm_xargs": {"ttft_slo_ms": "250"}}, "ttft_slo_ms"),
    "true": ({}, {"vllm_xargs": {"ttft_slo_ms": True}}, "ttft_slo_ms"),
    "true among others": ({}, {"vllm_xargs": {"other": 1, "osl": True}}, "osl"),
    "report asked for with a number": ({}, {"vllm_xargs": {"slo_report": 1}}, "slo_report"),
    "report declined with a number": ({}, {"vllm_xargs": {"slo_report": 0}}, "slo_report"),
    "report asked for with a text": ({}, {"vllm_xargs": {"slo_report": "true"}}, "slo_report"),
    "long conversation": ({}, {"vllm_xargs": {"conversation_id": "x" * 257}}, "conversation_id"),
    "client key": ({}, {"vllm_xargs": {"client_key": "me"}}, "client_key"),
    "header": ({"x-llm-d-slo-ttft-ms": "soon"}, {}, "x-llm-d-slo-ttft-ms"),
    "length header": ({"x-dynamo-osl": "0"}, {}, "x-dynamo-osl"),
    "header, though the body says better": ({"x-dynamo-osl": "0"}, {"vllm_xargs": {"osl": 3}}, "x-dynamo-osl"),
    "priority header": ({"X-Vllm-Priority": "abc"}, {}, "x-vllm-priority"),
    "body extension": ({}, {"nvext": {"agent_hints": {"osl": 0}}}, "nvext.agent_hints.osl"),
    "body extension of another kind": ({}, {"nvext": 3}, "nvext"),
}
malformed = pytest.mark.parametrize(("headers", "body", "field"), MALFORMED.values(), ids=MALFORMED.keys())


@kinds
@malformed
async def test_a_malformed_hint_is_refused_by_its_name_and_changes_nothing(
    kind: str, headers: dict[str, str], body: dict[str, Any], field: str
) -> None:
    request, raw = make_request(kind, headers, **body)
    before = request.vllm_xargs
    with pytest.raises(HintError) as caught:
        await add_hints(request, raw)
    assert caught.value.field == field
    assert request.vllm_xargs == before


@kinds
async def test_hints_that_nobody_would_read_are_counted_and_named_once(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misspelt_hints, "_known", set())
    monkeypatch.setattr(misspelt_hints, "_named", set())
    monkeypatch.setattr(misspelt_hints.logger, "propagate", True)
    monkeypatch.setattr(misspelt_hints.logger.parent, "propagate", True)
    before = misspelt_hints._counter()._value.get()
    with caplog.at_level("WARNING"):
        for _ in range(3):
            request, raw = make_request(kind, {}, ttft_slo_ms=100, vllm_xargs={"other": 1})
            await add_hints(request, raw)
            misspelt_hints.note({"ttft_slo": 100, "oslx": 3, "other": 1, "osl": 2})
    assert misspelt_hints._counter()._value.get() == before + 9
    said = [record.getMessage() for record in caplog.records if record.name == misspelt_hints.logger.name]
    assert len(said) == 3
    assert "'ttft_slo_ms', which is no hint and is ignored: hints belong in 'vllm_xargs'" in said[0]
    assert any("'ttft_slo'" in line and "did you mean 'ttft_slo_ms'?" in line for line in said)
    assert any("'oslx'" in line and "did you mean 'osl'?" in line for line in said)


def test_a_client_cannot_fill_the_log_or_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misspelt_hints, "_known", set())
    monkeypatch.setattr(misspelt_hints, "_named", set())
    for number in range(500):
        misspelt_hints.note({f"ttft_slo_ms{number}": 1, f"foreign{number}": 2})
    assert len(misspelt_hints._named) <= 64
    assert len(misspelt_hints._known) <= 65


async def test_the_number_one_is_not_mistaken_for_true() -> None:
    request, raw = make_request("completion", vllm_xargs={"ttft_slo_ms": 1, "osl": 1})
    await add_hints(request, raw)
    assert request.vllm_xargs == {"ttft_slo_ms": 1, "osl": 1}


@kinds
@pytest.mark.parametrize("value", [True, False])
async def test_a_flag_reaches_the_sampling_parameters_as_it_was_sent(kind: str, value: bool) -> None:
    request, raw = make_request(kind, vllm_xargs={"slo_report": value, "ttft_slo_ms": 1})
    await add_hints(request, raw)
    extra = request.to_sampling_params(16, {}).extra_args
    assert (extra["slo_report"] is value, extra["ttft_slo_ms"]) == (True, 1)


async def test_without_a_raw_body_a_number_is_taken_for_the_flag_it_was() -> None:
    request, _ = make_request("completion", vllm_xargs={"slo_report": True, "osl": 1})
    await add_hints(request, None)
    assert request.vllm_xargs["slo_report"] is True


@pytest.fixture
def handler() -> Iterator[OpenAIServingCompletion]:
    """vLLM's handler with our hook and without an engine; it notes whose remote KV it would release."""
    undo = registry.install("http")
    handler = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    handler.has_kv_connector = True
    handler.released = []  # type: ignore[attr-defined]

    async def release(request_id: str, *_: Any, **__: Any) -> None:
        handler.released.append(request_id)  # type: ignore[attr-defined]

    handler.engine_client = SimpleNamespace(  # type: ignore[assignment]
        notify_kv_transfer_request_rejected=release, vllm_config=SimpleNamespace(additional_config={})
    )
    yield handler
    undo()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@malformed
async def test_the_client_gets_status_400_with_the_field(
    handler: OpenAIServingCompletion, stream: bool, headers: dict[str, str], body: dict[str, Any], field: str
) -> None:
    request, raw = make_request("completion", headers, stream=stream, **body)
    with pytest.raises(VLLMValidationError) as caught:
        await handler.create_completion(request, raw)
    error = create_error_response(caught.value).error
    assert (error.code, error.type, error.param) == (400, "BadRequestError", field)
    assert field in error.message


UNLAWFUL_LIVES = [({"kv_ttl_s": 1.5}, None), ({"kv_ttl_s": 61}, "salt")]


@pytest.mark.parametrize(("xargs", "salt"), UNLAWFUL_LIVES, ids=["without a salt", "longer than the server's"])
async def test_a_life_that_its_client_may_not_set_is_refused(
    handler: OpenAIServingCompletion, xargs: dict[str, Any], salt: str | None
) -> None:
    options = {"vllm_ext": {"kv_tier": {"gib": 1.0, "ttl_s": 60.0}}}
    handler.engine_client.vllm_config = SimpleNamespace(additional_config=options)  # type: ignore[misc]
    request, raw = make_request("completion", vllm_xargs=xargs, cache_salt=salt)
    with pytest.raises(VLLMValidationError) as caught:
        await handler.create_completion(request, raw)
    error = create_error_response(caught.value).error
    assert (error.code, error.param) == (400, "kv_ttl_s")


@pytest.mark.parametrize(
    ("sharing", "headers", "named"),
    [
        ({"by": "key"}, {"Authorization": "Bearer one"}, True),
        ({"by": "key"}, {"X-Api-Key": "one"}, True),
        ({"by": "key"}, {}, False),
        ({}, {"Authorization": "Bearer one"}, True),
        ({"by": "tag"}, {"Authorization": "Bearer one"}, False),
    ],
    ids=str,
)
async def test_clients_are_named_by_a_hash_of_their_key_where_they_take_turns_by_it(
    handler: OpenAIServingCompletion, sharing: dict[str, str], headers: dict[str, str], named: bool
) -> None:
    options = {"vllm_ext": {"system": "fair", "sharing": sharing}}
    handler.engine_client.vllm_config = SimpleNamespace(additional_config=options)  # type: ignore[misc]
    request, raw = make_request("completion", headers)
    with contextlib.suppress(AttributeError):  # there is no engine behind it
        await handler.create_completion(request, raw)
    key = (request.vllm_xargs or {}).get("client_key", "")
    assert bool(key) == named
    assert "one" not in key


@pytest.mark.parametrize("osl", [None, 30])
async def test_clients_are_named_where_their_word_is_weighed(handler: OpenAIServingCompletion, osl: int | None) -> None:
    handler.engine_client.vllm_config = SimpleNamespace(additional_config={})  # type: ignore[misc]
    request, raw = make_request(
        "completion", {"Authorization": "Bearer one", **({} if osl is None else {"x-dynamo-osl": str(osl)})}
    )
    with contextlib.suppress(AttributeError):  # there is no engine behind it
        await handler.create_completion(request, raw)
    assert bool((request.vllm_xargs or {}).get("client_key")) == (osl is not None)


async def test_a_refusal_releases_the_remote_kv_of_the_request(handler: OpenAIServingCompletion) -> None:
    request, raw = make_request(
        "completion", vllm_xargs={"osl": 0}, kv_transfer_params={"do_remote_prefill": True}, request_id="r"
    )
    with pytest.raises(VLLMValidationError):
        await handler.create_completion(request, raw)
    assert handler.released == ["r"]  # type: ignore[attr-defined]


async def test_an_accepted_request_goes_on_to_upstream(handler: OpenAIServingCompletion) -> None:
    """Upstream answers a stream with beam search by itself, before it needs an engine."""
    handler.create_error_response = create_error_response  # type: ignore[assignment, method-assign]
    request, raw = make_request("completion", {"x-dynamo-osl": "3"}, stream=True, use_beam_search=True)
    answer: Any = await handler.create_completion(request, raw)
    assert "beam search" in answer.error.message
    assert request.vllm_xargs == {"osl": 3}
