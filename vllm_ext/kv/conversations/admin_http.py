"""The KV tier's admin endpoint over HTTP, below ``/vllm-ext/kv-tier``: there only if ``kv_tier.admin`` asks for it.

It is an endpoint plugin in vLLM's sense, on the server's own port, but not below ``/v1``, which is what clients reach
with the server's API key. This has a key of its own, ``VLLM_EXT_ADMIN_KEY``; no other opens it, and it opens nothing
else. Every engine core that this server talks to is asked, and every answer says which engine gave it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm import envs as vllm_envs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext import envs
from vllm_ext.config import KEY, parse
from vllm_ext.hints import MAX_CONVERSATION_ID_CHARS
from vllm_ext.kv.conversations.admin import MOST_SHOWN

PREFIX = "/vllm-ext/kv-tier"
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
_UTILITY = _STATE = "vllm_ext_kv_tier"
"""Names of the call to an engine core, and of what the routes find in the application's state."""
_PATIENCE_S = 30.0
"""How long an engine core may take to answer; it does so between two steps."""
_MAX_SALT_CHARS = 4096
_CURSOR = r"^[0-9]{1,18}(\.[0-9]{1,18})*$"
"""One number for each engine."""


class ConversationRef(BaseModel):
    """Which conversation is meant, by its id, or by name and salt: under another salt a name is another one's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = Field(default=None, min_length=1, max_length=64)
    """As it is listed."""
    name: str | None = Field(default=None, min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)
    """As its client named it."""
    salt: str | None = Field(default=None, max_length=_MAX_SALT_CHARS)
    """``cache_salt`` of its requests; None: they had none."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ConversationRef:
        if (self.id is None) == (self.name is None) or (self.id is not None and self.salt is not None):
            raise ValueError("give either id, or name and, if its requests have one, salt")
        return self


class Engines:
    """The engine cores of a server, and who may ask them.

    Args:
        client: vLLM's client of them.
        key: Of the endpoint.
    """

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = _digest(key)  # of one length, so that a comparison says nothing of the key's

    def __len__(self) -> int:
        return len(self._client.core_engines)

    def allows(self, authorization: str) -> bool:
        """Whether a header names the key."""
        scheme, _, key = authorization.partition(" ")
        return secrets.compare_digest(_digest(key), self._key) and scheme.lower() == "bearer"

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

    async def ask_tier(self, action: str, *each: Mapping[str, Any], **arguments: Any) -> list[dict[str, Any]]:
        """Return what each engine's tier answers to an action of ``TierAdmin``. Raises as `ask` does.

        Args:
            action: What is asked.
            each: For each engine the arguments that are its own; none: there are no such.
            arguments: For all.
        """
        asked = [(action, {**arguments, **own}) for own in each or [{}] * len(self)]
        return [{"engine": number, **answer} for number, answer in enumerate(await self.ask(_UTILITY, asked))]


class AdminPlugin:
    """Joins the routes to vLLM's server; see ``vllm.plugins.endpoint_plugins.interface``."""

    name = "vllm_ext_kv_tier_admin"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Let the routes find the engine cores, if this server's options ask for it.

        Raises:
            ValueError: The endpoint has no key of its own; the server does not start.
        """
        options = None if engine_client is None else (engine_client.vllm_config.additional_config or {}).get(KEY)
        if not options or not parse(options).kv_tier.admin:
            return
        key = envs.admin_key()
        if key in (args.api_key or [vllm_envs.VLLM_API_KEY]):
            raise ValueError(f"{envs.ADMIN_KEY} is one of the server's API keys, which clients have: set another one")
        setattr(state, _STATE, Engines(engine_client.engine_core, key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _engines(request: Request) -> Engines:
    """Let a request that has the key reach the engines.

    Raises:
        HTTPException: 404: nobody asked for this endpoint; 401: this is not its key.
    """
    engines: Engines | None = getattr(request.app.state, _STATE, None)
    if engines is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, "Not Found")
    if not engines.allows(request.headers.get("Authorization", "")):
        raise HTTPException(HTTPStatus.UNAUTHORIZED, "Unauthorized")
    return engines


Admitted = Annotated[Engines, Depends(_engines)]
router = APIRouter(prefix=PREFIX, tags=["vllm-ext: KV tier"])


@router.get("")
async def statistics(engines: Admitted) -> dict[str, Any]:
    """Return what each engine's tier holds, and what became of what it held."""
    return {"engines": await engines.ask_tier("statistics")}


@router.get("/conversations")
async def conversations(
    engines: Admitted,
    cursor: Annotated[str | None, Query(pattern=_CURSOR, max_length=4096)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = 100,
) -> dict[str, Any]:
    """List conversations, the oldest first; the limit is that of each engine, ``next`` the cursor of the next page.

    Raises:
        VLLMValidationError: The cursor is of another number of engines (status 400).
    """
    after = [0] * len(engines) if cursor is None else [int(part) for part in cursor.split(".")]
    if len(after) != len(engines):
        allowed = f"must be next of a page before, of {len(engines)} engines; leave it out to begin anew"
        raise VLLMValidationError(f"cursor={cursor!r}: {allowed}", parameter="query.cursor")
    found = await engines.ask_tier("list", *({"cursor": number} for number in after), limit=limit)
    pages = [(answer.pop("cursor"), answer.pop("more")) for answer in found]
    following = ".".join(str(number) for number, _ in pages) if any(more for _, more in pages) else None
    return {"engines": found, "next": following}


@router.get("/conversations/{name:path}")
async def conversation(
    engines: Admitted, name: Annotated[str, Path(min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)]
) -> dict[str, Any]:
    """Show a conversation, under each salt that it has."""
    found = await engines.ask_tier("show", name=name)
    if not any(answer["conversations"] for answer in found):
        raise _unknown(ConversationRef(name=name))
    return {"engines": found}


@router.delete("/conversations")
async def empty(engines: Admitted) -> dict[str, Any]:
    """Empty the tier, and the device's prefix cache unless requests that run hold blocks of it."""
    emptied = await engines.ask("reset_prefix_cache", [(False, True)] * len(engines))
    rows = [{"engine": number, "device_emptied": bool(device)} for number, device in enumerate(emptied)]
    return {"engines": rows}


@router.post("/drop")
async def drop(engines: Admitted, ref: ConversationRef) -> dict[str, Any]:
    """Forget a conversation's chunks, but those that copies use now, or that other conversations' chunks follow."""
    answers = await engines.ask_tier("drop", **ref.model_dump(exclude_none=True))
    found = [answer for answer in answers if answer["conversation"] is not None]
    if not found:
        raise _unknown(ref, sum(answer["with_other_salts"] for answer in answers))
    return {"engines": found}


def _unknown(ref: ConversationRef, others: int = 0) -> HTTPException:
    said = f"name={ref.name!r}" if ref.id is None else f"id={ref.id!r}"
    text = f"{said}: no such conversation is known"
    if others:
        text += f" with this salt; {others} with others are: give salt, or the id that the list shows"
    return HTTPException(HTTPStatus.NOT_FOUND, text)
