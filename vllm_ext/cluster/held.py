"""Answers of a replica that are lost before they began are given by another one.

Ray's proxy may send a request elsewhere as long as it has got nothing of an answer, or one with status 503. So the head
of an answer waits for the first byte behind it, which of a stream is its first token; and who would be told of a dead
engine with status 500 is told 503.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_RETRY_AFTER_S = 2
_Message = MutableMapping[str, Any]


class Held:
    """Sends the head of an answer together with its first byte, and a dead engine's as one that is sent elsewhere.

    Args:
        app: What answers.
        is_ill: Whether the engine is known, or found now, not to serve.
    """

    def __init__(self, app: ASGIApp, is_ill: Callable[[], Awaitable[bool]]) -> None:
        self._app, self._is_ill = app, is_ill

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head: _Message | None = None
        replaced = False

        async def held(message: _Message) -> None:
            nonlocal head, replaced
            if replaced:
                return
            if message["type"] == "http.response.start":
                if message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR and await self._is_ill():
                    replaced = True
                    await _send_elsewhere(send)
                    return
                head = message
                return
            if head is not None and (message.get("body") or not message.get("more_body", False)):
                start, head = head, None
                await send(start)
            if head is None:
                await send(message)

        await self._app(scope, receive, held)


async def _send_elsewhere(send: Send) -> None:
    body = b'{"error": {"message": "the replica\'s engine has died; try again", "type": "server_error", "code": 503}}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(_RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": int(HTTPStatus.SERVICE_UNAVAILABLE), "headers": headers})
    await send({"type": "http.response.body", "body": body})
