"""An administrator's way to the engine cores of a server, below ``/vllm-ext`` on the server's own port.

Not below ``/v1``, which is what clients reach with the server's API key. This has a key of its own,
``VLLM_EXT_ADMIN_KEY``; no other opens it, and it opens nothing else. What routers read needs none. Every engine core
that this server talks to is asked, and every answer names the engine that gave it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from vllm.v1.engine.exceptions import EngineDeadError

PREFIX = "/vllm-ext"
STATE = "vllm_ext_admin"
"""Under which routes find the engines in the application's state."""
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
_PATIENCE_S = 30.0
"""How long an engine core may take to answer; it does so between two steps."""


class Engines:
    """The engine cores of a server, and who may ask them what.

    Args:
        client: vLLM's client of them.
        key: Of the parts that administrators reach; None: there are none.
        parts: Of the endpoint that were asked for.
    """

    def __init__(self, client: Any, key: str | None, parts: Collection[str]) -> None:
        self._client = client
        self.parts = parts
        # Of one length, so that a comparison says nothing of the key's.
        self._key = None if key is None else _digest(key)

    def __len__(self) -> int:
        return len(self._client.core_engines)

    def allows(self, authorization: str) -> bool:
        """Whether a header names the key."""
        scheme, _, key = authorization.partition(" ")
        allowed = self._key is not None and secrets.compare_digest(_digest(key), self._key)
        return allowed and scheme.lower() == "bearer"

    async def ask(self, utility: str, each: Iterable[Sequence[Any]]) -> list[Any]:
        """Return each engine's answer, in the order of their numbers.

        Args:
            utility: Name of the call.
            each: Its arguments, for each engine.

        Raises:
            HTTPException: 503: an engine is dead, or does not answer.
        """
        calls = (
            self._client._call_utility_async(utility, *args, engine=identity)
            for identity, args in zip(self._client.core_engines, each, strict=True)
        )
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), _PATIENCE_S)
        except EngineDeadError as error:
            raise HTTPException(_UNAVAILABLE, "an engine core has died; see the server's log") from error
        except TimeoutError as error:
            why = f"an engine core did not answer within {_PATIENCE_S:.0f} s; try again"
            raise HTTPException(_UNAVAILABLE, why) from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def admitted(part: str, *, keyed: bool = True) -> Callable[[Request], Engines]:
    """Return what lets a request reach the engines, where this part was asked for.

    It raises an `HTTPException`, 404: nobody asked for it; 401: a ``keyed`` part, and this is not its key.
    """

    def engines_of(request: Request) -> Engines:
        engines: Engines | None = getattr(request.app.state, STATE, None)
        if engines is None or part not in engines.parts:
            raise HTTPException(HTTPStatus.NOT_FOUND, "Not Found")
        if keyed and not engines.allows(request.headers.get("Authorization", "")):
            raise HTTPException(HTTPStatus.UNAUTHORIZED, "Unauthorized")
        return engines

    return engines_of
