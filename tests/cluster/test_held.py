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
