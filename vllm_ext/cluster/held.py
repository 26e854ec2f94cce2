"""Answers of a replica that are lost before they began are given by another one.

Ray's proxy may send a request elsewhere as long as it has got nothing of an answer, or one with status 503. So the head
of an answer waits for the first byte behind it, which of a stream is its first token; and a failure of a dead engine,
told by status 500 or by the first event of a stream, becomes 503.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

_RETRY_AFTER_S = 2
_ERROR_EVENTS, _COMMENT = (b'data: {"error"', b"event: error"), b":"
"""How events of a stream begin: one that tells of an error, and one that says nothing, to keep a connection alive."""
_OURS = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""Status of failures that are a replica's own; 503 may be that of a full one."""
_Message = MutableMapping[str, Any]


class Held:
    """Sends the head of an answer together with its first byte, and a dead engine's as one that is sent elsewhere.

    Args:
        app: What answers.
        is_ill: Whether the engine is known, or found now, not to serve.
        ended: Told of each request of the API that ends: whether it failed.
    """

    def __init__(
        self, app: ASGIApp, is_ill: Callable[[], Awaitable[bool]], ended: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._app, self._is_ill, self._ended = app, is_ill, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._is_ill)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            answer.failed = not isinstance(error, OSError | ClientDisconnect)
            if answer.begun or not await self._is_ill():
                raise
            await _send_elsewhere(send)
        finally:
            if scope.get("path", "").startswith("/v1/") and scope.get("method") == "POST":
                self._ended(answer.failed)


class _Answer:
    """One answer, which begins with the first byte that says something."""

    def __init__(self, send: Send, is_ill: Callable[[], Awaitable[bool]]) -> None:
        self._send, self._is_ill = send, is_ill
        self._waiting: list[_Message] = []
        self.begun = self.failed = self._replaced = False

    async def send(self, message: _Message) -> None:
        """Take a message of the application's."""
        if self._replaced:
            return
        if self.begun:
            await self._send(message)
            return
        if message.get("body") or message["type"] == "http.response.start" or not message.get("more_body", False):
            self._waiting.append(message)
        if message["type"] == "http.response.start":
            failed = message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR
            self.failed = message["status"] in _OURS
        else:
            body = message.get("body", b"")
            failed = body.startswith(_ERROR_EVENTS)  # a stream has status 200 before it is known that it fails
            self.failed |= failed
            if message.get("more_body", False) and not failed and (not body or body.startswith(_COMMENT)):
                return
        if failed and await self._is_ill():
            self._replaced = self.begun = True
            await _send_elsewhere(self._send)
        elif message["type"] != "http.response.start":
            self.begun = True
            for one in self._waiting:
                await self._send(one)


async def _send_elsewhere(send: Send) -> None:
    body = b'{"error": {"message": "the replica\'s engine has died; try again", "type": "server_error", "code": 503}}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(_RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": int(HTTPStatus.SERVICE_UNAVAILABLE), "headers": headers})
    await send({"type": "http.response.body", "body": body})
