"""The KV tier's admin endpoint over HTTP, below ``/v1/vllm-ext/kv-tier``: there only if ``kv_tier.admin`` asks for it.

It is an endpoint plugin in vLLM's sense, on the server's own port: paths below ``/v1`` need the server's API key. That
is checked here once more, since vLLM compares paths as strings, and lets all of them pass under ``--root-path /``.
Every engine core that this server talks to is asked, and every answer says which engine gave it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from argparse import Namespace
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext.config import KEY, parse
from vllm_ext.hints import MAX_CONVERSATION_ID_CHARS

logger = init_logger("vllm.vllm_ext.kv")

PREFIX = "/v1/vllm-ext/kv-tier"
_UTILITY = _STATE = "vllm_ext_kv_tier"
"""Names of the call to an engine core, and of what the routes find in the application's state."""
_PATIENCE_S = 30.0
"""How long an engine core may take to answer; it does so between two steps."""
_MOST_ROWS = 1000
_MOST_OFFSET = 100_000
_MAX_SALT_CHARS = 4096


class ConversationRef(BaseModel):
    """Which conversation is meant: the same name under another salt is another conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)
    """As its client named it, or as it is listed."""
    salt: str | None = Field(default=None, max_length=_MAX_SALT_CHARS)
    """``cache_salt`` of its requests; None: they had none."""
    salt_tag: str | None = Field(default=None, min_length=1, max_length=64)
    """The same as the listing shows it, where the salt is not known to the administrator."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ConversationRef:
        if self.salt and self.salt_tag:
            raise ValueError("salt and salt_tag: give one of them")
        return self


class Engines:
    """The engine cores of a server, and who may ask them.

    Args:
        client: vLLM's client of them.
        keys: API keys of the server; if there are none, everybody may ask.
    """

    def __init__(self, client: Any, keys: Sequence[str]) -> None:
        self._client = client
        self._keys = [_digest(key) for key in keys]

    def allows(self, authorization: str) -> bool:
        """Whether a header names one of the keys."""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key)
        found = [secrets.compare_digest(given, known) for known in self._keys]
        return not self._keys or (scheme.lower() == "bearer" and any(found))

    async def ask(self, utility: str, *args: Any) -> list[Any]:
        """Return each engine's answer, in the order of their numbers.

        Raises:
            HTTPException: 503: an engine is dead, or does not answer.
        """
        calls = (
            self._client._call_utility_async(utility, *args, engine=identity) for identity in self._client.core_engines
        )
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), _PATIENCE_S)
        except EngineDeadError as error:
            raise _unavailable("an engine core has died; see the server's log") from error
        except TimeoutError as error:
            raise _unavailable(f"an engine core did not answer within {_PATIENCE_S:.0f} s; try again") from error

    async def ask_tier(self, action: str, **arguments: Any) -> list[dict[str, Any]]:
        """Return what each engine's tier answers to an action of ``TierAdmin``. Raises as `ask` does."""
        return [
            {"engine": number, **answer} for number, answer in enumerate(await self.ask(_UTILITY, action, arguments))
        ]


class AdminPlugin:
    """Joins the routes to vLLM's server; see ``vllm.plugins.endpoint_plugins.interface``."""

    name = "vllm_ext_kv_tier_admin"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Let the routes find the engine cores, if this server's options ask for it."""
        if engine_client is None or not _asks_for_admin(engine_client.vllm_config.additional_config):
            return
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        setattr(state, _STATE, Engines(engine_client.engine_core, keys))
        if not keys:
            logger.warning(
                "--kv-tier-admin without --api-key: whoever reaches this server can list, pin and drop conversations"
            )


def _asks_for_admin(additional_config: Mapping[str, Any] | None) -> bool:
    options = (additional_config or {}).get(KEY)
    return bool(options) and options is not None and parse(options).kv_tier.admin


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _admit(request: Request) -> None:
    """Let a request pass to its route.

    Raises:
        HTTPException: 404: nobody asked for this endpoint; 401: the server has a key, and this is not it.
    """
    if not _engines(request).allows(request.headers.get("Authorization", "")):
        raise HTTPException(HTTPStatus.UNAUTHORIZED, "Unauthorized")


router = APIRouter(prefix=PREFIX, tags=["vllm-ext: KV tier"], dependencies=[Depends(_admit)])


@router.get("")
async def statistics(request: Request) -> dict[str, Any]:
    """Return what each engine's tier holds, and what became of what it held."""
    return {"engines": await _engines(request).ask_tier("statistics")}


@router.get("/conversations")
async def conversations(
    request: Request,
    offset: Annotated[int, Query(ge=0, le=_MOST_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MOST_ROWS)] = 100,
    sort: Literal["last_used", "chunks", "turns", "name"] = "last_used",
) -> dict[str, Any]:
    """List conversations; offset and limit are those of each engine."""
    return {"engines": await _engines(request).ask_tier("list", offset=offset, limit=limit, sort=sort)}


@router.get("/conversations/{name:path}")
async def conversation(
    request: Request, name: Annotated[str, Path(min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)]
) -> dict[str, Any]:
    """Show a conversation, under each salt that it has."""
    found = await _engines(request).ask_tier("show", name=name)
    if not any(answer["conversations"] for answer in found):
        raise _unknown(name)
    return {"engines": found}


@router.delete("/conversations")
async def empty(request: Request) -> dict[str, Any]:
    """Empty the tier, and the device's prefix cache unless requests that run hold blocks of it."""
    emptied = await _engines(request).ask("reset_prefix_cache", False, True)
    rows = [{"engine": number, "device_emptied": bool(device)} for number, device in enumerate(emptied)]
    return {"engines": rows}


@router.post("/pin")
async def pin(request: Request, ref: ConversationRef) -> dict[str, Any]:
    """Keep a conversation's chunks whatever they are worth."""
    return await _change(request, "pin", ref)


@router.post("/unpin")
async def unpin(request: Request, ref: ConversationRef) -> dict[str, Any]:
    """Let a conversation's chunks be evicted again."""
    return await _change(request, "unpin", ref)


@router.post("/drop")
async def drop(request: Request, ref: ConversationRef) -> dict[str, Any]:
    """Forget a conversation's chunks, but those that copies use now, or that other conversations' chunks follow."""
    return await _change(request, "drop", ref)


async def _change(request: Request, action: str, ref: ConversationRef) -> dict[str, Any]:
    answers = await _engines(request).ask_tier(action, name=ref.name, salt=ref.salt, salt_tag=ref.salt_tag)
    found = [answer for answer in answers if answer["conversation"] is not None]
    if not found:
        raise _unknown(ref.name, sum(answer["with_other_salts"] for answer in answers))
    refused = [answer["refused"] for answer in found if "refused" in answer]
    if len(refused) == len(found):
        raise HTTPException(HTTPStatus.CONFLICT, f"name={ref.name!r} was not pinned: {refused[0]}")
    return {"engines": found}


def _engines(request: Request) -> Engines:
    found: Engines | None = getattr(request.app.state, _STATE, None)
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, "Not Found")
    return found


def _unknown(name: str, others: int = 0) -> HTTPException:
    text = f"name={name!r}: no conversation of this name is known"
    if others:
        text += f" with this salt; {others} with others are: give salt or salt_tag"
    return HTTPException(HTTPStatus.NOT_FOUND, text)


def _unavailable(why: str) -> HTTPException:
    return HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, why)
