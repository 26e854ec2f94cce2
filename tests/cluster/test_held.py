"""What clients, and the proxy before them, get of answers that fail: nothing before a token, 503 of the dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from vllm_ext.cluster.held import Held


async def _send(app: Any, *, fails_after: int | None = None) -> list[dict[str, Any]]:
    """Return the messages of an answer, up to its failure."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    try:
        await app({"type": "http"}, receive, send)
    except RuntimeError:
        assert fails_after is not None
    return sent


def _app(chunks: list[bytes], status: int = 200, fails_after: int | None = None) -> Any:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for number, chunk in enumerate(chunks):
            if number == fails_after:
                raise RuntimeError("the replica ends here")
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if fails_after == len(chunks):
            raise RuntimeError("the replica ends here")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def _well() -> bool:
    return False


async def _ill() -> bool:
    return True


@pytest.mark.parametrize(("fails_after", "expected"), [(0, []), (1, ["http.response.start", "http.response.body"])])
async def test_nothing_is_sent_before_the_first_byte(fails_after: int, expected: list[str]) -> None:
    app = _app([b"one", b"two"], fails_after=fails_after)
    sent = await _send(Held(app, _well), fails_after=fails_after)
    assert [message["type"] for message in sent] == expected


async def test_chunks_pass_as_they_come() -> None:
    sent = await _send(Held(_app([b"", b"one", b"two"]), _well))
    assert [(message["type"][14:], message.get("body")) for message in sent] == [
        ("start", None), ("body", b"one"), ("body", b"two"), ("body", b""),
    ]  # fmt: skip


async def test_an_answer_without_a_body_passes() -> None:
    sent = await _send(Held(_app([], status=204), _well))
    assert [message["type"][14:] for message in sent] == ["start", "body"]


@pytest.mark.parametrize(("status", "is_ill", "told"), [(500, _ill, 503), (500, _well, 500), (400, _ill, 400)])
async def test_a_failure_of_a_dead_engine_is_one_to_be_tried_elsewhere(status: int, is_ill: Any, told: int) -> None:
    sent = await _send(Held(_app([b"what it says"], status=status), is_ill))
    assert sent[0]["status"] == told
    retry = [value for name, value in sent[0]["headers"] if name == b"retry-after"]
    assert len(retry) == (told == 503)
    assert (b"what it says" in b"".join(message.get("body", b"") for message in sent)) is (told != 503)


@pytest.mark.parametrize(("is_ill", "status"), [(_ill, 503), (_well, 200)])
async def test_a_stream_that_begins_with_an_error_of_a_dead_engine_is_one_to_be_tried_elsewhere(
    is_ill: Any, status: int
) -> None:
    """vLLM ends such a stream as if it were whole."""
    sent = await _send(Held(_app([b'data: {"error": {}}\n\n', b"data: [DONE]\n\n"]), is_ill))
    assert sent[0]["status"] == status
    assert (b"[DONE]" in b"".join(message.get("body", b"") for message in sent)) is (status == 200)


async def test_an_error_behind_the_first_token_passes() -> None:
    sent = await _send(Held(_app([b"data: {}\n\n", b'data: {"error": {}}\n\n']), _ill))
    assert [message.get("status") or message["body"] for message in sent[:3]] == [
        200, b"data: {}\n\n", b'data: {"error": {}}\n\n',
    ]  # fmt: skip


async def test_what_only_keeps_a_stream_alive_does_not_begin_it() -> None:
    alive = b": keep-alive\n\n"
    sent = await _send(Held(_app([alive, alive, b"data: {}\n\n"], fails_after=2), _well), fails_after=2)
    assert sent == []
    sent = await _send(Held(_app([alive, b"data: {}\n\n"]), _well))
    assert [message.get("body") for message in sent] == [None, alive, b"data: {}\n\n", b""]


@pytest.mark.parametrize("is_ill", [_ill, _well])
async def test_a_failure_without_an_answer_is_tried_elsewhere_if_the_engine_is_dead(is_ill: Any) -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("nobody handles it")

    sent = await _send(Held(app, is_ill), fails_after=0)
    assert [message.get("status") for message in sent] == ([503, None] if is_ill is _ill else [])


def test_it_stands_around_an_application() -> None:
    def words() -> Iterator[str]:
        yield from ("a", "b")

    async def stream(_: Request) -> Response:
        return StreamingResponse(words(), media_type="text/event-stream")

    async def fails(_: Request) -> Response:
        return JSONResponse({"error": "the engine"}, status_code=500)

    app = Starlette(routes=[Route("/stream", stream), Route("/fails", fails)])
    app.add_middleware(Held, is_ill=_ill)
    client = TestClient(app)
    assert client.get("/stream").text == "ab"
    answer = client.get("/fails")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        (_app([b"fine"]), False),
        (_app([b"wrong"], status=400), False),
        (_app([b"full"], status=503), False),
        (_app([b"oh"], status=500), True),
        (_app([b'data: {"error": "oh"}']), True),
        (_app([b"event: error\ndata: {}"]), True),
        (_app([b"one"], fails_after=0), True),
    ],
)
async def test_it_is_told_which_requests_failed_for_reasons_of_the_replica(answer: Any, failed: bool) -> None:
    told: list[bool] = []
    held = Held(answer, _well, told.append)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await held(scope | {"path": "/v1/chat/completions", "method": "POST"}, receive, send)

    await _send(app, fails_after=0)
    assert told == [failed]


async def test_other_paths_are_not_counted() -> None:
    told: list[bool] = []
    await _send(Held(_app([b"oh"], status=500), _well, told.append))
    assert told == []
