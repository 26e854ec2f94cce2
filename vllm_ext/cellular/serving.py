"""The HTTP server: `/v1/infer`, sessions, `/health`, `/metrics`."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from vllm_ext.cellular import requests as accepted
from vllm_ext.cellular.arena import ArenaFull
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.metrics import EngineMetrics
from vllm_ext.cellular.models.base import RequestError
from vllm_ext.cellular.requests import EngineBusy, EngineError, Session, SessionClosed
from vllm_ext.hints import HintError, from_extra_args, from_headers

MAX_BODY_BYTES = 8 << 20
_READERS = 4
"""Requests that are read at once; more would only take turns with those that are served."""
_CONTROL = ("stream", "session", "vllm_xargs")
"""Fields of a request that are not the model's."""


class HttpError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


_STATUS = {HttpError: 0, RequestError: 400, HintError: 400, SessionClosed: 409, EngineBusy: 503, EngineError: 500}
"""Errors and how they are answered; an `HttpError` says itself."""


class Sessions:
    """Sessions by id; one that is idle for long is closed. `get` may be called from any thread."""

    def __init__(self, engine: CellularEngine, most: int, idle_s: float) -> None:
        self._engine, self._most, self._idle_s = engine, most, idle_s
        self._known: dict[str, Session] = {}

    def open(self) -> str:
        """Return the id of a new session."""
        now = time.monotonic()
        for name, session in list(self._known.items()):
            if now - session.used_s > self._idle_s and session.running is None:
                self.close(name)
        if not self._engine.model.held:
            raise HttpError(400, f"sessions: {self._engine.model.kind} has none; send requests without")
        if len(self._known) >= self._most:
            raise HttpError(
                503, f"{self._most} sessions are open, as many as --max-sessions allows", {"Retry-After": "5"}
            )
        name = secrets.token_hex(16)
        try:
            self._known[name] = self._engine.open_session()
        except ArenaFull as full:
            raise HttpError(503, str(full), {"Retry-After": "5"}) from full
        return name

    def get(self, name: object) -> Session:
        """Return a session and note that it is used."""
        session = self._known.get(name) if isinstance(name, str) else None
        if session is None:
            raise HttpError(400, f"session={name!r:.60}: must be the id of an open session, from POST /v1/sessions")
        session.used_s = time.monotonic()
        return session

    def close(self, name: str) -> None:
        """Close a session."""
        self.get(name).close()
        del self._known[name]


class Inference:
    """Takes requests from HTTP to the engine and back."""

    def __init__(self, engine: CellularEngine, sessions: Sessions, default_slo_ms: float | None) -> None:
        self._engine, self._sessions, self._default_slo_ms = engine, sessions, default_slo_ms
        # One thread where requests are served in the order in which they came.
        self._readers = ThreadPoolExecutor(1 if engine.model.held else _READERS, thread_name_prefix="cell-reader")

    async def __call__(self, request: Request) -> Response:
        """Serve one request."""
        body, loop = await _body(request), asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()
        with self._engine.admission() as place:
            handle = await loop.run_in_executor(
                self._readers, self._accept, body, request.headers, place, lambda value: _tell(loop, events, value)
            )
        if handle.on_output is not None:
            handle.future.add_done_callback(lambda _: _tell(loop, events, handle))
            return self._streamed(handle, events)
        gone: asyncio.Future[Any] = asyncio.create_task(_disconnected(request))
        result: asyncio.Future[Any] = asyncio.wrap_future(handle.future)
        await asyncio.wait([gone, result], return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            self._engine.abort(handle)
            return Response(status_code=499)
        gone.cancel()
        if result.cancelled():
            raise SessionClosed
        return JSONResponse(_finite(handle.answer(result.result())))

    def _accept(
        self, raw: bytes, headers: Mapping[str, str], place: object, tell: Callable[[Any], None]
    ) -> accepted.Request:
        """Read a request and lay it out, outside of the event loop."""
        body = _object(raw)
        stream, extra = body.get("stream", False), body.get("vllm_xargs", {})
        if not isinstance(stream, bool):
            raise HttpError(400, f"stream={stream!r:.60}: must be true or false")
        if stream and self._engine.model.streamed is None:
            raise HttpError(400, f"stream=True: results of {self._engine.model.kind} do not grow; leave it out")
        if not isinstance(extra, dict):
            raise HttpError(400, f"vllm_xargs={extra!r:.60}: must be an object")
        hints = from_extra_args({**from_headers(headers), **extra})
        slo_ms = hints.jct_slo_ms or hints.ttft_slo_ms or self._default_slo_ms
        return self._engine.accept(
            {name: value for name, value in body.items() if name not in _CONTROL}, place,
            slo_s=slo_ms / 1e3 if slo_ms else None, on_output=tell if stream else None,
            session=self._sessions.get(body["session"]) if "session" in body else None,
        )  # fmt: skip

    def _streamed(self, handle: accepted.Request, events: asyncio.Queue[Any]) -> Response:
        async def lines() -> AsyncIterator[str]:
            try:
                while (value := await events.get()) is not handle:
                    yield f"data: {json.dumps({'output': value})}\n\n"
                try:
                    last = _finite(handle.result(0))
                except CancelledError:
                    last = {"error": str(SessionClosed())}
                except EngineError as error:
                    last = {"error": str(error)}
                yield f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"
            finally:
                self._engine.abort(handle)

        return StreamingResponse(lines(), media_type="text/event-stream")


def create_app(
    engine: CellularEngine,
    *,
    default_slo_ms: float | None = None,
    max_sessions: int = 1024,
    session_idle_s: float = 300.0,
) -> FastAPI:
    """Return the server's application.

    Args:
        engine: Closed by the caller.
        default_slo_ms: Objective of requests that name none; None: they have none.
        max_sessions: Open sessions beyond which new ones are refused.
        session_idle_s: After which a session may be closed to make room.
    """
    app = FastAPI(title=f"vllm-ext cellular: {engine.model.kind}", docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()
    EngineMetrics(engine, registry)
    sessions = Sessions(engine, max_sessions, session_idle_s)
    app.add_api_route(
        "/v1/infer", Inference(engine, sessions, default_slo_ms).__call__, methods=["POST"], response_model=None
    )

    @app.post("/v1/sessions")
    async def open_session() -> dict[str, str]:
        return {"session": sessions.open()}

    @app.delete("/v1/sessions/{name}")
    async def close_session(name: str) -> dict[str, str]:
        sessions.close(name)
        return {"session": name}

    @app.get("/health")
    async def health() -> Response:
        found = {"workers": engine.options.workers, "dead": engine.dead_workers, "restarts": engine.restarts}
        return JSONResponse(found, 200 if engine.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _answer(status))
    return app


def _answer(status: int) -> Callable[[Request, Exception], Response]:
    def answer(_: Request, error: Exception) -> Response:
        code, headers = (error.status, error.headers) if isinstance(error, HttpError) else (status, {})
        if isinstance(error, EngineBusy):
            headers = {"Retry-After": str(round(error.retry_after_s + 0.5))}
        field = getattr(error, "field", None)
        return JSONResponse({"error": {"message": str(error), "param": field, "code": code}}, code, headers)

    return answer


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HttpError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise HttpError(400, f"body: must be a JSON object, not {type(found).__name__}")
    return found


def _finite(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that JSON can hold."""
    try:
        json.dumps(answer, allow_nan=False)
    except ValueError as error:
        raise EngineError("the result has numbers that are not finite, which JSON cannot hold") from error
    return answer


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.60} is given more than once")
    return found


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _tell(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], value: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, value)
